"""How Qwen-Image and Qwen-Image-Edit are trained: flow matching, shifted by size; text in a template, masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from ...buckets.sizes import Size
from ...packing.family import UNLIMITED
from ...packing.texts import pad_texts
from ..first_frame import pictures
from ..recipe import Recipe
from ..texts import TextEmbeddings
from .packing import FAMILY

_STEP = 32
"""Multiple in pixels to which the pipelines round the sides of references."""


class QwenImageRecipe(Recipe):
    """Recipe of `QwenImagePipeline`; see [`Recipe`]."""

    pipeline_class = "QwenImagePipeline"
    family = FAMILY
    default_sequence_length = 512
    trims_text = True
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = (
        (1328, 1328),
        (928, 1664),
        (1664, 928),
        (1104, 1472),
        (1472, 1104),
        (1056, 1584),
        (1584, 1056),
    )

    @classmethod
    def vae_strides(cls, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return the strides of a VAE that halves frames and sides as its configuration lists."""
        halved = vae["temperal_downsample"]
        return 2 ** sum(halved), 2 ** len(halved)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, padded to `max_sequence_length`."""
        return super().encode_text(captions).padded(self.max_sequence_length)


class QwenImageEditPlusRecipe(QwenImageRecipe):
    """Recipe of `QwenImageEditPlusPipeline`, for Qwen-Image-Edit 2509 and 2511; see [`Recipe`].

    A sample may have any number of references. The text encoder sees them too, in the size that the pipeline makes
    them for it. A sample without any has the text that the pipeline's template makes of a caption and no pictures.
    """

    pipeline_class = "QwenImageEditPlusPipeline"
    max_references = UNLIMITED
    reference_multiple = 2
    reference_sizes = MappingProxyType({"area": 1024**2, "resample": "lanczos"})
    text_sees_references = True
    reference_text_tokens = 217
    """Those of a reference up to five times longer than wide."""
    shown_as = MappingProxyType({"reference": "image"})
    native_sizes = ((1024, 1024), (896, 1184), (1184, 896), (832, 1248), (1248, 832), (768, 1376), (1376, 768))
    text_pixels: ClassVar[int] = 384**2
    """Area in which the pipeline shows its text encoder a picture of any size."""

    @torch.no_grad()
    def encode_text(
        self, captions: list[str], references: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> TextEmbeddings:
        """Encode captions and the references of their samples in the pipeline's template, padded to the longest.

        Args:
            captions (list of `str`): Captions. What they and the end of the template have beyond
                `max_sequence_length` tokens is left away.
            references (sequence of sequences of `(3, 1, h, w)`, *optional*): The references of each caption's sample,
                in [−1, 1]; by default none.
        """
        shown = references or [()] * len(captions)
        pairs = zip(captions, shown, strict=True)
        return TextEmbeddings(*pad_texts([self._encode_caption(caption, seen) for caption, seen in pairs]))

    def _encode_caption(self, caption: str, references: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the text of a caption and the pictures seen with it, `(length, dim)`."""
        frames = [frame for pixels in references for frame in pictures(pixels.transpose(0, 1))]
        device = self.pipeline.text_encoder.device
        (values,), _ = self._encode_pictures(caption, [self._for_text(frame) for frame in frames], device=device)
        _, _, end = self.pipeline.prompt_template_encode.partition("{}")
        excess = len(self.pipeline.tokenizer(caption + end).input_ids) - self.max_sequence_length
        return values[: len(values) - max(0, excess)]

    def _encode_pictures(self, caption: str, shown: Sequence[Image.Image], *, device: torch.device) -> Any:
        return self.pipeline.encode_prompt([caption], image=list(shown) or None, device=device)

    def _for_text(self, picture: Image.Image) -> Image.Image:
        """Return a picture in the size in which the pipeline shows it to its text encoder."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

        width, height = calculate_dimensions(self.text_pixels, picture.width / picture.height)
        return self.pipeline.image_processor.resize(picture, height, width)

    def render(
        self, prompt: str, size: Size, *, references: Sequence[Sequence[Image.Image]] = (), **options: Any
    ) -> np.ndarray:
        """Call the pipeline, or without references `QwenImagePipeline` with their text; see [`Recipe.render`]."""
        if references:
            return super().render(prompt, size, references=references, **options)
        from diffusers import QwenImagePipeline

        text = self.encode_text([prompt])
        components = {name: part for name, part in self.pipeline.components.items() if name != "processor"}
        pipeline = QwenImagePipeline(**components)
        pipeline.set_progress_bar_config(disable=True)
        call = {**self.size_arguments(size), **options, "output_type": "np"}
        return pipeline(prompt_embeds=text.values, prompt_embeds_mask=text.mask, **call).images


class QwenImageEditRecipe(QwenImageEditPlusRecipe):
    """Recipe of `QwenImageEditPipeline`, for Qwen-Image-Edit, whose samples have one reference or none.

    The text of a sample without one is that of `QwenImageEditPlusPipeline`, whose template is the same without the
    picture.
    """

    pipeline_class = "QwenImageEditPipeline"
    max_references = 1
    reference_text_tokens = 1409
    text_pixels = 1024**2

    def _for_text(self, picture: Image.Image) -> Image.Image:
        """Return a picture as the pipeline shows it to its text encoder: that of this area is the reference itself."""
        side = math.sqrt(picture.width * picture.height)
        return picture if abs(side - math.sqrt(self.text_pixels)) < _STEP else super()._for_text(picture)

    def _encode_pictures(self, caption: str, shown: Sequence[Image.Image], *, device: torch.device) -> Any:
        if shown:
            return self.pipeline.encode_prompt([caption], image=shown[0], device=device)
        from diffusers import QwenImageEditPlusPipeline

        return QwenImageEditPlusPipeline(**self.pipeline.components).encode_prompt([caption], device=device)

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Image.Image]], size: Size) -> dict[str, Any]:
        """Return the reference as the argument of the pipeline's call."""
        ((picture,),) = super().reference_arguments(references, size).values()
        return {"image": picture}


RECIPES = (QwenImageRecipe, QwenImageEditRecipe, QwenImageEditPlusRecipe)
