"""CogView4: images whose rows and columns are stretched over fixed axes of rotary positions; text is not rotated.

The pipeline pads a text to a multiple of 16 tokens and masks none of them: pass the embeddings with that padding. A
mask is for what follows it, in stacks of several texts. Of diffusers' processors the one for training masks that; the
default one adds the ones and zeros of its mask to the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor, CogView4TrainingAttnProcessor

from ...devices import to_device
from ...packing.batch import Rows
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.positions import shape_only
from ...packing.processors import PackedJointAttnProcessor, Rotary, rotate_channels
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_joint_norms

TEXT_MULTIPLE = 16
"""The pipeline pads a text to a multiple of so many tokens."""


class PackedCogView4AttnProcessor(PackedJointAttnProcessor):
    """Joint attention of CogView4 over the strips of a pack."""

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate the halves of a head's channels against each other."""
        return rotate_channels(tokens, rotary, halves=True)


class CogView4Family(JointFamily):
    """Packing of `CogView4Transformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    `original_size`, `target_size` and `crop_coords`, `(n, 2)` each, are pixels: height and width, or top and left.
    """

    transformer_class = "CogView4Transformer2DModel"
    tested_forwards = ("8fde5b83ce78",)
    processor_class: ClassVar[type[PackedJointAttnProcessor]] = PackedCogView4AttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = ("CogView4AttnProcessor", "CogView4TrainingAttnProcessor")
    text = TextTokens(rows="slots", channels="text_embed_dim")
    images_only = True
    latents_as = "images"
    attention_kwargs: ClassVar[str | None] = "attention_kwargs"
    position_module = "rope"

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the sizes and the corner that the pipeline passes by default: those of the whole image."""
        pixels = 8 * int(transformer.config.patch_size)

        def sizes(grids: Sequence[Grid]) -> torch.Tensor:
            return torch.tensor([[float(pixels * rows), float(pixels * columns)] for _, rows, columns in grids])

        return {
            "original_size": sizes,
            "target_size": sizes,
            "crop_coords": lambda grids: torch.zeros(len(grids), 2),
        }

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables as `rope` computes them."""
        latent = shape_only(torch.empty(()), grid, (1, module.patch_size, module.patch_size))
        return tuple(to_device(table, device) for table in module.forward(latent[:, :, 0]))

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the mask of the text, if it has one, and give the model diffusers' processors that can mask it."""
        if rows.text_mask is None:
            return {}
        for block in transformer.transformer_blocks:
            if isinstance(block.attn1.processor, CogView4AttnProcessor):
                block.attn1.set_processor(CogView4TrainingAttnProcessor())
        return {"attention_kwargs": {"text_attn_mask": rows.text_mask.int()}}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the norms, to modulate text by its own sample's timestep and sizes."""
        norms = [block.norm1 for block in transformer.transformer_blocks]
        return [*super().hook_positions(transformer, base_size), *hook_joint_norms(norms, text_outputs=range(5, 10))]


FAMILY = CogView4Family()
