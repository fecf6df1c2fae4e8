"""Joint attention over a pack: each sample's tokens and its text tokens attend to each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb

from ..attention.dispatch import Backend, packed_attention
from ..context import active_layout

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, each of shape `(rows, tokens, heads, head_dim)`."""


class PackedJointAttnProcessor:
    """Attention of SD3, CogVideoX, HunyuanVideo and Flux over the strips of a pack, each with its text slots.

    Text has projections of its own where the module has them (`add_q_proj`), else those of the tokens. A module that
    is given no text finds it before the tokens of each strip (Flux), or attends to tokens alone (SD3.5).

    Args:
        backend (`"segments"`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
    """

    def __init__(self, backend: Backend = "segments") -> None:
        self.backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend inside each sample.

        Args:
            attn (`Attention` or `FluxAttention`): Holds the projections and norms.
            hidden_states (`torch.Tensor` of shape `(rows, strip_length, dim)`): The strips; of shape `(rows,
                text_slots + strip_length, dim)` where text comes in the same tensor.
            encoder_hidden_states (`torch.Tensor` of shape `(rows, text_slots, dim)`, *optional*): The text slots.
            attention_mask (`torch.Tensor`, *optional*): The layout takes its place.
            image_rotary_emb (`tuple` of two `(rows, strip_length, head_dim)`, *optional*): Cosines and sines of the
                tokens; text is not rotated.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`, and with `encoder_hidden_states` another in its shape.

        Raises:
            PackingError: If no pack is being computed.
        """
        layout = active_layout()
        text, tokens = hidden_states.split([hidden_states.shape[1] - layout.strip_length, layout.strip_length], 1)
        if encoder_hidden_states is not None:
            text = encoder_hidden_states
        video = _project(attn, tokens)
        if image_rotary_emb is not None:
            video = (_rotate(video[0], image_rotary_emb), _rotate(video[1], image_rotary_emb), video[2])
        if not text.shape[1]:
            query, key, value = (part.flatten(0, 1) for part in video)
            attended = packed_attention(query, key, value, layout.self_segments, backend=self.backend)
            return _through(attn.to_out, attended.flatten(1).type_as(query).view_as(hidden_states))
        words = _project(attn, text, added=_has(attn, "add_q_proj"))
        query, key, value = (layout.joint.gather(*pair) for pair in zip(video, words, strict=True))
        attended = packed_attention(query, key, value, layout.joint.segments, backend=self.backend)
        tokens, text = layout.joint.scatter(attended.flatten(1).type_as(query))
        if encoder_hidden_states is None:
            return torch.cat([text, tokens], 1)
        if _has(attn, "to_out"):
            tokens = _through(attn.to_out, tokens)
            text = text if _has(attn, "add_q_proj") else _through(attn.to_out, text)
        return tokens, attn.to_add_out(text) if _has(attn, "to_add_out") else text


def _project(attn: Any, states: torch.Tensor, *, added: bool = False) -> Heads:
    if attn.fused_projections:
        parts = (attn.to_added_qkv if added else attn.to_qkv)(states).chunk(3, dim=-1)
    else:
        names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
        parts = [getattr(attn, name)(states) for name in names]
    query, key, value = (part.unflatten(-1, (attn.heads, -1)) for part in parts)
    norm_query, norm_key = (attn.norm_added_q, attn.norm_added_k) if added else (attn.norm_q, attn.norm_k)
    query = query if norm_query is None else norm_query(query)
    return query, key if norm_key is None else norm_key(key), value


def _rotate(tokens: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate `(rows, strip_length, heads, head_dim)` by `(rows, strip_length, head_dim)`, as one sequence."""
    cosines, sines = (part.flatten(0, 1) for part in rotary)
    rotated: torch.Tensor = apply_rotary_emb(tokens.flatten(0, 1)[None], (cosines, sines), sequence_dim=1)
    return rotated.view_as(tokens)


def _through(modules: Iterable[torch.nn.Module], states: torch.Tensor) -> torch.Tensor:
    for module in modules:
        states = module(states)
    return states


def _has(attn: Any, name: str) -> bool:
    """Return whether a part is there: diffusers leaves it out, or sets it to None."""
    return getattr(attn, name, None) is not None
