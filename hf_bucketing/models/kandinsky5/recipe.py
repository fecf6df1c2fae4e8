"""How Kandinsky 5 is trained: flow matching with a fixed shift; captions in a prompt template, and pooled by CLIP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..recipe import ModelInputs, Recipe, Samples, TextEmbeddings
from .packing import FAMILY, SCALE


class Kandinsky5Recipe(Recipe):
    """Recipe of `Kandinsky5T2VPipeline`; see [`Recipe`].

    The transformer attends to all text that it gets, so a stack holds captions of one length; packs may mix them.
    """

    pipeline_class = "Kandinsky5T2VPipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes = ((512, 768),)
    """The pipeline's default."""

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents, without those of a visual condition."""
        return int(self.transformer.config.in_visual_dim)

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions inside the pipeline's prompt template, whose own tokens it crops; pooled ones by CLIP."""
        values, pooled, ends = self._encode_prompt(captions)
        missing = self.max_sequence_length - values.shape[1]
        mask = torch.arange(self.max_sequence_length, device=values.device) < ends.diff()[:, None]
        return TextEmbeddings(F.pad(values, (0, 0, 0, missing)), mask.long(), {"pooled_projections": pooled})

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return also the channels of a visual condition, where the model takes one: zeros, as its pipeline does."""
        inputs = super().model_inputs(samples)
        if not self.transformer.config.visual_cond:
            return inputs
        return replace(inputs, latents=[F.pad(latent, (0,) * 7 + (len(latent) + 1,)) for latent in inputs.latents])

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the pooled captions, and the scale of positions that the pipeline chooses for each size."""
        stride = self.spec.spatial_stride
        scales = [
            self.pipeline._get_scale_factor(latent.shape[-2] * stride, latent.shape[-1] * stride)
            for latent in samples.noised.latents
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
