"""How Latte is trained: denoising with a learned variance; latents frame by frame; text masked."""

from __future__ import annotations

import torch

from ...devices import to_device
from ..recipe import Recipe
from ..samples import Samples
from ..texts import TextEmbeddings, cleans_captions
from .packing import FAMILY

_TOKENS = 120
"""Text tokens per caption, which the pipeline fixes."""


class LatteRecipe(Recipe):
    """Recipe of `LattePipeline`; see [`Recipe`].

    Of the negative prompt, padding included, the pipeline takes as many tokens as the prompt has, so a dropped caption
    does likewise.
    """

    pipeline_class = "LattePipeline"
    family = FAMILY
    denoises = True
    image_vae = True
    default_sequence_length = _TOKENS
    null_as_long = True
    native_sizes = ((512, 512),)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions with a mask; the pipeline, which encodes one caption, cuts its padding off instead."""
        tokens = self.pipeline.tokenizer(
            self.pipeline._text_preprocessing(captions, clean_caption=cleans_captions()),
            padding="max_length",
            max_length=self.max_sequence_length,
            truncation=True,
            add_special_tokens=True,
            return_tensors="pt",
        )
        encoder = self.pipeline.text_encoder
        moved = (to_device(values, encoder.device) for values in (tokens.input_ids, tokens.attention_mask))
        return TextEmbeddings(encoder(*moved)[0], tokens.attention_mask)

    def refusal(self, samples: Samples) -> str | None:
        """Refuse samples that do not have the one duration that the model can stack."""
        frames, only = samples.noised.latents[0].shape[1], self.transformer.config.video_length
        if frames in (1, only):
            return None
        return (
            f"Latte runs a stack of {only} frames (its video_length) or of images, not of {frames}; train packs ("
            f'`batching="pack"`), which have no such limit, or prepare the data set with --bucket_frames 1,{only}.'
        )


RECIPES = (LatteRecipe,)
