"""How Qwen-Image 2.1 is trained: flow matching, shifted by size; text in the pipeline's template, opaque images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ...buckets.sizes import Size
from ...devices import to_device
from ...errors import BucketingError
from ...packing.family import UNLIMITED
from ...packing.texts import REFERENCE_FOLLOWS, marked_places, pad_texts
from ..first_frame import pictures
from ..recipe import Recipe
from ..samples import REFERENCES, ModelInputs, Samples
from ..texts import TextEmbeddings
from .packing import FAMILY, SLOT


class QwenImage21Recipe(Recipe):
    """Recipe of `QwenImage21Pipeline`; see [`Recipe`].

    The pipeline takes captions of any length; here `max_sequence_length` cuts them. A sample may have any number of
    references. The text encoder sees them in the size in which they are encoded, and they stand within the text, where
    the pipeline's template names them.
    """

    pipeline_class = "QwenImage21Pipeline"
    family = FAMILY
    default_sequence_length = 512
    caption_tokenizer = "processor"
    trims_text = True
    native_sizes = ((1024, 1024),)
    max_references = UNLIMITED
    reference_multiple = 2
    reference_sizes = MappingProxyType({"area": 1024**2, "resample": "lanczos"})
    text_sees_references = True
    reference_text_tokens = 8
    """Those of a reference's name in the template, up to `<image99>`, and around its tokens."""
    shown_as = MappingProxyType({"reference": "image"})

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] with a fourth channel, which says that they are opaque."""
        return super().encode_latents(F.pad(pixel_values, (0, 0, 0, 0, 0, 0, 0, 1), value=1.0))

    @torch.no_grad()
    def encode_text(
        self, captions: list[str], references: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> TextEmbeddings:
        """Encode captions one by one, as the pipeline does with a prompt; padding would move their positions.

        Args:
            captions (list of `str`): Captions.
            references (sequence of sequences of `(3, 1, h, w)`, *optional*): The references of each caption's sample,
                in [−1, 1], which the text encoder sees; by default none. The mask says where they stand in the text.
        """
        shown = references or [()] * len(captions)
        texts, masks = (list(parts) for parts in zip(*map(self._encode_caption, captions, shown), strict=True))
        most = self.max_sequence_length + self.reference_text_tokens * max(map(len, shown))
        return TextEmbeddings(pad_texts(texts)[0], torch.nn.utils.rnn.pad_sequence(masks, True)).padded(most)

    def _encode_caption(self, caption: str, references: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the text of a caption, `(length, dim)`, without the tokens of references, and its mask."""
        frames = [frame for pixels in references for frame in pictures(pixels.transpose(0, 1))]
        device = self.pipeline.text_encoder.device
        (values,), _, (slots,) = self.pipeline.encode_prompt(caption, image=frames or None, device=device)
        slots = slots.cpu()
        words = (~slots).nonzero()[:, 0][: self.max_sequence_length + self.reference_text_tokens * len(references)]
        followed = F.pad(slots[1:], (0, 1))[words]
        return values[to_device(words, values.device)], 1 + (REFERENCE_FOLLOWS - 1) * followed

    def blank_text_mask(self, shape: tuple[int, int], references: Sequence[int]) -> torch.Tensor:
        """Return one in which references follow the first tokens of their text."""
        marked = torch.arange(shape[1]) < torch.tensor(references)[:, None]
        return 1.0 + (REFERENCE_FOLLOWS - 1) * marked

    @classmethod
    def encoder_pictures(cls, references: Sequence[Size]) -> int:
        """Return what references add to the text, and a token for each 32×32 pixels of them."""
        return super().encoder_pictures(references) + sum(size.height * size.width // 32**2 for size in references)

    def refusal(self, samples: Samples) -> str | None:
        """Refuse stacks of images, or with references, for which the stock model has no room."""
        shown, *_ = samples.conditions.get(REFERENCES) or [()]
        for latent in (samples.noised.latents[0], *shown):
            _, height, width = latent.shape[1:]
            if height * width % SLOT:
                return (
                    f"diffusers' Qwen-Image 2.1 runs images of a multiple of {SLOT} tokens, got {height}×{width}; use "
                    "sides that are multiples of 32 pixels, or train packs, which take any."
                )
        return super().refusal(samples)

    def model_inputs(self, samples: Samples) -> ModelInputs:
        """Return what the model is called with.

        Raises:
            BucketingError: If a text was not made with the references of its sample.
        """
        inputs = super().model_inputs(samples)
        counts = [len(shown) for shown in inputs.references or [()] * len(inputs.latents)]
        made = [0] * len(counts) if samples.text.mask is None else [*map(len, marked_places(samples.text.mask))]
        if made != counts:
            raise BucketingError(
                f"A {self.pipeline_class} has references within the text, and these texts were made with {made} "
                f"references, where samples have {counts}; cache texts again with this data set."
            )
        return inputs

    def predict(self, transformer: torch.nn.Module, samples: Samples, inputs: ModelInputs) -> torch.Tensor:
        """Run a stack, or its samples one by one where texts differ in length, since images stand behind padding."""
        values, mask, others = samples.text
        if mask is None or bool((mask == mask[:1]).all()):
            return super().predict(transformer, samples, inputs)
        shown = inputs.references or [()] * len(inputs.latents)
        outputs = [
            super(QwenImage21Recipe, self).predict(
                transformer,
                replace(samples, text=TextEmbeddings(values[row : row + 1], mask[row : row + 1], others)),
                replace(
                    inputs,
                    latents=[latent],
                    timesteps=inputs.timesteps[row : row + 1],
                    references=shown[row : row + 1],
                ),
            )
            for row, latent in enumerate(inputs.latents)
        ]
        return torch.cat(outputs)

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Image.Image]], size: Size) -> dict[str, Any]:
        """Return references as arguments of the call, with the resolution that keeps the sizes of most of them.

        The pipeline gives all of them one area, so that others are resized.
        """
        from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions

        sizes = [frame.size for frame, *_ in references]

        def kept(resolution: int) -> int:
            return sum(
                calculate_dimensions(resolution**2, width / height)[:2] == (width, height) for width, height in sizes
            )

        near = [round(math.sqrt(width * height)) for width, height in sorted(sizes, reverse=True)]
        resolution = max([round(math.sqrt(cls.reference_sizes["area"])), *near], key=kept)
        return {**super().reference_arguments(references, size), "output_resolution": resolution}

    def render(self, *args: Any, **options: Any) -> np.ndarray:
        """Call the pipeline, and return colours without opacity."""
        return super().render(*args, **options)[..., :3]


RECIPES = (QwenImage21Recipe,)
