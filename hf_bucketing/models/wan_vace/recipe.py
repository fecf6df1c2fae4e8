"""How Wan VACE is trained: as Wan, with a control video, a mask of what is generated, and a reference image."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ..first_frame import pictures
from ..loss_mask import LOSS_MASK
from ..recipe import Conditions, Recipe, Samples, Shown
from ..wan.recipe import WanRecipe
from .packing import CONTROL, FAMILY, SCALE

GIVEN_AS = {"control": "video", "mask": "mask", "reference": "reference_images"}
"""Arguments of the pipeline's call for what a sample is shown."""


class WanVACERecipe(WanRecipe):
    """Recipe of `WanVACEPipeline`, whose models are shown control videos, masks and reference images; see [`Recipe`].

    Whatever a sample has of these becomes the control channels that the pipeline makes of it:

    - `control` is a video of the sample's size, such as its depth, pose or edges; without one, all is grey.
    - `mask` is white where the video is generated, and black where the control's own pixels stay. The loss counts
      where it is white. Without a mask, all is generated. A mask without a control is for inpainting: the control is
      the sample itself, grey where the mask is white.
    - `reference` is an image of any size, fitted onto white and encoded as a latent frame in front of the video. The
      noisy latents have it too, as the pipeline generates it again and drops it; it does not enter the loss.
      (DiffSynth-Studio and VideoX-Fun count it as any frame.)

    Samples with and without a reference differ in their latent frames: packs mix them, a stack does not.
    """

    pipeline_class = "WanVACEPipeline"
    family = FAMILY
    shown = ("control", "reference")

    def encode_media(self, pixel_values: torch.Tensor, shown: Shown = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples, see [`Recipe.encode_media`].

        Returns:
            `dict`: `latents`, the control channels and `loss_mask`, each with a frame in front of the samples that
            have a reference.
        """
        encoded = super().encode_media(pixel_values, shown)
        controls, references = encoded[CONTROL], self._references(pixel_values, shown)
        weights = encoded.get(LOSS_MASK, pixel_values.new_ones(len(controls), 1, *controls[0].shape[1:]))
        return {
            "latents": _in_front(references, encoded["latents"]),
            CONTROL: _in_front(references, controls),
            LOSS_MASK: _in_front([None if one is None else torch.zeros_like(one[:1]) for one in references], weights),
        }

    @torch.no_grad()
    def encode_conditions(
        self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown = MappingProxyType({})
    ) -> Conditions:
        """Return the control channels: latents of what stays and of what is generated, and the mask's own pixels."""
        masks, controls = shown.get("mask"), shown.get("control")
        mask = torch.ones_like(pixel_values[:, :1]) if masks is None else torch.stack(list(masks)).to(pixel_values)
        generated = (mask > 0.5).to(pixel_values)
        video = pixel_values * (1 - generated) if controls is None else torch.stack(list(controls)).to(pixel_values)
        parts = [self.encode_latents(video * share) for share in (1 - generated, generated)]
        return {CONTROL: torch.cat([*parts, self._mask_channels(mask, latents)], 1)}

    def _mask_channels(self, mask: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return the mask's pixels of each latent pixel, `(B, stride², f, h, w)`, of the frame nearest to it."""
        stride = self.spec.spatial_stride
        pixels = mask[:, 0].unflatten(3, (-1, stride)).unflatten(2, (-1, stride))  # (B, F, h, stride, w, stride)
        channels = pixels.permute(0, 3, 5, 1, 2, 4).flatten(1, 2)
        return F.interpolate(channels, size=latents.shape[2:], mode="nearest-exact")

    def _references(self, pixel_values: torch.Tensor, shown: Shown) -> list[torch.Tensor | None]:
        """Return the latents of each sample's reference, `(C, 1, h, w)`; None for those without one."""
        given = shown.get("reference")
        if given is None:
            return [None] * len(pixel_values)
        height, width = pixel_values.shape[-2:]
        images = [pictures(image.transpose(0, 1))[0] for image in given]
        _, _, canvases = self.pipeline.preprocess_conditions(
            reference_images=[[image] for image in images], batch_size=len(images), height=height, width=width, num_frames=1
        )
        return [self.encode_latents(canvas[None, :, None].to(pixel_values))[0] for canvas, in canvases]

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of [`encode_conditions`], and weights of 1."""
        channels = self.config["vace_in_channels"]
        weights = torch.ones_like(latent[:1])
        return {CONTROL: latent.new_zeros(channels, *latent.shape[1:]), LOSS_MASK: weights}

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the control channels, and their scale, which is 1 in training."""
        latents = samples.noised.latents
        controls = zip(samples.conditions[CONTROL], latents, strict=True)
        return {
            CONTROL: [control.to(latent) for control, latent in controls],
            SCALE: latents[0].new_ones(len(latents), len(self.config["vace_layers"])),
        }

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of samples with and without a reference."""
        if len({latent.shape for latent in samples.noised.latents}) == 1:
            return None
        return (
            "A reference image adds a latent frame to its sample, so that samples with and without one do not make a "
            "stack. Train packs, which mix them, or prepare a data set in which all rows have a reference or none."
        )


def _in_front(
    references: Sequence[torch.Tensor | None], samples: torch.Tensor | Sequence[torch.Tensor]
) -> torch.Tensor | list[torch.Tensor]:
    """Put references `(C, 1, h, w)`, with zeros for further channels, in front of the samples that have one.

    Samples of one size remain a stack.
    """
    joined = [
        one if first is None else torch.cat([F.pad(first, (0,) * 7 + (len(one) - len(first),)), one], 1)
        for first, one in zip(references, samples, strict=True)
    ]
    return torch.stack(joined) if len({one.shape for one in joined}) == 1 else joined


RECIPES = (WanVACERecipe,)
