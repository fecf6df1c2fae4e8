"""Qwen-Image: images in 2×2 blocks; rotary positions from the middle of an image, and of text beyond its edge.

The pipeline masks the padding of a text: pass what the mask keeps. Timesteps are the scheduler's, up to 1000, as for
the other families; the model gets a thousandth of them, as from its pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.family import UNLIMITED, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.processors import PackedJointAttnProcessor, Rotary
from ...packing.texts import TextTokens
from ..joint import JointFamily, embeddings_of_text

BLOCK = 2
"""Latent rows and columns that the pipeline puts into one token."""


class PackedQwenDoubleStreamAttnProcessor(PackedJointAttnProcessor):
    """Joint attention of Qwen-Image over the strips of a pack."""

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply pairs of channels of `(…, H, D)` as complex numbers in float32, like the stock processor."""
        pairs = torch.view_as_complex(tokens.float().unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.complex(*rotary).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(tokens)


class QwenImageFamily(JointFamily):
    """Packing of `QwenImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "QwenImageTransformer2DModel"
    tested_forwards = ("ff06e8bc147f",)
    processor_class = PackedQwenDoubleStreamAttnProcessor
    stock_processors = ("QwenDoubleStreamAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="joint_attention_dim")
    images_only = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)
    position_module = "pos_embed"
    rotates_text = True
    max_references = UNLIMITED

    def unused(self, transformer: Transformer) -> Sequence[str]:
        """Return what the last block does with the text after attention."""
        last = f"transformer_blocks.{len(transformer.transformer_blocks) - 1}."
        return f"{last}attn.to_add_out", f"{last}txt_mlp"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models of layers, guidance that diffusers cannot run, and other blocks than those of the pipeline."""
        config = transformer.config
        if config.use_layer3d_rope or config.use_additional_t_cond:
            raise PackingError(
                "This transformer is of Qwen-Image-Layered (use_layer3d_rope, use_additional_t_cond): a sample is "
                "several images, the last one a condition, which a pack of single images cannot hold."
            )
        if config.guidance_embeds:
            raise PackingError(
                "This Qwen-Image transformer has guidance_embeds, but no embedding of guidance: its forward in "
                "diffusers fails when it gets guidance."
            )
        if config.patch_size != BLOCK or config.in_channels % BLOCK**2:
            raise PackingError(
                f"A Qwen-Image token holds {BLOCK}×{BLOCK} latent pixels, so patch_size must be {BLOCK} and "
                f"in_channels a multiple of {BLOCK**2}; got {config.patch_size} and {config.in_channels}."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides for which the tables have positions, counted from the middle in both directions."""
        positions = len(transformer.pos_embed.pos_freqs)
        return 1, 2 * positions, 2 * positions

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also texts that reach beyond the positions: they begin where the image of their sample ends."""
        super().check_layout(transformer, layout, stretched=stretched)
        positions = len(transformer.pos_embed.pos_freqs)
        for sample, (grids, length) in enumerate(zip(layout.sample_grids, layout.text_lengths, strict=True)):
            if _first_position(grids) + length > positions:
                raise PackingError(
                    f"The text of sample {sample} has {length} tokens from position {_first_position(grids)} on, and "
                    f"this model has {positions} positions."
                )

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the real and imaginary parts of an image's positions."""
        image, _ = module.forward([grid], device=device, max_txt_seq_len=0)
        return image.real, image.imag

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Return the positions of references, which are further frames."""
        images, _ = module.forward([list(grids)], device=device, max_txt_seq_len=0)
        shown = images[math.prod(grids[0]) :]
        return shown.real, shown.imag

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Return the real and imaginary parts of a text's positions, which follow those of its images."""
        text = to_device(module.pos_freqs[_first_position(grids) :][:length], device)
        return text.real, text.imag

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the modulation of text, to give it its own sample's timestep."""
        hooks = [
            block.txt_mod.register_forward_pre_hook(embeddings_of_text) for block in transformer.transformer_blocks
        ]
        hooks.append(transformer.pos_embed.register_forward_pre_hook(_one_shape))
        return [*super().hook_positions(transformer, base_size), *hooks]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the grids of each row, and the mask of the text; in a pack, hook and layout take their place."""
        return {
            "img_shapes": [list(rows.grids)] * len(rows.latents),
            **super().inputs(rows),
            "timestep": rows.timesteps / 1000,
            "encoder_hidden_states_mask": rows.text_mask,
        }

    def rows(self, batch: PackedBatch) -> Rows:
        """Say how many tokens of each strip are shown: models with `zero_cond_t` modulate them as clean ones."""
        rows, length = super().rows(batch), batch.layout.strip_length
        if batch.layout.shown is None:
            return rows
        counts = batch.layout.own_tokens_by_strip
        shapes = [[(1, 1, count), (1, 1, length - count)] for count in counts]
        return replace(rows, conditioning={**rows.conditioning, "img_shapes": shapes})


def _one_shape(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the position module the shape of one part: its output is replaced, and it takes no strips of several."""
    (first, *_), *others = args
    return [first[:1]], *others


def _first_position(grids: Sequence[Grid]) -> int:
    """Return the position of a text's first token."""
    return max(max(rows // 2, columns // 2) for _, rows, columns in grids)


FAMILY = QwenImageFamily()
