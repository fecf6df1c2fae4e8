"""FLUX.1 and its kin: images in 2×2 blocks, rotary positions over rows and columns; text in joint attention.

The pipelines mask no text but Chroma's: pass the embeddings with their padding. Timesteps are the scheduler's, up to
1000, as for the other families; the models get a thousandth of them, but Bria's, as from their pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...buckets.sizes import Size
from ...conditions.references import ReferenceRule
from ...devices import to_device
from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.family import Transformer
from ...packing.names import Grid
from ...packing.positions import axis_coordinates, over_grid
from ...packing.processors import Rotary
from ...packing.texts import TextTokens
from ..control import ControlRecipe, control_as
from ..joint import JointFamily
from ..recipe import Recipe
from ..samples import Samples
from ..texts import TextEmbeddings

BLOCK = 2
"""Latent rows and columns that the pipelines put into one token."""
_SIDES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
)
"""Sides in pixels of FLUX.1 Kontext's own sizes but the square."""
LONGCAT_TEXT = 512
"""Tokens of a text of LongCat-Image, with its padding."""


class FluxFamily(JointFamily):
    """FLUX.1, Kontext and controls: images in 2×2 blocks, rotary positions over rows and columns; joint attention."""

    title = "FLUX.1, Kontext and controls"
    transformer_class = "FluxTransformer2DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("0bde5c7179d8", "53dba489fdb2", "9951f6ffc64f")
    stock_processors: ClassVar[tuple[str, ...]] = ("FluxAttnProcessor",)
    processors_read_fusion = True
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="encoded_padding")
    interpolates = True
    images_only = True
    latents_as = "tokens"
    token_patch: ClassVar[Grid | None] = (1, BLOCK, BLOCK)
    timestep_unit: ClassVar[float] = 1000
    attention_kwargs: ClassVar[str | None] = "joint_attention_kwargs"
    position_module = "pos_embed"
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = (  # ComfyUI takes the names of diffusers
        ("transformer_blocks.**", "transformer_blocks.**"),
        ("single_transformer_blocks.**", "single_transformer_blocks.**"),
    )
    original_prefix: ClassVar[str] = "transformer."
    rotates_text = True
    text_norms: ClassVar[tuple[str, ...]] = ("transformer_blocks.*.norm1_context",)
    row_norms: ClassVar[tuple[str, ...]] = ("single_transformer_blocks.*.norm",)
    text_first = True
    max_references: ClassVar[int] = 1
    reference_step: ClassVar[int] = 1
    """By how much the first coordinate of each reference exceeds that of the grid before it (FLUX.1 Kontext)."""
    first_ids: ClassVar[Grid] = (0, 0, 0)
    """Coordinates of the first token of an image."""
    text_axes: ClassVar[tuple[int, ...]] = ()
    """Coordinates that count the tokens of a text; all others are zero."""

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse channel counts that are not a block of four latent pixels."""
        channels, patch = transformer.config.in_channels, transformer.config.get("patch_size", 1)
        if channels % BLOCK**2 or patch != 1:
            raise PackingError(
                f"A token of {type(transformer).__name__} holds {BLOCK}×{BLOCK} latent pixels, so in_channels must be "
                f"a multiple of {BLOCK**2} and patch_size 1; got {channels} and {patch}."
            )
        super().check(transformer, strip_length=strip_length)

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Number tokens by row and column."""
        # module.forward instead of module(…), which would call the hook again
        return tuple(module.forward(self.ids((grid,), base_size, device=device)))

    def reference_positions(self, module: Any, grids: tuple[Grid, ...], *, device: torch.device) -> Rotary:
        """Number the tokens of references likewise, each from a further first coordinate on."""
        return tuple(module.forward(self.ids(grids, device=device)[math.prod(grids[0]) :]))

    def text_positions(self, module: Any, grids: tuple[Grid, ...], length: int, *, device: torch.device) -> Rotary:
        """Place text by [`text_ids`]; at zero, nothing turns, but is rounded to float32, as in the stock model."""
        return tuple(module.forward(self.text_ids(length, device=device)))

    def text_ids(self, length: int, *, device: torch.device) -> torch.Tensor:
        """Return the coordinates of a text's tokens, `(length, 3)`."""
        counts = torch.arange(length, device=device, dtype=torch.float32)
        return torch.stack([counts if axis in self.text_axes else torch.zeros_like(counts) for axis in range(3)], 1)

    def ids(self, grids: tuple[Grid, ...], base_size: Grid | None = None, *, device: torch.device) -> torch.Tensor:
        """Return the coordinates of all tokens of a sample, those of its references behind its own, `(tokens, 3)`."""
        steps = [self.reference_step * number for number in range(len(grids))]
        pairs = zip(grids, steps, strict=True)
        ids = torch.cat([token_ids(grid, base_size, first=step, device=device) for grid, step in pairs])
        return ids + to_device(torch.tensor(self.first_ids), device) if any(self.first_ids) else ids

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Number the tokens as the pipelines do; the hook replaces these positions in a pack."""
        return {
            **super().inputs(rows),
            "img_ids": self.ids(rows.grids, device=rows.latents.device),
            "txt_ids": self.text_ids(rows.text.shape[1], device=rows.latents.device),
        }


def token_ids(
    grid: Grid, base_size: Grid | None = None, *, first: float = 0, device: torch.device | str
) -> torch.Tensor:
    """Return the position of each token as the pipelines number it: `(h·w, 3)` of `first`, row and column."""
    frames, *sides = axis_coordinates(grid, base_size, device=device)
    return torch.stack(over_grid([frames + first, *sides]), 1)


class FluxRecipe(Recipe):
    """Recipe of `FluxPipeline`, for FLUX.1 [dev] and [schnell]; see [`Recipe`]."""

    pipeline_class = "FluxPipeline"
    family = FluxFamily()
    image_vae = True
    default_sequence_length = 512
    caption_tokenizer = "tokenizer_2"
    native_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((1024, 1024),)
    guidance_factor: ClassVar[float | None] = 1.0
    prompt_outputs: ClassVar[tuple[str, ...]] = ("values", "pooled_projections")


class FluxControlRecipe(ControlRecipe, FluxRecipe):
    """Recipe of `FluxControlPipeline`, for FLUX.1 Canny and Depth [dev]; see [`ControlRecipe`].

    A pipeline of FLUX.1 [dev] whose `x_embedder` was widened to 128 channels, with zeros, begins a control of its own.
    """

    pipeline_class = "FluxControlPipeline"
    conditions = (control_as("control_image"),)


class FluxKontextRecipe(FluxRecipe):
    """Recipe of `FluxKontextPipeline`, for FLUX.1 Kontext [dev], whose samples have one reference or none.

    A reference gets one of the pipeline's preferred sizes, as in its call. The pipeline makes its image one of them
    too; training and [`render`] keep its size.
    """

    pipeline_class = "FluxKontextPipeline"
    native_sizes = (*_SIDES, (1024, 1024), *((width, height) for height, width in _SIDES))
    conditions = (ReferenceRule(most=1, shapes=native_sizes, resample="lanczos", argument="image"),)

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, Any]:
        """Return the size as arguments of the pipeline's call, with the area that it would change it to."""
        return {**super().size_arguments(size), "max_area": size.height * size.width}

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return the reference, which has the size in which it is shown."""
        return {**super().reference_arguments(references, size), "_auto_resize": False}


class ChromaFamily(FluxFamily):
    """Chroma: Flux without pooled text and guidance; text in joint attention, masked but for one token of its padding.

    Pass text with the mask that the pipeline's `encode_prompt` returns, which keeps one token of the padding.
    """

    title = "Chroma"
    transformer_class = "ChromaTransformer2DModel"
    tested_forwards = ("3cdf1b3fa10c",)
    text = replace(FluxFamily.text, padding="masked")
    max_references = 0  # no pipeline of Chroma places any

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the mask of text and tokens, if there is one.

        It is boolean. The pipeline of diffusers 0.42 passes numbers, which attention adds to its scores, so that
        padding takes part after all (huggingface/diffusers#12116); the model was trained with padding masked.
        """
        inputs = super().inputs(rows)
        if rows.text_mask is None:
            return inputs
        tokens = rows.text_mask.new_ones(inputs["hidden_states"].shape[:2])
        return {**inputs, "attention_mask": torch.cat([rows.text_mask, tokens], 1).bool()}


class ChromaRecipe(FluxRecipe):
    """Recipe of `ChromaPipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe]."""

    pipeline_class = "ChromaPipeline"
    family = ChromaFamily()
    prompt_outputs = ("values", "", "mask")

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


class OvisImageFamily(FluxFamily):
    """Ovis-Image: Flux without pooled text and guidance; text at positions of its own, attended to with its padding.

    The pipeline attends to the padding of a text, whose embeddings it sets to zero: pass the embeddings with it.
    """

    title = "Ovis-Image"
    transformer_class = "OvisImageTransformer2DModel"
    tested_forwards = ("6e80047554eb",)
    stock_processors = ("OvisImageAttnProcessor",)
    text = replace(FluxFamily.text, padding="keep_padding")
    text_axes = (1, 2)
    max_references = 0
    original_names = None


class OvisImageRecipe(Recipe):
    """Recipe of `OvisImagePipeline`; see [`Recipe`]."""

    pipeline_class = "OvisImagePipeline"
    family = OvisImageFamily()
    image_vae = True
    default_sequence_length = 256
    native_sizes = ((1024, 1024),)
    prompt_outputs = ("values",)


class LongCatImageFamily(FluxFamily):
    """LongCat-Image: Flux without pooled text and guidance; an image stands behind a text of 512 tokens.

    The pipeline pads every text to 512 tokens and attends to the padding as the text encoder makes it: pass the
    embeddings with it.
    """

    title = "LongCat-Image"
    transformer_class = "LongCatImageTransformer2DModel"
    tested_forwards = ("abe7ca1adaa9",)
    stock_processors = ("LongCatImageAttnProcessor",)
    text = replace(FluxFamily.text, length=LONGCAT_TEXT)
    text_axes = (1, 2)
    first_ids = (1, LONGCAT_TEXT, LONGCAT_TEXT)
    takes = ()  # no pooled text, though the configuration counts its channels
    attention_kwargs = None
    max_references = 0
    original_names = None


class LongCatImageRecipe(Recipe):
    """Recipe of `LongCatImagePipeline`; see [`Recipe`].

    The pipeline rewrites prompts by its text encoder (`enable_prompt_rewrite`); captions are trained as they are.
    """

    pipeline_class = "LongCatImagePipeline"
    family = LongCatImageFamily()
    image_vae = True
    default_sequence_length = LONGCAT_TEXT
    native_sizes = ((1024, 1024), (768, 1344), (1344, 768))
    prompt_outputs = ("values",)


class BriaFamily(FluxFamily):
    """Bria 3.2: as Flux, without a pooled text; timesteps up to 1000, and padding of texts as zeros."""

    title = "Bria 3.2"
    transformer_class = "BriaTransformer2DModel"
    tested_forwards = ("8c30c4b17198",)
    stock_processors = ("BriaAttnProcessor",)
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="keep_padding")
    timestep_unit = 1
    attention_kwargs = "attention_kwargs"
    original_names = None
    max_references = 0


class BriaRecipe(Recipe):
    """Recipe of `BriaPipeline`; see [`Recipe`]."""

    pipeline_class = "BriaPipeline"
    family = BriaFamily()
    image_vae = True
    default_sequence_length = 128
    native_sizes = ((1024, 1024),)
    prompt_outputs = ("values",)
    constructor_reads = ("vae", "trained")

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions; an empty one is zeros, with which the pipeline guides where it has no negative prompt."""
        text = super().encode_text(captions)
        empty = to_device(torch.tensor([not caption for caption in captions]), text.values.device)
        return text._replace(values=text.values.masked_fill(empty[:, None, None], 0))


RECIPES = (
    FluxRecipe,
    FluxControlRecipe,
    FluxKontextRecipe,
    ChromaRecipe,
    OvisImageRecipe,
    LongCatImageRecipe,
    BriaRecipe,
)
