"""How HunyuanVideo is trained: flow matching with a fixed shift; a prompt template around captions."""

from __future__ import annotations

import torch

from ...buckets.sizes import LatentSpec
from ..loading import video_spec
from ..recipe import Recipe, TextEmbeddings
from .packing import FAMILY


class HunyuanVideoRecipe(Recipe):
    """Recipe of `HunyuanVideoPipeline`; see [`Recipe`]."""

    pipeline_class = "HunyuanVideoPipeline"
    family = FAMILY
    default_sequence_length = 256
    guidance_factor = 1000.0
    native_sizes = ((544, 960), (624, 832), (720, 720), (720, 1280), (832, 1104), (960, 960))
    """The sizes of 540p and 720p on the model card; it also names their portrait counterparts."""

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE and the patch of the transformer."""
        return video_spec(name_or_path)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, mask = self.pipeline.encode_prompt(
            captions, max_sequence_length=self.max_sequence_length, device=self.pipeline.text_encoder.device
        )
        return TextEmbeddings(values, mask, {"pooled_projections": pooled})


RECIPES = (HunyuanVideoRecipe,)
