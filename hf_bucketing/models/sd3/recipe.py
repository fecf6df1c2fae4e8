"""How Stable Diffusion 3 and 3.5 are trained: flow matching; text of two CLIPs and T5 with its padding."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

from ...errors import BucketingError
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY


class SD3Recipe(Recipe):
    """Recipe of `StableDiffusion3Pipeline`; see [`Recipe`].

    A caption has the 77 tokens of CLIP, and after them `max_sequence_length` of T5: zeros where the pipeline
    comes without it (`text_encoder_3`).
    """

    pipeline_class = "StableDiffusion3Pipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 256
    caption_tokenizer = "tokenizer_3"
    added_text_tokens = 77
    """Those of CLIP."""
    prompt_outputs = ("values", "", "pooled_projections")
    native_sizes = ((1024, 1024),)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as the pipeline does, to a sequence and a pooled embedding each.

        Raises:
            BucketingError: If the pipeline lacks one of the CLIPs, without which its own call fails too.
        """
        for name in ("text_encoder", "text_encoder_2"):
            if getattr(self.pipeline, name) is None:
                raise BucketingError(
                    f"This {self.pipeline_class} has no {name}; only text_encoder_3, the T5, may be absent."
                )
        pipeline = copy(self.pipeline)
        if pipeline.transformer is None:  # its configuration has the width of the zeros in place of T5's embeddings
            vars(pipeline)["transformer"] = SimpleNamespace(config=SimpleNamespace(**self.config))
        return super(SD3Recipe, replace(self, pipeline=pipeline)).encode_text(captions)


RECIPES = (SD3Recipe,)
