"""PixArt and Latte: sine-cosine positions, text in cross-attention; denoising with a learned variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid

from ...buckets.sizes import Size
from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Family, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Backend, Grid
from ...packing.positions import axis_coordinates
from ...packing.processors import PackedAttnProcessor
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ..positions import hook_patch_embed, sincos_table
from ..recipe import Recipe
from ..samples import Samples
from ..texts import TextEmbeddings, cleans_captions

_TOKENS = 120
"""Text tokens per caption, which the pipeline of Latte fixes."""


class PixArtFamily(Family):
    """PixArt-α and PixArt-Σ: images; sine-cosine positions; resolution and aspect ratio where trained with them.

    An image is a sample of one frame. The model itself stretches its positions to `sample_size`.
    """

    title = "PixArt-α and PixArt-Σ"
    transformer_class = "PixArtTransformer2DModel"
    tested_forwards = ("ad3c44bf6904",)
    text = TextTokens(rows="per_strip", mask="encoder_attention_mask")
    images_only = True
    latents_as = "images"

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a caption, or of the attention's text where captions are not projected."""
        return int(transformer.config.caption_channels or transformer.config.cross_attention_dim)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the conditions of PixArt-α at 1024 pixels: height and width in pixels, and height ÷ width."""
        if not transformer.use_additional_conditions:
            return {}

        def sides(grids: Sequence[Grid]) -> torch.Tensor:  # eight pixels per latent row and column
            return torch.tensor([[h, w] for _, h, w in grids]) * 8.0 * transformer.config.patch_size

        return {"resolution": sides, "aspect_ratio": lambda grids: sides(grids)[:, :1] / sides(grids)[:, 1:]}

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        return [hook_patch_embed(transformer.pos_embed, sincos_table)]

    def inputs(self, rows: Rows) -> dict[str, Any]:
        added = {"resolution": None, "aspect_ratio": None, **rows.conditioning}
        return {**super().inputs(replace(rows, conditioning={})), "added_cond_kwargs": added}


class PixArtAlphaRecipe(Recipe):
    """Recipe of `PixArtAlphaPipeline`; see [`Recipe`]."""

    pipeline_class = "PixArtAlphaPipeline"
    family = PixArtFamily()
    denoises = True
    image_vae = True
    default_sequence_length = 120
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((512, 512), (1024, 1024))
    """One for each of the two models; the pipeline also has 32 sizes of other shapes for each."""
    call_defaults = MappingProxyType({"use_resolution_binning": False})
    """Else the pipeline makes the nearest of its own sizes and stretches that."""

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return each image's height and width in pixels and height ÷ width, for models trained with them."""
        if not self.transformer.use_additional_conditions:
            return {}
        sides = [latent.shape[2:] for latent in samples.noised.latents]
        resolution = torch.tensor(sides, dtype=torch.float32) * self.spec.spatial_stride
        return {"resolution": resolution, "aspect_ratio": resolution[:, :1] / resolution[:, 1:]}

    def render(self, prompt: str, size: Size, *, image: Any = None, **options: Any) -> np.ndarray:
        """Call the pipeline, which cleans captions where it can."""
        options = {"clean_caption": cleans_captions(), **options}
        return super().render(prompt, size, image=image, **options)


class PixArtSigmaRecipe(PixArtAlphaRecipe):
    """Recipe of `PixArtSigmaPipeline`; see [`Recipe`]."""

    pipeline_class = "PixArtSigmaPipeline"
    default_sequence_length = 300
    native_sizes = ((256, 256), (512, 512), (1024, 1024), (2048, 2048))
    """One for each of the four models."""


class LatteFamily(Family):
    """Latte: blocks that attend inside frames and over frames in turn; denoising with a learned variance.

    The stock model runs images and videos of exactly `video_length` frames; packed, it runs any number up to that.

    The model itself stretches rows and columns to `sample_size`, whatever their number, so a sample stretched to a
    base size has the rows and columns that it has anyway; the frames of a base size stretch those of the samples.
    """

    title = "Latte"
    transformer_class = "LatteTransformer3DModel"
    tested_forwards = ("d33f1c214b4c",)
    interpolates = True

    def limits(self, transformer: Transformer) -> Grid:
        return int(transformer.config.video_length), UNLIMITED, UNLIMITED

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples without some of their tokens: attention over frames needs the token of every frame."""
        super().check_layout(transformer, layout, stretched=stretched)
        if layout.kept is not None:
            name = type(transformer).__name__
            raise PackingError(f"{name} does more than attention across tokens; pack it without token_drop.")

    def processor(self, name: str, backend: Backend) -> PackedAttnProcessor:
        return PackedAttnProcessor(backend, scope="spatial_position" if name.startswith("temporal") else "frame")

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook the patch embedding, and the first temporal block, whose input gets the positions of frames."""
        first, add_frames = transformer.temporal_transformer_blocks[0], partial(_add_frames, transformer, base_size)
        return [hook_patch_embed(transformer.pos_embed, sincos_table), first.register_forward_pre_hook(add_frames)]

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the bias of padded text for every frame: the model repeats the text itself, but not its mask."""
        if rows.text_mask is None:
            return {}
        bias = (1 - rows.text_mask[:, None].to(rows.latents.dtype)) * -10_000.0
        return {"encoder_attention_mask": bias.repeat_interleave(rows.latents.shape[2], dim=0)}

    def run(self, transformer: Transformer, rows: Rows, *, wrapped: Any = None) -> torch.Tensor:
        """Run samples of one size, with as many of the model's positions as they have frames."""
        table = transformer.temp_pos_embed
        transformer.temp_pos_embed = table[:, : rows.latents.shape[2]]
        try:
            return super().run(transformer, rows, wrapped=wrapped)
        finally:
            transformer.temp_pos_embed = table


def _add_frames(
    transformer: Transformer, base_size: Grid | None, block: torch.nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    hidden_states, *rest = args  # (tokens, 1, dim)
    (positions,) = position_strips(active_layout(), lambda grid: (_frames(transformer, grid, base_size),))
    return hidden_states + positions.flatten(0, 1)[:, None].to(hidden_states.dtype), *rest


def _frames(transformer: Transformer, grid: Grid, base_size: Grid | None) -> torch.Tensor:
    """Return the positions of a sample's frames for each of its tokens, `(t·h·w, dim)`: zero for an image."""
    t, h, w = grid
    table: torch.Tensor = transformer.temp_pos_embed[0]
    if t == 1:
        positions = torch.zeros_like(table[:1])
    elif base_size is None:
        positions = table[:t]
    else:
        frames, _, _ = axis_coordinates(grid, base_size, device=table.device)
        positions = get_1d_sincos_pos_embed_from_grid(table.shape[1], frames, output_type="pt").to(table.dtype)
    return positions.repeat_interleave(h * w, 0)


class LatteRecipe(Recipe):
    """Recipe of `LattePipeline`; see [`Recipe`].

    Of the negative prompt, padding included, the pipeline takes as many tokens as the prompt has, so a dropped caption
    does likewise.
    """

    pipeline_class = "LattePipeline"
    family = LatteFamily()
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


RECIPES = (
    PixArtAlphaRecipe,
    PixArtSigmaRecipe,
    LatteRecipe,
)
