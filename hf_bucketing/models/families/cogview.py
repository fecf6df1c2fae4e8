"""CogView4 and CogView3-Plus: images, with sizes as conditions; text in joint attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4AttnProcessor, CogView4TrainingAttnProcessor

from ...devices import to_device
from ...packing.batch import Rows
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.positions import shape_only
from ...packing.processors import PackedJointAttnProcessor, Rotary, rotate_channels
from ...packing.texts import TextTokens, pad_texts
from ..control import ControlRecipe, control_as
from ..joint import JointFamily
from ..positions import hook_linear_patch_embed
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
from ..shift import ShiftLaw, ShiftOfLatents, shift_of_scheduler
from ..texts import TextEmbeddings

TEXT_MULTIPLE = 16
"""The pipeline pads a text to a multiple of so many tokens."""


class PackedCogView4AttnProcessor(PackedJointAttnProcessor):
    """Joint attention of CogView4 over the strips of a pack."""

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rotate the halves of a head's channels against each other."""
        return rotate_channels(tokens, rotary, halves=True)


class CogView4Family(JointFamily):
    """CogView4: images whose rows and columns are stretched over fixed axes of rotary positions; text is not rotated.

    The pipeline pads a text to a multiple of 16 tokens and masks none of them: pass the embeddings with that padding.
    A mask is for what follows it, in stacks of several texts. Of diffusers' processors the one for training masks
    that; the default one adds the ones and zeros of its mask to the scores.

    `original_size`, `target_size` and `crop_coords`, `(n, 2)` each, are pixels: height and width, or top and left.
    """

    title = "CogView4"
    transformer_class = "CogView4Transformer2DModel"
    tested_forwards = ("8fde5b83ce78",)
    processor_class: ClassVar[type[PackedJointAttnProcessor]] = PackedCogView4AttnProcessor
    stock_processors: ClassVar[tuple[str, ...]] = ("CogView4AttnProcessor", "CogView4TrainingAttnProcessor")
    text = TextTokens(rows="slots", channels="text_embed_dim")
    images_only = True
    latents_as = "images"
    attention_kwargs: ClassVar[str | None] = "attention_kwargs"
    position_module = "rope"
    joint_norms = ("transformer_blocks.*.norm1",)
    text_outputs = range(5, 10)

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


class CogView4Recipe(Recipe):
    """Recipe of `CogView4Pipeline`; see [`Recipe`].

    The pipeline shifts the noise levels of its schedule, but not the timesteps that the model is given.
    """

    pipeline_class = "CogView4Pipeline"
    family = CogView4Family()
    image_vae = True
    default_sequence_length = 1024
    trims_text = True
    native_sizes = ((1024, 1024),)

    def shift(self) -> float | ShiftLaw:
        """Return the shift that the pipeline computes from the root of the number of tokens."""
        return shift_of_scheduler(self.pipeline.scheduler.config, by_root=True)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions one by one, as GLM sees padding: each has a multiple of 16 tokens, all others are masked."""
        values, mask = pad_texts([self._encode_prompt(caption)[0][0] for caption in captions])
        length = -(-self.max_sequence_length // TEXT_MULTIPLE) * TEXT_MULTIPLE
        return TextEmbeddings(values, mask.long()).padded(length)

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return what the model is called with; the timesteps are those before the pipeline's shift."""
        inputs, shift = super().model_inputs(samples), self.shift()
        of_size = ShiftOfLatents(shift, self.spec) if callable(shift) else lambda size: shift
        steps = float(self.pipeline.scheduler.config.num_train_timesteps)
        levels = samples.noised.timesteps.double() / steps
        by_sample = [of_size(tuple(latent.shape[1:])) for latent in samples.noised.latents]
        shifts = to_device(torch.tensor(by_sample, dtype=levels.dtype), levels.device)
        before = levels / (shifts - (shifts - 1) * levels)
        return replace(inputs, timesteps=(before * steps).float())

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        return sizes_of(samples, self.spec.spatial_stride)


def sizes_of(samples: Samples, stride: int) -> dict[str, Any]:
    """Return original and target size in pixels, `(n, 2)`, and the corner at 0, of images that are shown whole."""
    sides = [latent.shape[2:] for latent in samples.noised.latents]
    sizes = torch.tensor(sides, dtype=samples.text.values.dtype) * stride
    return {"original_size": sizes, "target_size": sizes, "crop_coords": torch.zeros_like(sizes)}


class CogView4ControlRecipe(ControlRecipe, CogView4Recipe):
    """Recipe of `CogView4ControlPipeline`; see [`ControlRecipe`]."""

    pipeline_class = "CogView4ControlPipeline"
    conditions = (control_as("control_image"),)


class CogView3PlusFamily(CogView4Family):
    """CogView3-Plus: images, with positions from the corner of one table; text in joint attention.

    The pipeline masks no text: pass the embeddings with their padding. Sizes are conditions, as of CogView4.
    """

    title = "CogView3-Plus"
    transformer_class = "CogView3PlusTransformer2DModel"
    tested_forwards = ("dd8a945669ea",)
    processor_class = PackedJointAttnProcessor
    stock_processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding")
    attention_kwargs = None

    def limits(self, transformer: Transformer) -> Grid:
        side = int(transformer.config.pos_embed_max_size)
        return 1, side, side

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        return [hook_linear_patch_embed(transformer.patch_embed, _corner), *self.hook_norms(transformer)]


def _corner(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    _, height, width = grid
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    return (rows[:, None] * module.pos_embed_max_size + columns).flatten()


class CogView3PlusRecipe(Recipe):
    """Recipe of `CogView3PlusPipeline`; see [`Recipe`]. The pipeline cannot load LoRA weights."""

    pipeline_class = "CogView3PlusPipeline"
    family = CogView3PlusFamily()
    denoises = True
    image_vae = True
    default_sequence_length = 224
    prompt_outputs = ("values",)
    native_sizes = ((1024, 1024),)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        return sizes_of(samples, self.spec.spatial_stride)


RECIPES = (
    CogView4Recipe,
    CogView4ControlRecipe,
    CogView3PlusRecipe,
)
