"""How HunyuanVideo is trained: flow matching with a fixed shift; a prompt template around captions."""

from __future__ import annotations

import torch

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

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, mask = self._encode_prompt(captions)
        return TextEmbeddings(values, mask, {"pooled_projections": pooled})


RECIPES = (HunyuanVideoRecipe,)
