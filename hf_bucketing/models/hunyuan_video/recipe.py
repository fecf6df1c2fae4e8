"""How HunyuanVideo is trained: flow matching with a fixed shift; a prompt template around captions; guidance 1."""

from __future__ import annotations

from typing import Any

import torch

from ...buckets.sizes import LatentSpec
from ..recipe import Recipe, Samples, TextEmbeddings, video_spec
from .packing import FAMILY

GUIDANCE = 1000.0
"""The guidance embedded in training: scale 1, a thousandfold as the pipeline passes it.

The target is the velocity of the data itself, without guidance; finetrainers trains with the same value.
"""


class HunyuanVideoRecipe(Recipe):
    """Recipe of `HunyuanVideoPipeline`; see [`Recipe`]."""

    pipeline_class = "HunyuanVideoPipeline"
    family = FAMILY
    default_sequence_length = 256
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

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the pooled captions, and the guidance of models that embed one."""
        pooled = dict(samples.text.others)
        if not self.transformer.config.guidance_embeds:
            return pooled
        latents = samples.noised.latents
        return {**pooled, "guidance": latents[0].new_full((len(latents),), GUIDANCE)}


RECIPES = (HunyuanVideoRecipe,)
