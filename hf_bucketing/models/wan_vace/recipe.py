"""How Wan VACE is trained: as Wan, with a control video, a mask of what is generated, and a reference image."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ...conditions.names import REFERENCE
from ...packing.family import UNLIMITED
from ..first_frame import pictures
from ..loss_mask import LOSS_MASK
from ..samples import Conditions, Samples, Shown
from ..wan.recipe import WanRecipe, in_front
from .packing import CONTROL, FAMILY, SCALE


class WanVACERecipe(WanRecipe):
    """Recipe of `WanVACEPipeline`, whose models are shown control videos, masks and reference images; see [`Recipe`].

    Whatever a sample has of these becomes the control channels that the pipeline makes of it:

    - `control` is a video of the sample's size, such as its depth, pose or edges; without one, all is grey.
    - `mask` is white where the video is generated, and black where the control's own pixels stay. The loss counts
      where it is white. Without a mask, all is generated. A mask without a control is for inpainting: the control is
      the sample itself, grey where the mask is white.
    - `reference` is one or more images of any size, each fitted onto white and encoded as a latent frame in front of
      the video. The noisy latents have it too, as the pipeline generates it again and drops it; it does not enter the
      loss.
      (DiffSynth-Studio and VideoX-Fun count it as any frame.)
    """

    pipeline_class = "WanVACEPipeline"
    family = FAMILY
    shown = ("control",)
    max_references = UNLIMITED
    references_in_front = True
    reference_sizes = MappingProxyType({"as_stored": True, "resample": "lanczos"})
    shown_as = MappingProxyType({"control": "video", "mask": "mask", "reference": "reference_images"})

    @property
    def media_rule(self) -> str:
        """What distinguishes entries of a cache from those of Wan's other pipelines, which have the same VAE."""
        return "control channels, loss masks of references"

    def encode_media(self, pixel_values: torch.Tensor, shown: Shown = MappingProxyType({})) -> Conditions:
        """Encode a stack of samples, see [`Recipe.encode_media`].

        Returns:
            `dict`: `latents`, the control channels and, where the data set has masks or references, `loss_mask`,
            `(B, …, f, h, w)`; each reference adds a latent frame in front of its sample.
        """
        encoded, references = super().encode_media(pixel_values, shown), shown.get(REFERENCE)
        if references is None:
            return encoded
        latents = torch.stack(list(encoded["latents"]))
        frames = self._frames_of(pixel_values, references) if references[0] else latents[:, :, :0]
        weights = encoded.get(LOSS_MASK, torch.ones_like(latents[:, :1]))
        return {
            "latents": in_front(frames, latents),
            CONTROL: in_front(frames, encoded[CONTROL]),
            LOSS_MASK: in_front(frames[:, :0], weights),
        }

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
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

    @torch.no_grad()
    def _frames_of(self, pixel_values: torch.Tensor, references: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Return the latents of each sample's k references `(3, 1, h, w)` on white, `(B, C, k, h, w)`."""
        images = [[image for shown in own for image in pictures(shown.transpose(0, 1))] for own in references]
        (height, width), device = pixel_values.shape[-2:], pixel_values.device
        *_, canvases = self.pipeline.preprocess_conditions(
            reference_images=images, batch_size=len(images), height=height, width=width, num_frames=1, device=device
        )
        stacks = [torch.stack(canvas)[:, :, None].to(pixel_values) for canvas in zip(*canvases, strict=True)]
        return torch.cat([self.encode_latents(stack) for stack in reversed(stacks)], 2)  # the pipeline's order

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of [`encode_conditions`]."""
        return {CONTROL: latent.new_zeros(self.config["vace_in_channels"], *latent.shape[1:])}

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the control channels, and their scale, which is 1 in training."""
        latents = samples.noised.latents
        controls = zip(samples.conditions[CONTROL], latents, strict=True)
        return {
            CONTROL: [control.to(latent) for control, latent in controls],
            SCALE: latents[0].new_ones(len(latents), len(self.config["vace_layers"])),
        }


RECIPES = (WanVACERecipe,)
