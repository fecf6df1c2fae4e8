"""Mochi: learned rotary frequencies; text pooled by attention, and in joint attention in a width of its own.

The pipeline masks the padding of a text: pass what the mask keeps. The text is pooled once per sample, and the result
modulates all its strips. The model runs from noise at time 0 to data at time 1000 and predicts data − noise, which the
pipeline's scheduler turns round. So does this family: timesteps are 1000 for noise, and outputs are noise − data, as
for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.processors import PackedJointAttnProcessor, Rotary
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ..joint import JointFamily, texts_by_sample
from ..recipe import Recipe
from ..texts import TextEmbeddings

if TYPE_CHECKING:
    from diffusers.models.embeddings import MochiAttentionPool
    from diffusers.models.transformers.transformer_mochi import MochiRoPE


class PackedMochiAttnProcessor(PackedJointAttnProcessor):
    """Attention of `MochiAttention` over the strips of a pack; each head has rotary tables of its own."""

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate neighbouring channels of `(strips, strip_length, H, D)` by tables `(…, H, D / 2)`, in float32."""
        cosines, sines = rotary
        even, odd = tokens.unflatten(-1, (-1, 2)).float().unbind(-1)
        first, second = even * cosines - odd * sines, even * sines + odd * cosines
        return torch.stack([first.to(tokens.dtype), second.to(tokens.dtype)], -1).flatten(-2)


class MochiFamily(JointFamily):
    """Packing of `MochiTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Mochi"
    transformer_class = "MochiTransformer3DModel"
    tested_forwards = ("1f541270a362",)
    processor_class = PackedMochiAttnProcessor
    stock_processors = ("MochiAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="text_embed_dim", mask="encoder_attention_mask", needs_mask=True)
    attention_kwargs = "attention_kwargs"
    negates = True
    takes = ()  # the model pools the text itself
    turns_timesteps = True
    text_norms = ("transformer_blocks.*.norm1_context",)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        pooler = transformer.time_embed.pooler
        return [
            transformer.patch_embed.register_forward_hook(_in_order),
            transformer.rope.register_forward_hook(_tables_by_strip),
            pooler.register_forward_pre_hook(_texts_by_sample),
            pooler.register_forward_hook(_by_strip),
            *self.hook_norms(transformer),
        ]


def _in_order(embed: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Lay out tokens in order, as those of a video: norms round sums to float32, whose order follows the memory's."""
    return output.contiguous()


def _tables_by_strip(rope: MochiRoPE, args: tuple[Any, ...], output: Rotary) -> Rotary:
    """Replace the tables of a strip by those of its part of the sample; frequencies are learned, so none are kept."""
    frequencies, *_ = args
    device = frequencies.device
    # rope.forward instead of rope(…), which would call the hook again
    return position_strips(
        active_layout(), lambda grid: rope.forward(frequencies, *grid, device=device, dtype=torch.float32)
    )


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _texts_by_sample(pooler: MochiAttentionPool, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    slots, _ = args
    return texts_by_sample(slots)


def _by_strip(pooler: MochiAttentionPool, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output[active_layout().strip_segments]


class MochiRecipe(Recipe):
    """Recipe of `MochiPipeline`; see [`Recipe`].

    The linear-quadratic noise levels of the pipeline are a choice of sampling steps; training draws any level.
    """

    pipeline_class = "MochiPipeline"
    family = MochiFamily()
    default_sequence_length = 256
    native_sizes = ((480, 848),)

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        return math.prod(vae["temporal_expansions"]), math.prod(vae["spatial_expansions"])

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; one by one if any is empty, because the pipeline looks at the last one of a batch alone."""
        if "" not in captions or len(captions) == 1:
            return super().encode_text(captions)
        values, masks, _ = zip(*(self.encode_text([caption]) for caption in captions), strict=True)
        return TextEmbeddings(torch.cat(values), torch.cat(masks))


RECIPES = (MochiRecipe,)
