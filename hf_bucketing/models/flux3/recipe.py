"""How FLUX.3 is trained: flow matching with one shift; latents as those of FLUX.2; captions in windows."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...packing.texts import pad_texts
from ..flux2.recipe import Flux2Recipe
from ..modular import ModularRecipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class Flux3Recipe(ModularRecipe, Flux2Recipe):
    """Recipe of `Flux3ModularPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    A caption is encoded as it is: the block that rewrites prompts (`prompt_upsampler`) is neither loaded nor called.
    Captions are padded to the next multiple of 80 tokens, and the model attends to that padding. The pipeline itself
    cuts them at 8192 tokens.

    A sample may have any number of references. The modules that read them alone (`image_cond`) are not trained.
    """

    pipeline_class = "Flux3ModularPipeline"
    dropped_blocks = ("prompt_upsampler",)
    output = "images"
    family = FAMILY
    default_sequence_length = 640
    guidance_factor = None
    max_reference_ratio = None
    reference_sizes = MappingProxyType({**Flux2Recipe.reference_sizes, "alone_pixels": 4 * 1024**2})

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode each caption in its own window, and pad windows to `max_sequence_length`, with a mask."""
        from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

        encode: Any = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
        encoder, tokenizer = self.pipeline.text_encoder, self.pipeline.tokenizer
        length = self.max_sequence_length
        texts = [encode(encoder, tokenizer, caption, max_sequence_length=length)[0] for caption in captions]
        values, mask = pad_texts(texts)
        return TextEmbeddings(values, mask.long()).padded(length)


RECIPES = (Flux3Recipe,)

REFUSED = MappingProxyType(
    {
        "Flux3DistilledModularPipeline": (
            "its transformer is distilled to a flow map, which predicts the way from one timestep to another; train "
            "FLUX.3 itself"
        )
    }
)
