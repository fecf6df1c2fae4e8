"""Attention of diffusers' common `Attention` module over a pack: Latte, PixArt, Allegro and Cosmos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from ...errors import PackingError
from ..attention.dispatch import Backend
from ..context import active_layout
from .common import attend, of_samples, project, project_out, split_heads

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention

Scope: TypeAlias = Literal["sample", "frame", "place"]

Rotary: TypeAlias = "tuple[torch.Tensor, torch.Tensor] | tuple[tuple[torch.Tensor, torch.Tensor], ...]"
"""Cosines and sines `(rows, strip_length, channels)`, or a pair of them for each equal part of a head's channels."""


class PackedAttnProcessor:
    """Self- and cross-attention of `diffusers.models.attention_processor.Attention` over the strips of a pack.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
        scope (`"sample"`, `"frame"` or `"place"`): What a token attends to in self-attention: its sample, its frame
            (Latte's spatial blocks), or its row and column in all frames (Latte's temporal blocks).
    """

    def __init__(self, backend: Backend = "segments", *, scope: Scope = "sample") -> None:
        self.backend = backend
        self.scope = scope

    def __call__(
        self,
        attn: Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        temb: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`Attention`): Holds the projections and norms.
            hidden_states (`torch.Tensor` of shape `(rows, tokens, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(any, tokens, dim)`, *optional*): The texts, one after the
                other, padding at the end.
            attention_mask (`None`): The layout takes its place.
            temb (`None`): Belongs to modules that these families do not have.
            image_rotary_emb (`tuple`, *optional*): Cosines and sines `(rows, strip_length, head_dim)` (Cosmos), or a
                pair of them for each equal part of the channels of a head (Allegro).

        Returns:
            `torch.Tensor` of shape `(rows, tokens, dim)`.

        Raises:
            PackingError: If no pack is being computed, or the module has norms over the tokens or a residual.
        """
        if attn.group_norm is not None or attn.spatial_norm is not None or attn.residual_connection:
            raise PackingError("An attention module with a group norm, spatial norm or residual cannot run a pack.")
        layout = active_layout()
        if encoder_hidden_states is not None and attn.norm_cross:
            encoder_hidden_states = attn.norm_encoder_hidden_states(encoder_hidden_states)
        query, key, value = split_heads(attn, *project(attn, hidden_states, encoder_hidden_states))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        if image_rotary_emb is not None and encoder_hidden_states is None:
            query, key = _rotate(query, image_rotary_emb), _rotate(key, image_rotary_emb)
        if encoder_hidden_states is not None:
            key, value = of_samples(layout, key, value)
            attended = attend(query, key, value, layout.cross_segments, backend=self.backend)
        elif self.scope == "place":
            places = layout.by_frame
            query, key, value = query[places.order], key[places.order], value[places.order]
            attended = attend(query, key, value, places.places, backend=self.backend)[places.inverse]
        else:
            segments = layout.self_segments if self.scope == "sample" else layout.by_frame.frames
            attended = attend(query, key, value, segments, backend=self.backend)
        return project_out(attn, attended, hidden_states) / attn.rescale_output_factor


def _rotate(tokens: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the two halves of each part of the channels of `(tokens, heads, head_dim)` against each other."""
    from diffusers.models.embeddings import apply_rotary_emb

    pairs: Any = (rotary,) if isinstance(rotary[0], torch.Tensor) else rotary
    rotated = []
    for part, (cosines, sines) in zip(tokens.chunk(len(pairs), dim=-1), pairs, strict=True):
        tables = cosines.flatten(0, 1), sines.flatten(0, 1)
        rotated.append(apply_rotary_emb(part[None], tables, use_real_unbind_dim=-2, sequence_dim=1)[0])
    return torch.cat(rotated, dim=-1)
