"""What the packed processors share: projections, texts, and attention inside segments."""

from __future__ import annotations

from typing import Any

import torch

from ..attention.dispatch import Backend, packed_attention
from ..layout import PackedLayout
from ..segments import SegmentSpans


def project(attn: Any, hidden_states: torch.Tensor, text: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Return query, key and value, also of a module whose projections are fused."""
    source = hidden_states if text is None else text
    if not getattr(attn, "fused_projections", False):
        return attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
    if text is None:
        return tuple(attn.to_qkv(hidden_states).chunk(3, dim=-1))
    return attn.to_q(hidden_states), *attn.to_kv(source).chunk(2, dim=-1)


def split_heads(attn: Any, *sides: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Turn each `(rows, tokens, heads·head_dim)` into `(rows·tokens, heads, head_dim)`."""
    return tuple(side.flatten(0, 1).unflatten(1, (attn.heads, -1)) for side in sides)


def of_samples(layout: PackedLayout, *sides: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Lay out keys or values of the stored texts, padding behind them, as the samples' texts one after the other."""
    index = layout.text_index
    return tuple(side[: layout.num_text_tokens] if index is None else side[index] for side in sides)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, *, backend: Backend
) -> torch.Tensor:
    """Attend inside each segment: `(tokens, heads, head_dim)` in, `(tokens, heads·head_dim)` out."""
    return packed_attention(query, key, value, segments, backend=backend).flatten(1).type_as(query)


def project_out(attn: Any, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Apply the output projection and its dropout; returns the shape of `hidden_states`."""
    for module in attn.to_out:
        attended = module(attended)
    return attended.view_as(hidden_states)
