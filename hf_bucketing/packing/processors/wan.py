"""Wan's self- and cross-attention over a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..attention import Backend, packed_attention
from ..context import active_layout

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanAttention


class PackedWanAttnProcessor:
    """Self- and cross-attention of Wan over the strips of a pack, with the layout that `packed_forward` set.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
    """

    def __init__(self, backend: Backend = "segments") -> None:
        self.backend = backend

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`WanAttention`): Holds the projections and norms.
            hidden_states (`torch.Tensor` of shape `(rows, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(1, num_text_tokens, dim)`, *optional*): The texts.
            attention_mask (`None`): The layout takes its place.
            rotary_emb (`tuple` of two `(rows, strip_length, 1, head_dim)`, *optional*): Cosines and sines.

        Returns:
            `torch.Tensor` of shape `(rows, strip_length, dim)`.

        Raises:
            PackingError: If no pack is being computed.
        """
        layout = active_layout()
        segments = layout.self_segments if encoder_hidden_states is None else layout.cross_segments
        query, key, value = _project(attn, hidden_states, encoder_hidden_states)
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (tokens.unflatten(2, (attn.heads, -1)) for tokens in (query, key, value))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        query, key, value = (tokens.flatten(0, 1) for tokens in (query, key, value))
        attended = packed_attention(query, key, value, segments, backend=self.backend).flatten(1).type_as(query)
        for module in attn.to_out:
            attended = module(attended)
        return attended.view_as(hidden_states)


def _project(
    attn: WanAttention, hidden_states: torch.Tensor, text: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value, also of a model on which `fuse_qkv_projections` was called."""
    source = hidden_states if text is None else text
    if not getattr(attn, "fused_projections", False):
        return attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source)
    if text is None:
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return query, key, value
    key, value = attn.to_kv(source).chunk(2, dim=-1)
    return attn.to_q(hidden_states), key, value


def _rotate(tokens: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of `(rows, strip_length, heads, head_dim)` as pairs, as Wan does."""
    even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., 0::2], sines[..., 1::2]
    rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return rotated.flatten(-2).type_as(tokens)
