"""LTX-Video's self- and cross-attention over a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...packing.attention.dispatch import Backend
from ...packing.context import active_layout
from ...packing.processors.common import attend, of_samples, project, project_out, split_heads

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_ltx import LTXAttention


class PackedLTXVideoAttnProcessor:
    """Self- and cross-attention of LTX-Video over the strips of a pack.

    Args:
        backend (`str`): See [`packed_attention`][hf_bucketing.packing.packed_attention].
    """

    def __init__(self, backend: Backend = "segments") -> None:
        self.backend = backend

    def __call__(
        self,
        attn: LTXAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`LTXAttention`): Holds the projections and norms.
            hidden_states (`torch.Tensor` of shape `(rows, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(rows, tokens, dim)`, *optional*): The texts, one after the
                other over all rows, padding at the end.
            attention_mask (`None`): The layout takes its place.
            image_rotary_emb (`tuple` of two `(rows, strip_length, dim)`, *optional*): Cosines and sines.

        Returns:
            `torch.Tensor` of shape `(rows, strip_length, dim)`.

        Raises:
            PackingError: If no pack is being computed.
        """
        from diffusers.models.transformers.transformer_ltx import apply_rotary_emb

        layout = active_layout()
        query, key, value = project(attn, hidden_states, encoder_hidden_states)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query, key = apply_rotary_emb(query, image_rotary_emb), apply_rotary_emb(key, image_rotary_emb)
        query, key, value = split_heads(attn, query, key, value)
        segments = layout.self_segments
        if encoder_hidden_states is not None:
            segments, (key, value) = layout.cross_segments, of_samples(layout, key, value)
        return project_out(attn, attend(query, key, value, segments, backend=self.backend), hidden_states)
