"""How CogView4 is trained: flow matching, shifted by size, with timesteps that are not; sizes as conditions."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ...devices import to_device
from ...packing.texts import pad_texts
from ..control import ControlRecipe
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
from ..shift import ShiftLaw, ShiftOfLatents, shift_of_scheduler
from ..texts import TextEmbeddings
from .packing import FAMILY, TEXT_MULTIPLE


class CogView4Recipe(Recipe):
    """Recipe of `CogView4Pipeline`; see [`Recipe`].

    The pipeline shifts the noise levels of its schedule, but not the timesteps that the model is given.
    """

    pipeline_class = "CogView4Pipeline"
    family = FAMILY
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
        """Return the sizes and the corner that the pipeline passes by default: those of the whole image."""
        return sizes_of(samples, self.spec.spatial_stride)


def sizes_of(samples: Samples, stride: int) -> dict[str, Any]:
    """Return original and target size in pixels, `(n, 2)`, and the corner at 0, of images that are shown whole."""
    sides = [latent.shape[2:] for latent in samples.noised.latents]
    sizes = torch.tensor(sides, dtype=samples.text.values.dtype) * stride
    return {"original_size": sizes, "target_size": sizes, "crop_coords": torch.zeros_like(sizes)}


class CogView4ControlRecipe(ControlRecipe, CogView4Recipe):
    """Recipe of `CogView4ControlPipeline`; see [`ControlRecipe`]."""

    pipeline_class = "CogView4ControlPipeline"
    shown_as = MappingProxyType({"control": "control_image"})


RECIPES = (CogView4Recipe, CogView4ControlRecipe)
