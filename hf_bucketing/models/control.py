"""Models that take the latents of a control image or video as further channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..buckets.sizes import Size
from ..conditions.condition import Condition
from .recipe import Recipe
from .samples import Conditions, Media, Samples

CONTROL_LATENTS = "control_latents"
"""Encoded condition: the latents of a sample's control, `(C, f, h, w)`."""


def control_as(argument: str) -> Condition:
    """Return the condition of a control that the pipeline's call takes as an argument."""
    return Condition(name="control", enters="channels", least=1, argument=argument)


class ControlRecipe(Recipe):
    """Base of recipes of pipelines that put the latents of a control behind those of a sample, as further channels.

    Each sample has a `control` of its own size, such as its depth, pose or edges.
    """

    @classmethod
    def num_images(cls, config: Mapping[str, Any]) -> int:
        """Return 1: rendered samples have an image as their control."""
        return 1

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode the controls as samples are encoded."""
        return {CONTROL_LATENTS: self.encode_latents(torch.stack(list(conditions["control"])).to(pixel_values))}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shape of [`encode_conditions`]."""
        return {CONTROL_LATENTS: torch.zeros_like(latent)}

    def added_channels(self, samples: Samples) -> Sequence[torch.Tensor]:
        """Return the latents of the controls."""
        return samples.conditions[CONTROL_LATENTS]

    def render(self, prompt: str, size: Size, *, image: Any = None, **options: Any) -> np.ndarray:
        """Call the pipeline with an image as the control of every frame; see [`Recipe.render`]."""
        if image is not None:
            options[self.call_arguments()["control"]] = image if self.family.images_only else [image] * size.frames
        return super().render(prompt, size, **options)
