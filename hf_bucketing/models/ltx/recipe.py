"""How LTX-Video is trained: flow matching, shifted by size; text masked; positions in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from ...conditions.shares import APPENDED, BLACK, FRAMES
from ...media.sample import frame_rates
from ...packing.family import UNLIMITED, Family
from ..first_frame import FirstFrameRecipe
from ..recipe import Recipe
from ..samples import KEYFRAME_PLACES, REFERENCES, Samples
from .packing import FAMILY, SCALES


class LTXRecipe(Recipe):
    """Recipe of `LTXPipeline`; see [`Recipe`].

    Samples with references train in-context adapters: references are clean, have timestep 0 and lie over their
    sample, at an equal or smaller size (`--reference_downscale_factor` when the data set is prepared). LTX-Video's own
    trainer trains these; the calls of diffusers' pipelines take no references.
    """

    pipeline_class = "LTXPipeline"
    family: ClassVar[Family] = FAMILY
    max_references = UNLIMITED
    reference_sizes: ClassVar[Mapping[str, Any]] = MappingProxyType({"resample": "bilinear"})
    default_sequence_length = 128
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 704), (480, 704), (768, 1216), (704, 1216))
    """The pipeline's default and the size of its example, and the two large ones of the model card."""

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All: each token has a timestep."""
        return (*FRAMES, BLACK, *super().drawn_kinds)

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of the VAE, which those of the first versions give by their patch and their scaling."""
        halvings = sum(vae["spatio_temporal_scaling"])
        temporal, spatial = vae.get("temporal_compression_ratio"), vae.get("spatial_compression_ratio")
        return temporal or vae["patch_size_t"] * 2**halvings, spatial or vae["patch_size"] * 2**halvings

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
    max_references = 0


class LTXConditionRecipe(LTXRecipe):
    """Recipe of `LTXConditionPipeline` (LTX-Video 0.9.5 and later), called without images or videos.

    The pipeline places tokens in time as the causal VAE does, and has no shift by size.
    """

    pipeline_class = "LTXConditionPipeline"
    default_sequence_length = 256

    @classmethod
    def text_rule(cls) -> str:
        """Return a name of its own: this pipeline tells its text encoder where captions are padded."""
        return "LTXConditionRecipe"

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """All, and frames that are appended."""
        return (*super().drawn_kinds, *APPENDED)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Add the temporal stride, by which the first latent frame is shorter, and the places of appended frames."""
        scales = super().conditioning(samples)[SCALES]
        strides = torch.full_like(scales[:, :1], float(self.spec.temporal_stride))
        return {SCALES: torch.cat([scales, strides, keyframe_places(samples).to(scales)], 1)}


def keyframe_places(samples: Samples) -> torch.Tensor:
    """Return the frames of pixels at which the references of samples and then their keyframes begin, `(n, most)`.

    It is 0 for references, and for keyframes that a sample lacks; there is no column where no sample has keyframes.
    """
    places = samples.conditions.get(KEYFRAME_PLACES, [[]] * len(samples.fps))
    before = map(len, samples.conditions.get(REFERENCES, [[]] * len(places)))
    rows = [[0.0] * count + list(frames) if frames else [] for count, frames in zip(before, places, strict=True)]
    most = max(map(len, rows))
    return torch.tensor([row + [0.0] * (most - len(row)) for row in rows]).view(len(rows), most)


RECIPES = (LTXRecipe, LTXImageToVideoRecipe, LTXConditionRecipe)
