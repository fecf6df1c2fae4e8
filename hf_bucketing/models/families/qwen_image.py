"""Qwen-Image: images in 2×2 blocks; rotary positions from the middle of an image, and of text beyond its edge.

The pipeline masks the padding of a text: pass what the mask keeps. Timesteps are the scheduler's, up to 1000, as for
the other families; the model gets a thousandth of them, as from its pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from ...buckets.sizes import Size
from ...conditions.references import ReferenceRule
from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import PackedBatch, Rows
from ...packing.family import UNLIMITED, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.processors import PackedJointAttnProcessor, Rotary
from ...packing.texts import TextTokens, pad_texts
from ..first_frame import pictures
from ..joint import JointFamily
from ..recipe import Recipe
from ..texts import TextEmbeddings

BLOCK = 2
"""Latent rows and columns that the pipeline puts into one token."""
_STEP = 32
"""Multiple in pixels to which the pipelines round the sides of references."""


class PackedQwenDoubleStreamAttnProcessor(PackedJointAttnProcessor):
    """Joint attention of Qwen-Image over the strips of a pack."""

    def rotate(self, tokens: torch.Tensor, rotary: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply pairs of channels of `(…, H, D)` as complex numbers in float32, like the stock processor."""
        pairs = torch.view_as_complex(tokens.float().unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * torch.complex(*rotary).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(tokens)


class QwenImageFamily(JointFamily):
    """Packing of `QwenImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    title = "Qwen-Image and Edit, 2509 and 2511"
    transformer_class = "QwenImageTransformer2DModel"
    tested_forwards = ("ff06e8bc147f",)
    processor_class = PackedQwenDoubleStreamAttnProcessor
    stock_processors = ("QwenDoubleStreamAttnProcessor2_0",)
    text = TextTokens(rows="slots", channels="joint_attention_dim", mask="encoder_hidden_states_mask")
    images_only = True
    latents_as = "tokens"
    attention_kwargs = "attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)
    position_module = "pos_embed"
    rotates_text = True
    max_references = UNLIMITED
    unused_at_end = ("attn.to_add_out", "txt_mlp")
    timestep_unit = 1000
    text_modulations = ("transformer_blocks.*.txt_mod",)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models of layers, guidance that diffusers cannot run, and other blocks than those of the pipeline."""
        config = transformer.config
        if config.use_layer3d_rope or config.use_additional_t_cond:
            raise PackingError(
                "This transformer is of Qwen-Image-Layered (use_layer3d_rope, use_additional_t_cond): a sample is "
                "several images, the last one a condition, which a pack of single images cannot hold."
            )
        if config.guidance_embeds:
            raise PackingError(
                "This Qwen-Image transformer has guidance_embeds, but no embedding of guidance: its forward in "
                "diffusers fails when it gets guidance."
            )
        if config.patch_size != BLOCK or config.in_channels % BLOCK**2:
            raise PackingError(
                f"A Qwen-Image token holds {BLOCK}×{BLOCK} latent pixels, so patch_size must be {BLOCK} and "
                f"in_channels a multiple of {BLOCK**2}; got {config.patch_size} and {config.in_channels}."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides for which the tables have positions, counted from the middle in both directions."""
        positions = len(transformer.pos_embed.pos_freqs)
        return 1, 2 * positions, 2 * positions

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also texts that reach beyond the positions: they begin where the image of their sample ends."""
        super().check_layout(transformer, layout, stretched=stretched)
        positions = len(transformer.pos_embed.pos_freqs)
        for sample, (grids, length) in enumerate(zip(layout.sample_grids, layout.text_lengths, strict=True)):
            if _first_position(grids) + length > positions:
                raise PackingError(
                    f"The text of sample {sample} has {length} tokens from position {_first_position(grids)} on, and "
                    f"this model has {positions} positions."
                )

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        image, _ = module.forward([grid], device=device, max_txt_seq_len=0)
        return image.real, image.imag

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Return the positions of references, which are further frames."""
        images, _ = module.forward([list(grids)], device=device, max_txt_seq_len=0)
        references = images[math.prod(grids[0]) :]
        return references.real, references.imag

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Return the real and imaginary parts of a text's positions, which follow those of its images."""
        text = to_device(module.pos_freqs[_first_position(grids) :][:length], device)
        return text.real, text.imag

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook also the shapes from which the model makes positions."""
        hooks = super().hook_positions(transformer, base_size)
        return [*hooks, transformer.pos_embed.register_forward_pre_hook(_one_shape)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        return {"img_shapes": [list(rows.grids)] * len(rows.latents), **super().inputs(rows)}

    def rows(self, batch: PackedBatch) -> Rows:
        """Say how many tokens of each strip are shown: models with `zero_cond_t` modulate them as clean ones."""
        rows, length = super().rows(batch), batch.layout.strip_length
        if batch.layout.shown is None:
            return rows
        counts = batch.layout.own_tokens_by_strip
        shapes = [[(1, 1, count), (1, 1, length - count)] for count in counts]
        return replace(rows, conditioning={**rows.conditioning, "img_shapes": shapes})


def _one_shape(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the position module the shape of one part: its output is replaced, and it takes no strips of several."""
    (first, *_), *others = args
    return [first[:1]], *others


def _first_position(grids: Sequence[Grid]) -> int:
    """Return the position of a text's first token."""
    return max(max(rows // 2, columns // 2) for _, rows, columns in grids)


class QwenImageRecipe(Recipe):
    """Recipe of `QwenImagePipeline`; see [`Recipe`]."""

    pipeline_class = "QwenImagePipeline"
    family = QwenImageFamily()
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
        halved = vae["temperal_downsample"]
        return 2 ** sum(halved), 2 ** len(halved)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions in the pipeline's template, padded to `max_sequence_length`."""
        return super().encode_text(captions).padded(self.max_sequence_length)


EDITED = ReferenceRule(
    area=1024**2,
    multiples=(2, 2),
    resample="lanczos",
    in_text=True,
    text_tokens=217,
    argument="image",
)
"""References of Qwen-Image-Edit-2509 and 2511; tokens of text are those of one up to five times longer than wide."""


class QwenImageEditPlusRecipe(QwenImageRecipe):
    """Recipe of `QwenImageEditPlusPipeline`, for Qwen-Image-Edit 2509 and 2511; see [`Recipe`].

    A sample may have any number of references. The text encoder sees them too, in the size that the pipeline makes
    them for it. A sample without any has the text that the pipeline's template makes of a caption and no pictures.
    """

    pipeline_class = "QwenImageEditPlusPipeline"
    conditions = (EDITED,)
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
        by_caption = references or [()] * len(captions)
        pairs = zip(captions, by_caption, strict=True)
        return TextEmbeddings(*pad_texts([self._encode_caption(caption, seen) for caption, seen in pairs]))

    def _encode_caption(self, caption: str, references: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the text of a caption and the pictures seen with it, `(length, dim)`."""
        frames = [frame for pixels in references for frame in pictures(pixels.transpose(0, 1))]
        device = self.pipeline.text_encoder.device
        (values,), _ = self._encode_pictures(caption, [self._for_text(frame) for frame in frames], device=device)
        _, _, end = self.pipeline.prompt_template_encode.partition("{}")
        excess = len(self.pipeline.tokenizer(caption + end).input_ids) - self.max_sequence_length
        return values[: len(values) - max(0, excess)]

    def _encode_pictures(self, caption: str, references: Sequence[Image.Image], *, device: torch.device) -> Any:
        return self.pipeline.encode_prompt([caption], image=list(references) or None, device=device)

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
    conditions = (replace(EDITED, most=1, text_tokens=1409),)
    text_pixels = 1024**2

    def _for_text(self, picture: Image.Image) -> Image.Image:
        """Return a picture as the pipeline shows it to its text encoder: that of this area is the reference itself."""
        side = math.sqrt(picture.width * picture.height)
        return picture if abs(side - math.sqrt(self.text_pixels)) < _STEP else super()._for_text(picture)

    def _encode_pictures(self, caption: str, references: Sequence[Image.Image], *, device: torch.device) -> Any:
        if references:
            return self.pipeline.encode_prompt([caption], image=references[0], device=device)
        from diffusers import QwenImageEditPlusPipeline

        return QwenImageEditPlusPipeline(**self.pipeline.components).encode_prompt([caption], device=device)

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Image.Image]], size: Size) -> dict[str, Any]:
        """Return the reference as the argument of the pipeline's call."""
        ((picture,),) = super().reference_arguments(references, size).values()
        return {"image": picture}


RECIPES = (
    QwenImageRecipe,
    QwenImageEditRecipe,
    QwenImageEditPlusRecipe,
)
