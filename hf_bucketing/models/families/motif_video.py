"""Motif-Video: joint attention as of HunyuanVideo, cross-attention to text beside it, and blocks that decode.

The last blocks, those that decode, begin with the latents again: their tokens attend to each other and to those that
the blocks before have made, in the place of a text. Both lie in the strips of their sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...devices import to_device
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout, permute
from ...packing.names import Backend, Grid
from ...packing.positions import axis_coordinates
from ...packing.processors import PackedJointAttnProcessor, Rotary, attend
from ...packing.segments import SegmentSpans
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_row_modulation
from ..positions import rotary_tables
from .hunyuan import GuiderRecipe


class PackedMotifVideoCrossAttnProcessor(PackedJointAttnProcessor):
    """Cross-attention of Motif-Video, from the tokens of strips to the text of their sample."""

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        return (layout.joint.token_to_text,)

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
        image_embed_seq_len: int = 0,
    ) -> torch.Tensor:
        """Attend inside each sample.

        Args:
            attn (`MotifVideoCrossAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, text_slots, dim)`): The text slots.
            attention_mask (`torch.Tensor`, *optional*): Unused; the layout takes its place.
            image_rotary_emb (`tuple`): Cosines and sines of the tokens.
            image_embed_seq_len (`int`): 0, because packs have no images beside the text.

        Returns:
            `torch.Tensor` in the shape of `hidden_states`.
        """
        assert image_rotary_emb is not None, "the model rotates all tokens"
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1)))
        query = self.rotate(query, image_rotary_emb).flatten(0, 1)
        keys = encoder_hidden_states.flatten(0, 1)
        key = attn.norm_k(attn.to_k(keys).unflatten(-1, (attn.heads, -1)))
        value = attn.to_v(keys).unflatten(-1, (attn.heads, -1))
        attended = attend(query, key, value, active_layout().joint.token_to_text, backend=self.backend)
        output: torch.Tensor = attn.to_out[0](attended.flatten(1)).view_as(hidden_states)
        return output


class Doubled(NamedTuple):
    """Places of the tokens of decoding blocks: those of each sample, then those it is decoded from.

    Attributes:
        order (`torch.Tensor` of shape `(2·num_tokens,)`): Index of each entry among both kinds of tokens.
        inverse (`torch.Tensor` of shape `(2·num_tokens,)`): The inverse permutation of `order`.
        segments ([`SegmentSpans`]): Attention of each sample's tokens of both kinds to each other.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    segments: SegmentSpans


class PackedMotifVideoSingleAttnProcessor(PackedJointAttnProcessor):
    """Attention of the single blocks of Motif-Video over the strips of a pack.

    Blocks that decode attend over both kinds of tokens of a sample. They are those that get no mask.
    """

    def segments(self, layout: PackedLayout) -> Sequence[SegmentSpans]:
        """Return those of tokens and text, and those of both kinds of tokens."""
        return layout.joint.segments, self.doubled(layout).segments

    def doubled(self, layout: PackedLayout) -> Doubled:
        """Return where the tokens lie, which is made once for each layout."""

        def make() -> Doubled:
            count, spans = layout.num_tokens, layout.attended_spans
            index = torch.arange(count)
            real = [part for start, stop in spans for part in (index[start:stop], index[start:stop] + count)]
            ends = torch.tensor([0, *(2 * (stop - start) for start, stop in spans)]).cumsum(0).tolist()
            among = torch.zeros(2 * count, dtype=torch.bool).index_fill(0, torch.cat(real), True)
            order = torch.cat([*real, (~among).nonzero()[:, 0]])
            segments = SegmentSpans.within(list(itertools.pairwise(ends)), 2 * count)
            return Doubled(to_device(order, layout.device), to_device(order.argsort(), layout.device), segments)

        return layout.self_segments.made("doubled", make)

    def __call__(  # type: ignore[override]
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Any:
        """Attend inside each sample.

        Args:
            attn (`MotifVideoAttention`): Module with the projections and norms.
            hidden_states (`torch.Tensor` of shape `(strips, strip_length, dim)`): The strips.
            encoder_hidden_states (`torch.Tensor` of shape `(strips, length, dim)`): The text slots, or the tokens that
                the strips are decoded from.
            attention_mask (`torch.Tensor`, *optional*): None in blocks that decode; else unused.
            image_rotary_emb (`tuple`): Cosines and sines of the strips' tokens; the others are not rotated.

        Returns:
            Two `torch.Tensor` in the shapes of both.
        """
        if attention_mask is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        order, inverse, segments = self.doubled(active_layout())
        image_heads = self.heads(attn, hidden_states, image_rotary_emb)
        text_heads = self.heads(attn, encoder_hidden_states)
        query, key, value = (
            permute(torch.cat([side.flatten(0, 1) for side in pair]), order, inverse)
            for pair in zip(image_heads, text_heads, strict=True)
        )
        attended = attend(query, key, value, segments, backend=self.backend)
        tokens, rest = permute(attended.flatten(1), inverse, order).chunk(2)
        return tokens.view_as(hidden_states), rest.view_as(encoder_hidden_states)


class MotifVideoFamily(JointFamily):
    """Packing of `MotifVideoTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Motif-Video"
    transformer_class = "MotifVideoTransformer3DModel"
    tested_forwards = ("79e6fbf1bb7e",)
    stock_processors = ("MotifVideoAttnProcessor2_0", "MotifVideoCrossAttnProcessor2_0")
    text = TextTokens(rows="slots", channels="text_embed_dim", mask="encoder_attention_mask", needs_mask=True)
    interpolates = True
    strips_have_positions = False
    position_module = "rope"
    attention_kwargs = "attention_kwargs"
    unused_parts = ("image_embedder.",)  # packs have no image beside the text
    text_norms = ("transformer_blocks.*.norm1_context",)

    def processor(self, name: str, backend: Backend) -> Any:
        if name.endswith(".cross_attn"):
            return PackedMotifVideoCrossAttnProcessor(backend)
        if name.startswith("single_transformer_blocks."):
            return PackedMotifVideoSingleAttnProcessor(backend)
        return super().processor(name, backend)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        axes = axis_coordinates(grid, base_size, device=device)
        return rotary_tables(module.rope_dim, axes, theta=module.theta, dtype=torch.float64)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the norms of the single blocks that do not decode."""
        joint = transformer.single_transformer_blocks
        joint = joint[: len(joint) - transformer.config.num_decoder_layers]
        return [
            *super().hook_positions(transformer, base_size),
            *hook_row_modulation([block.norm for block in joint], text_first=False),
        ]


class MotifVideoRecipe(GuiderRecipe):
    """Recipe of `MotifVideoPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "MotifVideoPipeline"
    family = MotifVideoFamily()
    default_sequence_length = 512
    trims_text = True
    prompt_outputs = ("values", "", "mask")
    native_sizes = ((736, 1280),)


REFUSED = {
    "MotifVideoImage2VideoPipeline": (
        "the text encoder's tokens of an image stand beside the text in its transformer, where packs hold text alone"
    )
}


RECIPES = (MotifVideoRecipe,)
