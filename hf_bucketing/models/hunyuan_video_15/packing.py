"""HunyuanVideo 1.5: rotary positions; image tokens, glyph text and refined text in joint attention with the tokens.

The latents have the channels of the condition and of its mask behind their own. The stock forward embeds the image
tokens, the glyph text (ByT5) and the text (Qwen2.5-VL) of each sample in a row of its own, and joins the three. A hook
on the first block puts them into the text slots of the sample's strips. Whether there is an image is decided for each
sample: embeddings that are all zero, as the text-to-video pipeline passes them, are none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.layout import Grid
from ..hunyuan_video.packing import HunyuanVideoFamily
from ..joint import JointFamily, hook_text_modulation

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15TokenRefiner

GLYPHS, GLYPH_MASK, IMAGE = "encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds"
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729
"""Tokens that the pipelines pass of the glyph text, padding included, and of an image."""


class HunyuanVideo15Family(HunyuanVideoFamily):
    """Packing of `HunyuanVideo15Transformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    It takes `encoder_hidden_states_2` of shape `(n, tokens, text_embed_2_dim)` with the mask
    `encoder_attention_mask_2`, and `image_embeds` of shape `(n, tokens, image_embed_dim)`, zeros for samples without
    an image.
    """

    transformer_class = "HunyuanVideo15Transformer3DModel"
    tested_forwards = ("2ae84770e72f",)
    stock_processors = ("HunyuanVideo15AttnProcessor2_0",)
    conditioning_by_strip = False

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return what the last block does with the text after attention."""
        last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
        return f"{last}attn.to_add_out", f"{last}ff_context"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models distilled by MeanFlow, which embed a second timestep."""
        if transformer.config.use_meanflow:
            raise PackingError(
                "This HunyuanVideo 1.5 transformer embeds a second timestep (use_meanflow=True), as distilled models "
                "do, for which there is no training objective here; use a model without it."
            )
        JointFamily.check(self, transformer, strip_length=strip_length)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the glyph text with its mask, and the image tokens; drawn with an image for every other sample."""
        config = transformer.config

        def image(count: int) -> torch.Tensor:
            return torch.randn(count, IMAGE_TOKENS, config.image_embed_dim) * (torch.arange(count) % 2).view(-1, 1, 1)

        return {
            GLYPHS: lambda grids: torch.randn(len(grids), GLYPH_TOKENS, config.text_embed_2_dim),
            GLYPH_MASK: lambda grids: (torch.arange(GLYPH_TOKENS) < torch.arange(len(grids))[:, None] * 5).float(),
            IMAGE: lambda grids: image(len(grids)),
        }

    def added_lengths(self, conditioning: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens of each sample's glyph text, and those of its image if it has one."""
        image = conditioning[IMAGE]
        has_image = (image != 0).flatten(1).any(1)
        lengths = conditioning[GLYPH_MASK].bool().sum(1) + has_image * image.shape[1]
        return tuple(lengths.tolist())

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the strips, and a row of text for each sample, with its mask."""
        mask = [batch.text.new_ones(length) for length in batch.layout.text_lengths]
        return replace(super().rows(batch), text_mask=pad_sequence(mask, batch_first=True))

    def text_rows(self, batch: PackedBatch) -> torch.Tensor:
        """Give each sample a row of text."""
        layout = batch.layout
        texts = batch.text if layout.text_index is None else batch.text.index_select(0, layout.text_index)
        return pad_sequence(list(texts.split(layout.text_lengths)), batch_first=True)

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return timesteps in the model's dtype, as its pipelines pass them: it embeds them in their own dtype."""
        return {"timestep": rows.timesteps.to(transformer.dtype)}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also what embeds timesteps, the text refiner, the first block, and the norms of text."""
        return [
            *JointFamily.hook_positions(self, transformer, base_size),
            transformer.time_embed.register_forward_pre_hook(_in_its_dtype),
            transformer.context_embedder.register_forward_pre_hook(_timestep_per_sample),
            transformer.transformer_blocks[0].register_forward_pre_hook(_fill_slots),
            *hook_text_modulation(transformer),
        ]


def _in_its_dtype(time_embed: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    (timesteps,) = args
    return (timesteps.to(time_embed.timestep_embedder.linear_1.weight.dtype),)


def _timestep_per_sample(refiner: HunyuanVideo15TokenRefiner, args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    texts, timesteps, mask = args
    return texts, timesteps[active_layout().joint.first_strips], mask


@torch.compiler.disable  # its indices follow the texts of the pack
def _fill_slots(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the joined texts `(n, length, dim)` into the text slots of the samples' strips.

    The mask covers image tokens, glyph text and text in turn. If any sample has an image, it covers the image tokens
    of all: those before a sample's last tokens are not its own.
    """
    strips, texts, embedding, mask, *rest = args
    layout = active_layout()
    lengths = torch.tensor(layout.joint_text_lengths, device=texts.device)
    firsts = mask.sum(1) - lengths + torch.arange(len(texts), device=texts.device) * texts.shape[1]
    before = torch.tensor([0, *itertools.accumulate(layout.joint_text_lengths)][:-1], device=texts.device)
    total = sum(layout.joint_text_lengths)
    offsets = (firsts - before).repeat_interleave(lengths, output_size=total)
    own = texts.flatten(0, 1).index_select(0, torch.arange(total, device=texts.device) + offsets)
    return strips, layout.joint.fill_slots(own), embedding, mask, *rest


FAMILY = HunyuanVideo15Family()
