"""Stable Diffusion 3 and AuraFlow: images, at positions from the middle of one table; text in joint attention."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BucketingError, PackingError
from ...packing.context import active_layout
from ...packing.family import Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import axis_coordinates
from ...packing.texts import TextTokens
from ..joint import JointFamily
from ..positions import hook_linear_patch_embed, hook_patch_embed
from ..recipe import Recipe
from ..texts import TextEmbeddings

if TYPE_CHECKING:
    from diffusers.models.embeddings import PatchEmbed


class SD3Family(JointFamily):
    """Stable Diffusion 3 and 3.5: images, with positions cropped from the middle of one table.

    The pipeline masks no text: pass the embeddings with their padding, as the pipeline makes them.
    """

    title = "Stable Diffusion 3 and 3.5"
    transformer_class = "SD3Transformer2DModel"
    tested_forwards = ("ace020eb0242", "124eca013df2")
    stock_processors = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0", "XFormersJointAttnProcessor")
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="encoded_padding")
    interpolates = True
    images_only = True
    latents_as = "images"
    attention_kwargs = "joint_attention_kwargs"
    original_names = (("transformer_blocks.**", "transformer_blocks.**"),)  # ComfyUI takes the names of diffusers
    original_prefix = "transformer."
    text_norms = ("transformer_blocks.*.norm1_context",)

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models without a table of positions, and models whose fused projections skip a norm."""
        if transformer.config.pos_embed_max_size is None:
            raise PackingError("Packing needs an SD3 transformer with a table of positions (pos_embed_max_size).")
        if transformer.config.qk_norm is not None and transformer.transformer_blocks[0].attn.fused_projections:
            raise PackingError(
                "diffusers' fused SD3 attention skips the norms of queries and keys that this model has; load the "
                "transformer again and leave its projections apart."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame and the table's sides; the stock embedding looks strips up there before the hook runs."""
        side = int(transformer.pos_embed.pos_embed_max_size)
        return 1, side, side

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        table = hook_patch_embed(transformer.pos_embed, partial(_table, base_size=base_size))
        return [table, *self.hook_norms(transformer)]


def _table(embed: PatchEmbed, grid: Grid, device: torch.device, *, base_size: Grid | None) -> torch.Tensor:
    """Return a sample's positions, `(h·w, dim)`: the middle of the table, interpolated if there is a base size."""
    _, height, width = base_size or grid
    middle: torch.Tensor = embed.cropped_pos_embed(height * embed.patch_size, width * embed.patch_size)[0]
    if base_size is None:
        return middle
    table = middle.unflatten(0, (height, width))
    for axis, coordinates in enumerate(axis_coordinates(grid, base_size, device=table.device)[1:]):
        table = _interpolate(table, coordinates, axis)
    return table.flatten(0, 1)


def _interpolate(table: torch.Tensor, coordinates: torch.Tensor, axis: int) -> torch.Tensor:
    """Interpolate a table linearly at fractional coordinates of an axis; its last entry continues beyond the end."""
    last = table.shape[axis] - 1
    below = coordinates.long().clamp(max=last)
    share = (coordinates - below).to(table.dtype).view(-1, *[1] * (table.ndim - 1 - axis))
    return table.index_select(axis, below).lerp(table.index_select(axis, (below + 1).clamp(max=last)), share)


class SD3Recipe(Recipe):
    """Recipe of `StableDiffusion3Pipeline`; see [`Recipe`].

    A caption has the 77 tokens of CLIP, and after them `max_sequence_length` of T5: zeros where the pipeline
    comes without it (`text_encoder_3`).
    """

    pipeline_class = "StableDiffusion3Pipeline"
    family = SD3Family()
    image_vae = True
    default_sequence_length = 256
    caption_tokenizer = "tokenizer_3"
    added_text_tokens = 77
    """Those of CLIP."""
    prompt_outputs = ("values", "", "pooled_projections")
    native_sizes = ((1024, 1024),)

    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions as the pipeline does, to a sequence and a pooled embedding each.

        Raises:
            BucketingError: If the pipeline lacks one of the CLIPs, without which its own call fails too.
        """
        for name in ("text_encoder", "text_encoder_2"):
            if getattr(self.pipeline, name) is None:
                raise BucketingError(
                    f"This {self.pipeline_class} has no {name}; only text_encoder_3, the T5, may be absent."
                )
        pipeline = copy(self.pipeline)
        if pipeline.transformer is None:  # its configuration has the width of the zeros in place of T5's embeddings
            vars(pipeline)["transformer"] = SimpleNamespace(config=SimpleNamespace(**self.config))
        return super(SD3Recipe, replace(self, pipeline=pipeline)).encode_text(captions)


class AuraFlowFamily(JointFamily):
    """AuraFlow: images, with positions from the middle of a learned table; text and registers in joint attention.

    The pipeline attends to padding as zeros: pass the embeddings with it. The model puts registers, tokens of its own,
    in front of each batch row's text; in a pack they are part of each sample's text.
    """

    title = "AuraFlow"
    transformer_class = "AuraFlowTransformer2DModel"
    tested_forwards = ("5a0d6341597a",)
    stock_processors = ("AuraFlowAttnProcessor2_0", "FusedAuraFlowAttnProcessor2_0")
    text = TextTokens(rows="per_sample", channels="joint_attention_dim", padding="keep_padding")
    images_only = True
    latents_as = "images"
    attention_kwargs = "attention_kwargs"
    timestep_unit = 1000
    text_norms = ("joint_transformer_blocks.*.norm1_context",)
    row_norms = ("single_transformer_blocks.*.norm1",)
    text_first = True

    def limits(self, transformer: Transformer) -> Grid:
        side = math.isqrt(transformer.config.pos_embed_max_size)
        return 1, side, side

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Count the registers with each text."""
        layout = replace(layout, added_lengths=(transformer.register_tokens.shape[1],) * len(layout))
        return super().fit_text(transformer, layout, pad_to=pad_to, pad_text_to=pad_text_to)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        return [
            hook_linear_patch_embed(transformer.pos_embed, _middle),
            transformer.joint_transformer_blocks[0].register_forward_pre_hook(_fill_slots, with_kwargs=True),
            *self.hook_norms(transformer),
        ]


def _middle(module: Any, grid: Grid, device: torch.device) -> torch.Tensor:
    _, height, width = grid
    index: torch.Tensor = module.pe_selection_index_based_on_dim(height * module.patch_size, width * module.patch_size)
    return index


@torch.compiler.disable  # loops over the texts of the pack, as position_strips does over its samples
def _fill_slots(block: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Put the registers and the text of each sample, `(n, length, dim)`, into the text slots of its strips."""
    tokens, texts, *rest = list(args) + list(kwargs.values())
    layout = active_layout()
    samples = [text[:length] for text, length in zip(texts, layout.joint_text_lengths, strict=True)]
    return (tokens, layout.joint.fill_slots(torch.cat(samples)), *rest), {}


class AuraFlowRecipe(Recipe):
    """Recipe of `AuraFlowPipeline`; see [`Recipe`]."""

    pipeline_class = "AuraFlowPipeline"
    family = AuraFlowFamily()
    image_vae = True
    default_sequence_length = 256
    added_text_tokens = 8
    """The model's registers."""
    native_sizes = ((1024, 1024),)


RECIPES = (
    SD3Recipe,
    AuraFlowRecipe,
)
