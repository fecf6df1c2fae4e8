"""How HunyuanImage 2.1 is trained: flow matching; text in the pipeline's template, and glyphs of quoted words."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import BucketingError
from ...packing.context import bind_checkpoints
from ..objectives import Objective
from ..recipe import Recipe
from ..samples import ModelInputs, Samples
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
    prompt_outputs = ("values", "mask", GLYPHS, GLYPH_MASK)
    native_sizes = ((2048, 2048), (1536, 2560), (2560, 1536), (1792, 2304), (2304, 1792))

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

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, with gradient checkpoints that take the keywords which the model passes to them."""
        bind_checkpoints(self.transformer)
        return super().predict(transformer, samples, inputs)


RECIPES = (HunyuanImageRecipe,)
