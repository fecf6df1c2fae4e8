"""How HunyuanImage 2.1 is trained: flow matching; text in the pipeline's template, and glyphs of quoted words."""

from __future__ import annotations

from typing import Any

import torch

from ...buckets.sizes import LatentSpec
from ...errors import BucketingError
from ...packing.context import bind_checkpoints
from ..loading import read_configs
from ..objectives import Objective
from ..recipe import ModelInputs, Recipe, Samples, TextEmbeddings
from .packing import FAMILY, GLYPH_MASK, GLYPHS


class HunyuanImageRecipe(Recipe):
    """Recipe of `HunyuanImagePipeline`; see [`Recipe`]. The pipeline cannot load LoRA weights."""

    pipeline_class = "HunyuanImagePipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 1000
    trims_text = True
    added_text_tokens = 128
    """Those of glyphs."""
    guidance_factor = 1000.0
    native_sizes = ((2048, 2048), (1536, 2560), (2560, 1536), (1792, 2304), (2304, 1792))

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the VAE's stride and the transformer's patch."""
        vae, transformer = read_configs(name_or_path)
        rows, columns = transformer["patch_size"]
        return LatentSpec(temporal_stride=1, spatial_stride=vae["spatial_compression_ratio"], patch=(1, rows, columns))

    def objective(self, **settings: Any) -> Objective:
        """Return the training objective; see [`Recipe.objective`].

        Raises:
            BucketingError: Also if the model is distilled to steps of a mean flow, which flow matching would undo.
        """
        if self.transformer.config.use_meanflow:
            raise BucketingError(
                "This HunyuanImage transformer predicts whole steps of a mean flow (use_meanflow), for which there is "
                "no objective; train the model that it was distilled from."
            )
        return super().objective(**settings)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, and the words in quotation marks byte by byte."""
        self.pipeline.tokenizer_max_length = self.max_sequence_length  # its call takes no other length
        values, mask, glyphs, glyph_mask = self.pipeline.encode_prompt(
            captions, batch_size=len(captions), device=self.pipeline.text_encoder.device
        )
        return TextEmbeddings(values, mask, {GLYPHS: glyphs, GLYPH_MASK: glyph_mask})

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the glyphs and the guidance of models that embed them."""
        unread = () if self.transformer.config.text_embed_2_dim is not None else (GLYPHS, GLYPH_MASK)
        return {name: values for name, values in super().conditioning(samples).items() if name not in unread}

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, with gradient checkpoints that take the keywords which the model passes to them."""
        bind_checkpoints(self.transformer)
        return super().predict(transformer, samples, inputs)


RECIPES = (HunyuanImageRecipe,)
