"""Image-to-video: the frames that a model is shown, and models that are shown the first one without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from PIL import Image

from ..conditions.condition import Condition
from ..conditions.shares import FRAMES
from .recipe import Recipe
from .samples import Conditions, Media, ModelInputs, Samples

ENDS = ("first_frame", "last_frame")
"""Conditions of a data set that stand for the first and the last frame of a sample."""
END_CONDITIONS = tuple(Condition(name=name, enters="in place", pictures_only=True) for name in ENDS)
"""They as recipes declare them."""
FIRST_LATENT = "first_latent"
"""Encoded condition: the latent of the first frame that a data set shows of a sample, `(C, 1, h, w)`."""


def end_frames(pixel_values: torch.Tensor, conditions: Media, names: Sequence[str] = ENDS[:1]) -> torch.Tensor:
    """Return the frames that an image-to-video model is shown of a stack: the data set's, or the samples' own.

    Args:
        pixel_values (`torch.Tensor` of shape `(B, 3, F, H, W)`): Pixels in [−1, 1].
        conditions (mapping of `str` to a sequence of `torch.Tensor`): The data set's conditions, see
            [`Media`][hf_bucketing.models.samples.Media].
        names (sequence of `str`): Those of [`ENDS`] that the model is shown.

    Returns:
        `torch.Tensor` of shape `(B, 3, n, H, W)`: A frame for each name.
    """
    ends = {ENDS[0]: pixel_values[:, :, :1], ENDS[1]: pixel_values[:, :, -1:]}
    frames = [
        torch.stack(list(conditions[name])).to(ends[name]) if name in conditions else ends[name] for name in names
    ]
    return torch.cat(frames, 2)


def pictures(frames: torch.Tensor) -> list[Image.Image]:
    """Return frames `(n, 3, H, W)` in [−1, 1] as images of 8 bits, which pipelines take."""
    levels = ((frames.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return [Image.fromarray(frame) for frame in levels.permute(0, 2, 3, 1).cpu().numpy()]


class FirstFrameRecipe(Recipe):
    """Base of recipes of image-to-video pipelines that keep the first latent frame clean.

    Each video continues its own first frame, or the `first_frame` that the data set has of it, whose latent then
    stands in its place; images, which have nothing to continue, train the model without a condition. The models' own
    trainers draw the share of samples that are conditioned; here all are: train the same transformer as a
    text-to-video pipeline for the others.
    """

    takes_image = True
    conditions: ClassVar[tuple[Condition, ...]] = END_CONDITIONS[:1]

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Conditions of whole frames, and what the base class takes."""
        return tuple(dict.fromkeys((*FRAMES, *super().drawn_kinds)))

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return whether the model embeds the timestep of the clean frame."""
        return super().has_clean_parts(settings, draws=True)

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, conditions: Media) -> Conditions:
        """Encode the first frames that the data set shows.

        Samples' own first frames need no encoding: video VAEs are causal, so that the first latent frame is that of
        the first frame alone.
        """
        if ENDS[0] not in conditions:
            return {}
        return {FIRST_LATENT: self.encode_latents(end_frames(pixel_values, conditions))}

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return the inputs of a model whose samples begin with the frame that the data set shows, if it does."""
        if (first_frames := samples.conditions.get(FIRST_LATENT)) is None:
            return super().model_inputs(samples)
        noised = samples.noised
        pairs = zip(first_frames, noised.clean, strict=True)
        clean = [torch.cat([first[:, :1].to(latent), latent[:, 1:]], 1) for first, latent in pairs]
        return super().model_inputs(replace(samples, noised=noised._replace(clean=clean)))

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return what the run draws, and by default the first latent frame of videos.

        Images, whose first frame is all there is, remain noisy as a whole.
        """
        return super().clean_parts(samples) or [_first_of_video(latent) for latent in samples.noised.latents]


def _first_of_video(latent: torch.Tensor) -> torch.Tensor:
    """Return which latent frames of `(C, f, h, w)` are the first of several, `(1, f, 1, 1)`."""
    part = torch.zeros(1, latent.shape[1], 1, 1, dtype=torch.bool, device=latent.device)
    part[:, :1] = latent.shape[1] > 1
    return part
