"""How LTX-Video is trained: flow matching, shifted by size; text masked; positions in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...buckets.sizes import LatentSpec
from ...errors import BucketingError
from ...media.sample import frame_rates
from ...packing.family import Family
from ..first_frame import FirstFrameRecipe
from ..objectives import Shift
from ..recipe import Recipe, Samples, read_configs
from ..shift import shift_for_tokens
from .packing import FAMILY, SCALES


class LTXRecipe(Recipe):
    """Recipe of `LTXPipeline`; see [`Recipe`]."""

    pipeline_class = "LTXPipeline"
    family: ClassVar[Family] = FAMILY
    default_sequence_length = 128
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 704), (480, 704), (768, 1216), (704, 1216))
    """The pipeline's default and the size of its example, and the two large ones of the model card."""

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        vae, transformer = read_configs(name_or_path)
        halvings = sum(vae["spatio_temporal_scaling"])
        spatial, temporal = vae.get("spatial_compression_ratio"), vae.get("temporal_compression_ratio")
        side = transformer["patch_size"]
        return LatentSpec(
            temporal_stride=temporal or vae["patch_size_t"] * 2**halvings,
            spatial_stride=spatial or vae["patch_size"] * 2**halvings,
            patch=(transformer["patch_size_t"], side, side),
        )

    def shift(self) -> Shift:
        """Return the scheduler's shift, which may depend on the number of tokens of each sample."""
        config = self.pipeline.scheduler.config
        return _shift_by_size(config) if config.get("use_dynamic_shifting", False) else float(config.get("shift", 1.0))

    def latent_statistics(self) -> tuple[Any, Any]:
        """Return the statistics that the VAE's weights hold."""
        return self.pipeline.vae.latents_mean, self.pipeline.vae.latents_std

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the seconds and pixels that a latent covers, as the pipeline computes them."""
        seconds = self.spec.temporal_stride / frame_rates(samples.fps).double()
        sides = torch.full_like(seconds, float(self.spec.spatial_stride))
        return {SCALES: torch.stack([seconds, sides, sides], 1)}


class LTXImageToVideoRecipe(FirstFrameRecipe, LTXRecipe):
    """Recipe of `LTXImageToVideoPipeline`; see [`FirstFrameRecipe`]."""

    pipeline_class = "LTXImageToVideoPipeline"


class LTXConditionRecipe(LTXRecipe):
    """Recipe of `LTXConditionPipeline` (LTX-Video 0.9.5 and later), called without images or videos.

    The pipeline places tokens in time as the causal VAE does, and has no shift by size.
    """

    pipeline_class = "LTXConditionPipeline"
    default_sequence_length = 256

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Add the temporal stride, by which the first latent frame is shorter."""
        scales = super().conditioning(samples)[SCALES]
        strides = torch.full_like(scales[:, :1], float(self.spec.temporal_stride))
        return {SCALES: torch.cat([scales, strides], 1)}


def _shift_by_size(config: Mapping[str, Any]) -> Shift:
    """Return the scheduler's shift as a function of a latent's `(F, H, W)`."""
    if config.get("time_shift_type", "exponential") != "exponential":
        raise BucketingError(
            f"The scheduler shifts by time_shift_type={config['time_shift_type']!r}; only 'exponential' is known."
        )
    limits = {
        "base_tokens": config.get("base_image_seq_len", 256),
        "max_tokens": config.get("max_image_seq_len", 4096),
        "base_shift": config.get("base_shift", 0.5),
        "max_shift": config.get("max_shift", 1.15),
    }
    return lambda size: shift_for_tokens(math.prod(size), **limits)


RECIPES = (LTXRecipe, LTXImageToVideoRecipe, LTXConditionRecipe)
