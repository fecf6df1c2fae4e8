"""How HunyuanVideo 1.5 is trained: flow matching with a fixed shift; captions, their quoted words, a first frame."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from ...buckets.sizes import Size
from ..first_frame import ENDS, pictures, shown_ends
from ..recipe import Recipe
from ..samples import Conditions, Samples, Shown
from .packing import FAMILY, GLYPH_MASK, GLYPHS, IMAGE

IMAGE_LATENTS = "image_latents"
"""Condition that holds the latents of the first frame, `(C, 1, h, w)`."""


class GuiderRecipe(Recipe):
    """Recipe of pipelines with a guider, whose models are shown parts of a clip as channels; see [`Recipe`]."""

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return what the model is shown of each sample and a mask of it, `(C + 1, f, h, w)`: here nothing."""
        return [latent.new_zeros(len(latent) + 1, *latent.shape[1:]) for latent in samples.noised.latents]

    def render(self, prompt: str, size: Size, *, guidance_scale: float | None = None, **options: Any) -> np.ndarray:
        """Call the pipeline, whose guider holds the scale of guidance; see [`Recipe.render`]."""
        if guidance_scale is not None:
            self.pipeline.guider.guidance_scale = guidance_scale
        return super().render(prompt, size, **options)


class HunyuanVideo15Recipe(GuiderRecipe):
    """Recipe of `HunyuanVideo15Pipeline`; see [`Recipe`].

    The words that a caption quotes are encoded once more, by their letters (ByT5).
    """

    pipeline_class = "HunyuanVideo15Pipeline"
    family = FAMILY
    default_sequence_length = 1000
    added_text_tokens = 256 + 729
    """Those of glyphs, and of an image: where there is none, the pipeline passes as many zeros."""
    prompt_outputs = ("values", "mask", GLYPHS, GLYPH_MASK)
    native_sizes = ((480, 848), (720, 1280))
    constructor_reads = ("vae",)

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode sample by sample: the attention mask of diffusers' VAE fits one sample only."""
        encode = super().encode_latents
        return torch.cat([encode(sample) for sample in pixel_values.split(1)])

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return also the image tokens."""
        return {**super().conditioning(samples), IMAGE: self.image_tokens(samples)}

    def image_tokens(self, samples: Samples) -> torch.Tensor:
        """Return the image tokens of the samples, here none, which equals the pipeline's masked zeros."""
        text = samples.text.values
        return text.new_zeros(len(text), 0, self.transformer.config.image_embed_dim)

    def render(self, prompt: str, size: Size, **options: Any) -> np.ndarray:
        """Call the pipeline, which has the length of texts as an attribute; see [`Recipe.render`]."""
        self.pipeline.tokenizer_max_length = self.max_sequence_length
        return super().render(prompt, size, **options)


class HunyuanVideo15ImageToVideoRecipe(HunyuanVideo15Recipe):
    """Recipe of `HunyuanVideo15ImageToVideoPipeline`, whose models continue a sample's first frame; see [`Recipe`].

    The model gets the frame's latents and a mask as further channels, and attends to its SigLIP embedding.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
    takes_image = True
    shown = ENDS[:1]

    @torch.no_grad()
    def encode_conditions(self, pixel_values: torch.Tensor, latents: torch.Tensor, shown: Shown) -> Conditions:
        """Encode the first frame, the sample's own or the data set's, by the VAE and by the image encoder."""
        first, encoder = shown_ends(pixel_values, shown), self.pipeline.image_encoder
        images = pictures(first[:, :, 0])
        tokens = self.pipeline.encode_image(images, batch_size=1, device=encoder.device, dtype=encoder.dtype)
        return {IMAGE_LATENTS: self.encode_latents(first), IMAGE: tokens}

    def blank_conditions(self, latent: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return zeros of the shapes of [`encode_conditions`]."""
        shape = self.pipeline.vision_num_semantic_tokens, self.pipeline.vision_states_dim
        return {IMAGE_LATENTS: torch.zeros_like(latent[:, :1]), IMAGE: latent.new_zeros(shape)}

    def added_channels(self, samples: Samples) -> list[torch.Tensor]:
        """Return the latents of the first frame, zeros for the others, and a mask that is 1 at the first."""
        conditions = super().added_channels(samples)
        for condition, first in zip(conditions, samples.conditions[IMAGE_LATENTS], strict=True):
            condition[:, :1] = torch.cat([first, torch.ones_like(first[:1])])
        return conditions

    def image_tokens(self, samples: Samples) -> torch.Tensor:
        """Return the image encoder's tokens of the first frames."""
        return torch.stack(list(samples.conditions[IMAGE])).to(samples.text.values)

    def render(self, prompt: str, size: Size, **options: Any) -> np.ndarray:
        """Call the pipeline with a size, where it would choose one by the image's ratio, rounded to five digits."""
        processor = self.pipeline.video_processor
        sized = copy.copy(processor)  # calls of other sizes, which may run side by side, share the pipeline's own
        sized.calculate_default_height_width = lambda **image_size: (size.height, size.width)
        self.pipeline.video_processor = sized
        try:
            return super().render(prompt, size, **options)
        finally:
            self.pipeline.video_processor = processor


RECIPES = (HunyuanVideo15Recipe, HunyuanVideo15ImageToVideoRecipe)
