"""How Wan 2.1 and 2.2 text-to-video are trained: flow matching with a fixed shift; text with zero padding."""

from __future__ import annotations

from ...buckets.sizes import LatentSpec
from ..recipe import Recipe, read_configs
from .packing import FAMILY


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

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        vae, transformer = read_configs(name_or_path)
        return LatentSpec(
            temporal_stride=vae.get("scale_factor_temporal", 4),
            spatial_stride=vae.get("scale_factor_spatial", 8),
            patch=tuple(transformer["patch_size"]),
        )

    def sigmas(self) -> tuple[float, float]:
        """Return the trained transformer's side of the boundary."""
        boundary = self.pipeline.config.boundary_ratio
        if boundary is None:
            return 0.0, 1.0
        return (boundary, 1.0) if self.trained == "transformer" else (0.0, boundary)


RECIPES = (WanRecipe,)
