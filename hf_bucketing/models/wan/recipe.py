"""How Wan 2.1 and 2.2 are trained, text-to-video and image-to-video: flow matching; text with zero padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...conditions.shares import BLACK, FRAMES, ConditionShares
from ...devices import to_device
from ...errors import BucketingError, quoted
from ...packing.family import Family
from ..first_frame import ENDS, FirstFrameRecipe, pictures, shown_ends
from ..recipe import Recipe
from ..samples import SHOWN_FRAMES, Conditions, Samples, Shown
from .packing import CLIP_TOKENS, FAMILY, IMAGE_TOKENS

IMAGE_LATENTS = "image_latents"
"""Condition of a sample: latents of the clip whose frames are grey but for the first (and the last)."""


class WanRecipe(Recipe):
    """Recipe of `WanPipeline`; see [`Recipe`].

    Pipelines with two transformers (Wan 2.2 A14B) call `transformer` at high noise and `transformer_2` at low noise,
    on either side of their `boundary_ratio`; each is trained at its own noise levels.
    """

    pipeline_class = "WanPipeline"
    family: ClassVar[Family] = FAMILY
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

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All, where the pipeline gives each token a timestep."""
        return (*FRAMES, BLACK) if self.keeps_first_frame else ()

    @classmethod
    def has_clean_parts(cls, settings: Mapping[str, Any], *, draws: bool) -> bool:
        """Return whether tokens have timesteps, where the pipeline gives them some."""
        return bool(settings.get("expand_timesteps")) and super().has_clean_parts(settings, draws=draws)

    @property
    def keeps_first_frame(self) -> bool:
        """Whether the pipeline gives each token a timestep, such as 0 for a clean first frame (TI2V-5B)."""
        return bool(self.pipeline.config.get("expand_timesteps"))


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
    def encodes_drawn(self) -> bool:
        """Whether the shown frames are encoded apart, as further channels."""
        return not self.keeps_first_frame

    def check_drawn(self, shares: ConditionShares, names: Collection[str], *, cached: bool) -> None:
        """Refuse also what lacks a frame whose embedding the model attends to; see [`Recipe.check_drawn`]."""
        super().check_drawn(shares, names, cached=cached)
        if not self._embeds_images:
            return
        for kinds in ({"first_frame", "prefix"}, {"last_frame", "suffix"})[: self.num_images(self.config)]:
            if not all(kinds.intersection(part.kind for part in condition) for condition in shares.conditions):
                raise BucketingError(
                    f"This {self.pipeline_class} always attends to the image encoder's output for the frames that it "
                    f"is shown, so that each `condition` must have one of {quoted(sorted(kinds))}; combine them by +."
                )

    @property
    def media_rule(self) -> str:
        """The frames that conditions are made of."""
        return f"conditions of {self.num_images(self.config)} frames"

    @property
    def fewest_frames(self) -> int:
        """Two for models that are shown frames as further channels, three with the last one."""
        return 1 if self.keeps_first_frame else 1 + self.num_images(self.config)

    @property
    def _embeds_images(self) -> bool:
        return self.config.get("image_dim") is not None

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Encode the frames that the model is shown, as its pipeline does; nothing where they are latents' own.

        Raises:
            BucketingError: If samples have too few frames.
        """
        if self.keeps_first_frame:
            return super().encode_conditions(pixel_values, latents, shown)
        if pixel_values.shape[2] < self.fewest_frames:
            raise BucketingError(
                f"A sample of {pixel_values.shape[2]} frames leaves an image-to-video model nothing to predict, which "
                f"needs {self.fewest_frames} or more: prepare the data set without images."
            )
        count = self.num_images(self.config)
        frames, clips = shown_ends(pixel_values, shown, ENDS[:count]), pixel_values.clone()
        clips[:, :, [0, -1][:count]] = frames
        drawn = shown.get(SHOWN_FRAMES, [self._ends(clips.shape[2])] * len(clips))
        visible = to_device(torch.stack(list(drawn)), clips.device)
        clips = torch.where(visible[:, None, :, None, None], clips, 0)
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
        if self.keeps_first_frame:
            return {}
        conditions = {IMAGE_LATENTS: torch.zeros_like(latent)}
        if self._embeds_images:
            shape = self.config["pos_embed_seq_len"] or CLIP_TOKENS, self.config["image_dim"]
            conditions[IMAGE_TOKENS] = latent.new_zeros(shape)
        return conditions

    def clean_parts(self, samples: Samples) -> Sequence[torch.Tensor] | None:
        """Return no clean latents, where the model is shown frames as further channels."""
        return super().clean_parts(samples) if self.keeps_first_frame else None

    def added_channels(self, samples: Samples) -> Sequence[torch.Tensor]:
        """Return the mask of the frames that are shown, and their latents, unless the latents themselves have them."""
        if self.keeps_first_frame:
            return ()
        latents, stride = samples.noised.latents, self.spec.temporal_stride
        ends = [self._ends((latent.shape[1] - 1) * stride + 1) for latent in latents]
        shown = zip(samples.conditions.get(SHOWN_FRAMES, ends), samples.conditions[IMAGE_LATENTS], strict=True)
        pairs = zip(latents, shown, strict=True)
        return [torch.cat([self._mask(frames, latent), image.to(latent)]) for latent, (frames, image) in pairs]

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the image tokens, where the model takes some."""
        if not self._embeds_images:
            return {}
        return {IMAGE_TOKENS: torch.stack(list(samples.conditions[IMAGE_TOKENS])).to(samples.text.values)}

    def _ends(self, frames: int) -> torch.Tensor:
        """Return which of a sample's frames the pipeline shows, `(F,)` of `bool`: the first (and the last)."""
        ends = torch.zeros(frames, dtype=torch.bool)
        ends[[0, -1][: self.num_images(self.config)]] = True
        return ends

    def _mask(self, frames: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return which frames `(F,)` of each latent frame are shown, `(temporal_stride, f, h, w)`.

        The first latent frame holds one frame, which fills all channels.
        """
        stride = self.spec.temporal_stride
        by_latent = torch.cat([frames[:1].expand(stride), frames[1:]]).view(-1, stride).T
        return to_device(by_latent, latent.device, dtype=latent.dtype)[:, :, None, None].expand(-1, *latent.shape[1:])


def in_front(first: torch.Tensor, values: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Put latent frames `(B, C, k, h, w)`, with zeros for further channels, in front of each sample's values."""
    stack = torch.stack(list(values))
    return torch.cat([F.pad(first, (0,) * 7 + (stack.shape[1] - first.shape[1],)), stack], 2)


RECIPES = (WanRecipe, WanImageToVideoRecipe)
