"""How Qwen-Image 2.1 is trained: flow matching, shifted by size; text in the pipeline's template, opaque images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...packing.texts import pad_texts
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
from ..texts import TextEmbeddings
from .packing import FAMILY, SLOT


class QwenImage21Recipe(Recipe):
    """Recipe of `QwenImage21Pipeline`; see [`Recipe`].

    The pipeline takes captions of any length; here `max_sequence_length` cuts them.
    """

    pipeline_class = "QwenImage21Pipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1024, 1024),)

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] with a fourth channel, which says that they are opaque."""
        return super().encode_latents(F.pad(pixel_values, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0))

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions one by one, as the pipeline does with a prompt; padding would move their positions."""
        values, mask = pad_texts([self._encode_prompt(caption)[0][0] for caption in captions])
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of images for which the stock model has no room."""
        _, height, width = samples.noised.latents[0].shape[1:]
        if height * width % SLOT:
            return (
                f"diffusers' Qwen-Image 2.1 runs images of a multiple of {SLOT} tokens, got {height}×{width}; use "
                "sides that are multiples of 32 pixels, or train packs, which take any."
            )
        return super().refusal(samples)

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, or its samples one by one where texts differ in length, since images stand behind padding."""
        values, mask, others = samples.text
        if mask is None or bool((mask == mask[:1]).all()):
            return super().predict(transformer, samples, inputs)
        outputs = [
            super(QwenImage21Recipe, self).predict(
                transformer,
                replace(samples, text=TextEmbeddings(values[row : row + 1], mask[row : row + 1], others)),
                replace(inputs, latents=[latent], timesteps=inputs.timesteps[row : row + 1]),
            )
            for row, latent in enumerate(inputs.latents)
        ]
        return torch.cat(outputs)

    def render(self, *args: Any, **options: Any) -> np.ndarray:
        """Call the pipeline, and return colours without opacity."""
        return super().render(*args, **options)[..., :3]


RECIPES = (QwenImage21Recipe,)
