"""How Wan 2.1 and 2.2 are trained, text-to-video and image-to-video: flow matching; text with zero padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from ...errors import BucketingError
from ..first_frame import ENDS, FirstFrameRecipe, pictures, shown_ends
from ..recipe import Conditions, ModelInputs, Recipe, Samples, Shown
from .packing import CLIP_TOKENS, FAMILY, IMAGE_TOKENS

IMAGE_LATENTS = "image_latents"
"""Condition of a sample: latents of the clip whose frames are grey but for the first (and the last)."""


class WanRecipe(Recipe):
    """Recipe of `WanPipeline`; see [`Recipe`].

    Pipelines with two transformers (Wan 2.2 A14B) call `transformer` at high noise and `transformer_2` at low noise,
    on either side of their `boundary_ratio`; each is trained in a run of its own.
    """

    pipeline_class = "WanPipeline"
    family = FAMILY
    default_sequence_length = 512
    native_sizes = ((480, 832), (720, 1280))
    """480p and 720p; Wan 2.2 5B, whose sides are multiples of 32, rounds the latter down to its own 704×1280."""

    shifts_by_resolution = ((480, 832, 3.0), (720, 1280, 5.0))
    """Those of the examples of diffusers' Wan pipelines; for training at 480p, the model's authors advise 2
    (Wan-Video/Wan2.1, issue 291)."""

    def sigmas(self) -> tuple[float, float]:
        """Return the trained transformer's side of the boundary."""
        boundary = self.pipeline.config.get("boundary_ratio")
        if boundary is None:
            return 0.0, 1.0
        return (boundary, 1.0) if self.trained == "transformer" else (0.0, boundary)


class WanImageToVideoRecipe(FirstFrameRecipe, WanRecipe):
    """Recipe of `WanImageToVideoPipeline`, whose models continue the first frame of a sample; see [`Recipe`].

    That frame (and the last) is the sample's own, or the `first_frame` (and the `last_frame`) of the data set.

    The pipeline's configuration decides how the model is shown that frame:

    - Wan 2.1 and Wan 2.2 A14B take its latents, those of an otherwise grey clip, and a mask of the given frames as
      further channels. Those with an `image_dim` (2.1) also attend to its CLIP embedding; those with a
      `pos_embed_seq_len` (FLF2V) are shown the last frame as well. An image leaves them nothing to predict and is
      refused.
    - With `expand_timesteps` (TI2V-5B), the first latent frame stays clean: its tokens have timestep 0, and it does
      not enter the loss. An image has no frame after it, and is trained as text-to-image.
    """

    pipeline_class = "WanImageToVideoPipeline"
    shown: ClassVar[tuple[str, ...]] = ENDS

    @classmethod
    def num_images(cls, config: Mapping[str, Any]) -> int:
        """Return 2 for models of a first and a last frame, else 1."""
        return 1 if config.get("pos_embed_seq_len") is None else 2

    def check_conditions(self, names: Collection[str]) -> None:
        """Refuse also last frames, where the model is shown the first alone; see [`Recipe.check_conditions`]."""
        super().check_conditions(names)
        if ENDS[1] in names and self.num_images(self.config) == 1:
            raise BucketingError(
                f"This {self.pipeline_class} begins with an image and ends with none, but the data set has a column "
                f"{ENDS[1]!r}; prepare it again without --{ENDS[1]}_column, or train a model of first and last frames."
            )

    @property
    def media_rule(self) -> str:
        """The frames that conditions are made of."""
        return f"conditions of {self.num_images(self.config)} frames"

    @property
    def fewest_frames(self) -> int:
        """Two for models that are shown frames as further channels, three with the last one."""
        return 1 if self._keeps_first_frame else 1 + self.num_images(self.config)

    @property
    def _keeps_first_frame(self) -> bool:
        return bool(self.pipeline.config.get("expand_timesteps"))

    @property
    def _embeds_images(self) -> bool:
        return self.config.get("image_dim") is not None

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Encode the frames that the model is shown, as its pipeline does; nothing where they are latents' own.

        Raises:
            BucketingError: If samples have too few frames.
        """
        if self._keeps_first_frame:
            return super().encode_conditions(pixel_values, latents, shown)
        if pixel_values.shape[2] < self.fewest_frames:
            raise BucketingError(
                f"A sample of {pixel_values.shape[2]} frames leaves an image-to-video model nothing to predict, which "
                f"needs {self.fewest_frames} or more: prepare the data set without images."
            )
        count = self.num_images(self.config)
        frames, clips = shown_ends(pixel_values, shown, ENDS[:count]), torch.zeros_like(pixel_values)
        clips[:, :, [0, -1][:count]] = frames
        conditions = {IMAGE_LATENTS: self.encode_latents(clips)}
        if self._embeds_images:
            conditions[IMAGE_TOKENS] = self._image_tokens(frames)
        return conditions

    def _image_tokens(self, frames: torch.Tensor) -> torch.Tensor:
        """Return the image encoder's output for frames `(B, 3, n, H, W)`, those of a sample one after the other."""
        images, encoder = pictures(frames.transpose(1, 2).flatten(0, 1)), self.pipeline.image_encoder
        tokens: torch.Tensor = self.pipeline.encode_image(images, encoder.device)
        return tokens.unflatten(0, frames.shape[:3:2]).flatten(1, 2)

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of [`encode_conditions`]."""
        if self._keeps_first_frame:
            return {}
        conditions = {IMAGE_LATENTS: torch.zeros_like(latent)}
        if self._embeds_images:
            shape = self.config["pos_embed_seq_len"] or CLIP_TOKENS, self.config["image_dim"]
            conditions[IMAGE_TOKENS] = latent.new_zeros(shape)
        return conditions

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return latents with the condition as further channels, or with a clean first frame."""
        return super().model_inputs(samples) if self._keeps_first_frame else WanRecipe.model_inputs(self, samples)

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return the mask of the given frames, and their latents."""
        pairs = zip(samples.noised.latents, samples.conditions[IMAGE_LATENTS], strict=True)
        return [torch.cat([self._mask(latent), image.to(latent)]) for latent, image in pairs]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the image tokens, where the model takes some."""
        if not self._embeds_images:
            return {}
        return {IMAGE_TOKENS: torch.stack(list(samples.conditions[IMAGE_TOKENS])).to(samples.text.values)}

    def _mask(self, latent: torch.Tensor) -> torch.Tensor:
        """Return which frames of each latent frame are given, `(temporal_stride, f, h, w)`.

        The first latent frame holds one frame, which fills all channels; the last one ends with the last frame.
        """
        mask = latent.new_zeros(self.spec.temporal_stride, *latent.shape[1:])
        mask[:, 0] = 1
        if self.num_images(self.config) == 2:
            mask[-1, -1] = 1
        return mask


RECIPES = (WanRecipe, WanImageToVideoRecipe)
