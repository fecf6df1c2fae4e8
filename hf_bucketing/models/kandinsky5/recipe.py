"""How Kandinsky 5 is trained: flow matching with a fixed shift; captions in a prompt template, and pooled by CLIP."""

from __future__ import annotations

from typing import Any

import torch

from ..recipe import Recipe
from ..samples import Samples
from ..texts import TextEmbeddings
from .packing import CONDITION, FAMILY, SCALE


class KandinskyRecipe(Recipe):
    """Recipe of Kandinsky's models, of which some take a visual condition; see [`Recipe`]."""

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the pooled captions, and zeros for the visual condition, as the pipelines pass them."""
        conditioning = super().conditioning(samples)
        if self.transformer.config.visual_cond:
            latents = samples.noised.latents
            conditioning[CONDITION] = [latent.new_zeros(len(latent) + 1, *latent.shape[1:]) for latent in latents]
        return conditioning


class Kandinsky5Recipe(KandinskyRecipe):
    """Recipe of `Kandinsky5T2VPipeline`; see [`Recipe`].

    The transformer attends to all text that it gets, so a stack holds captions of one length; packs may mix them.
    """

    pipeline_class = "Kandinsky5T2VPipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((512, 768),)
    """The pipeline's default."""

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, ends = self._encode_prompt(captions)
        mask = torch.arange(values.shape[1], device=values.device) < ends.diff()[:, None]
        text = TextEmbeddings(values, mask.long(), {"pooled_projections": pooled})
        return text.padded(self.max_sequence_length)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return also the scale of positions that the pipeline chooses for each size."""
        stride, latents = self.spec.spatial_stride, samples.noised.latents
        scales = [
            self.pipeline._get_scale_factor(latent.shape[-2] * stride, latent.shape[-1] * stride) for latent in latents
        ]
        return {**super().conditioning(samples), SCALE: torch.tensor(scales)}

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of captions of several lengths, because the model would attend to their padding."""
        assert samples.text.mask is not None
        lengths = samples.text.mask.sum(1)
        if len(lengths.unique()) == 1:
            return None
        return (
            "The forward of Kandinsky 5 has no mask for text and would attend to padding, and the captions of this "
            f"batch have {lengths.tolist()} tokens. Train packs, or batches of one sample."
        )


RECIPES = (Kandinsky5Recipe,)
