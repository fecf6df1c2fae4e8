"""How Chroma is trained: flow matching, shifted by size; text masked but for one token of its padding."""

from __future__ import annotations

import torch

from ...buckets.sizes import LatentSpec
from ..flux.packing import BLOCK
from ..recipe import Recipe, Samples, TextEmbeddings, image_spec
from .packing import FAMILY


class ChromaRecipe(Recipe):
    """Recipe of `ChromaPipeline`; see [`Recipe`]."""

    pipeline_class = "ChromaPipeline"
    family = FAMILY
    image_vae = True
    default_sequence_length = 512
    native_sizes = ((1024, 1024),)

    @classmethod
    def read_spec(cls, name_or_path: str) -> LatentSpec:
        """Read the VAE's stride; a token is a block of latent pixels."""
        return image_spec(name_or_path, side=BLOCK)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions, with a mask that keeps one token of the padding."""
        values, _, mask, *_ = self.pipeline.encode_prompt(
            captions,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
            device=self.pipeline.text_encoder.device,
        )
        return TextEmbeddings(values, mask)

    def refusal(self, samples: Samples) -> str | None:
        """Refuse masked stacks with gradient checkpointing, under which the stock model drops the mask."""
        mask = samples.text.mask
        checkpointing = self.transformer.gradient_checkpointing and torch.is_grad_enabled()
        if checkpointing and mask is not None and not bool(mask.all()):
            return (
                "With gradient checkpointing, diffusers' Chroma passes no text mask to its single blocks; train packs "
                '(`batching="pack"`), which need no mask, or omit `gradient_checkpointing`.'
            )
        return super().refusal(samples)


RECIPES = (ChromaRecipe,)
