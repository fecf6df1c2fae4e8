"""Image-to-video with a clean first frame: the model is shown it without noise, and is not trained to predict it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .recipe import ModelInputs, Recipe, Samples


class FirstFrameRecipe(Recipe):
    """Base of recipes of image-to-video pipelines that keep the first latent frame clean.

    Each video continues its own first frame; images, which have nothing to continue, train the model without a
    condition. The models' own trainers draw the share of samples that are conditioned; here all are: train the same
    transformer as a text-to-video pipeline for the others.
    """

    takes_image = True

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return the inputs with a clean first frame."""
        return with_clean_first_frame(samples, conditioning=self.conditioning(samples))


def with_clean_first_frame(samples: Samples, *, conditioning: Mapping[str, Any]) -> ModelInputs:
    """Return what the model is called with if it continues the first latent frame of each sample.

    That frame has no noise, timestep 0 and weight 0 in the loss. Images, whose first frame is all there is, remain
    noisy as a whole: they train the model without a condition.

    Args:
        samples ([`Samples`][hf_bucketing.models.recipe.Samples]): The samples, of a model whose tokens are one latent
            frame long and have a timestep each.
        conditioning (mapping of `str` to `torch.Tensor` of shape `(n, …)`): Further arguments of the model's forward.
    """
    noised = samples.noised
    latents, timesteps, weights = [], [], []
    for noisy, clean, timestep in zip(noised.latents, noised.clean, noised.timesteps, strict=True):
        predicted = torch.ones_like(noisy[:1])  # (1, f, h, w)
        if noisy.shape[1] > 1:
            predicted[:, 0] = 0
        latents.append(torch.where(predicted > 0, noisy, clean))
        timesteps.append(timestep * predicted[0, :, 0, 0].to(timestep))
        weights.append(predicted)
    return ModelInputs(latents=latents, timesteps=timesteps, conditioning=dict(conditioning), weights=weights)
