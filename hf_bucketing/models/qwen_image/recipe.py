"""How Qwen-Image is trained: flow matching, shifted by size; text in the pipeline's template, masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...buckets.sizes import LatentSpec
from ..loading import read_configs
from ..recipe import Recipe, TextEmbeddings
from .packing import BLOCK, FAMILY


class QwenImageRecipe(Recipe):
    """Recipe of `QwenImagePipeline`; see [`Recipe`]."""

    pipeline_class = "QwenImagePipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((1328, 1328), (928, 1664), (1664, 928), (1104, 1472), (1472, 1104), (1056, 1584), (1584, 1056))

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the strides of the VAE; a token is a block of latent pixels."""
        vae, _ = read_configs(name_or_path)
        halved = vae["temperal_downsample"]
        return LatentSpec(temporal_stride=2 ** sum(halved), spatial_stride=2 ** len(halved), patch=(1, BLOCK, BLOCK))

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, padded to `max_sequence_length`."""
        values, mask = self._encode_prompt(captions)
        if mask is None:  # no caption is padded
            mask = torch.ones(values.shape[:2], dtype=torch.long, device=values.device)
        missing = self.max_sequence_length - values.shape[1]
        return TextEmbeddings(F.pad(values, (0, 0, 0, missing)), F.pad(mask, (0, missing)))


RECIPES = (QwenImageRecipe,)
