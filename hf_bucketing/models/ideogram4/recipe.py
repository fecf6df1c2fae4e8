"""How Ideogram 4 is trained: flow matching, shifted by the root of the pixels; latents by block; text in a chat."""

from __future__ import annotations

from types import MappingProxyType

import torch

from ...packing.texts import apply_text_mask, pad_texts
from ..flux2.recipe import BlockRecipe, encode_blocks
from ..shift import ShiftByRoot, ShiftLaw
from ..texts import TextEmbeddings
from .packing import FAMILY, TEXT


class Ideogram4Recipe(BlockRecipe):
    """Recipe of `Ideogram4Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    The `transformer` is trained; the `unconditional_transformer`, which guides it and takes no text, stays as it is.
    The pipeline takes no caption of more than `max_sequence_length` tokens, and can rewrite prompts as JSON by a
    language model (`prompt_upsampling`); captions are trained as they are.
    """

    pipeline_class = "Ideogram4Pipeline"
    family = FAMILY
    default_sequence_length = 2048
    trims_text = True
    native_sizes = ((1024, 1024), (2048, 2048))
    call_defaults = MappingProxyType({"guidance_scale": 7.0, "guidance_schedule": None})

    def encode_latents(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images `(B, 3, 1, H, W)` in [−1, 1] to normalised blocks, `(B, 4·C, 1, h/2, w/2)`, channels last."""
        vae = self.pipeline.vae
        blocks = encode_blocks(vae, pixel_values, epsilon=vae.config.batch_norm_eps, channels_first=False)
        return blocks[:, :, None]

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as beside an image without tokens; the padding, in front of a text, is moved behind it."""
        encoder = self.pipeline.text_encoder
        values, _, _, kinds = self.pipeline.encode_prompt(captions, 0, 0, self.max_sequence_length, encoder.device)
        values, mask = pad_texts(apply_text_mask("masked", values, mask=kinds == TEXT))
        return TextEmbeddings(values, mask.long()).padded(self.max_sequence_length)

    def shift(self) -> ShiftLaw:
        """Return the shift of the pipeline's call, whose noise levels do not depend on its scheduler's configuration.

        It draws their logits from a normal distribution, of deviation 1.5, around half the logarithm of the pixels,
        compared with 512×512.
        """
        return ShiftByRoot(base=512 * 512, factor=1.0)


RECIPES = (Ideogram4Recipe,)
