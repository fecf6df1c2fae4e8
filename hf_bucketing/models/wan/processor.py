"""Wan's self- and cross-attention over a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...packing.attention.dispatch import Backend
from ...packing.context import active_layout
from ...packing.processors.common import attend, of_samples, project, project_out, split_heads

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
            encoder_hidden_states (`torch.Tensor` of shape `(1, tokens, dim)`, *optional*): The texts; of
                image-to-video models the image tokens of all samples before them.
            attention_mask (`None`): The layout takes its place.
            rotary_emb (`tuple` of two `(rows, strip_length, 1, head_dim)`, *optional*): Cosines and sines.

        Returns:
            `torch.Tensor` of shape `(rows, strip_length, dim)`.

        Raises:
            PackingError: If no pack is being computed.
        """
        layout, image, text = active_layout(), None, encoder_hidden_states
        if text is not None and attn.add_k_proj is not None:
            image, text = text.split([text.shape[1] - layout.num_stored_text_tokens, layout.num_stored_text_tokens], 1)
        query, key, value = project(attn, hidden_states, text)
        query, key, value = split_heads(attn, attn.norm_q(query), attn.norm_k(key), value)
        if rotary_emb is not None:
            cosines, sines = (table.flatten(0, 1) for table in rotary_emb)
            query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        segments = layout.self_segments
        if text is not None:
            segments, (key, value) = layout.cross_segments, of_samples(layout, key, value)
        attended = attend(query, key, value, segments, backend=self.backend)
        if image is not None:
            keys, values = _project_image(attn, image)
            segments = layout.even_segments(image.shape[1])
            attended = attended + attend(query, keys, values, segments, backend=self.backend)
        return project_out(attn, attended, hidden_states)


def _project_image(attn: WanAttention, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return key and value of the image tokens, `(tokens, heads, head_dim)`."""
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(image).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(image), attn.add_v_proj(image)
    return split_heads(attn, attn.norm_added_k(key), value)


def _rotate(tokens: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of `(tokens, heads, head_dim)` as pairs, as Wan does."""
    even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., 0::2], sines[..., 1::2]
    rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return rotated.flatten(-2).type_as(tokens)
