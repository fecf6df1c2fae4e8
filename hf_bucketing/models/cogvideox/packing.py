"""CogVideoX 2B, 5B and 1.5: sincos, rotary or learned positions; text before the video in one attention sequence.

CogVideoX attends to the padding of its text (226 tokens) as encoded: pass the embeddings as the pipeline makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import (
    get_1d_sincos_pos_embed_from_grid,
    get_3d_rotary_pos_embed,
)

from ...errors import PackingError
from ...packing.batch import Rows
from ...packing.context import active_layout
from ...packing.family import UNLIMITED, Draw, Transformer
from ...packing.layout import PackedLayout
from ...packing.names import Grid
from ...packing.positions import Tables, axis_coordinates, over_grid
from ...packing.processors import Rotary
from ...packing.strip_positions import position_strips
from ...packing.texts import TextTokens
from ..joint import JointFamily, hook_joint_norms
from ..positions import one_table, rotary_tables

if TYPE_CHECKING:
    from diffusers.models.embeddings import CogVideoXPatchEmbed


class CogVideoXFamily(JointFamily):
    """Packing of `CogVideoXTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "CogVideoXTransformer3DModel"
    tested_forwards = ("1d9ec921fa79",)
    stock_processors = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
    text = TextTokens(rows="slots", channels="text_embed_dim", padding="encoded_padding")
    interpolates = True
    strips_have_positions = False
    latents_as = "frames_first"
    attention_kwargs = "attention_kwargs"

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse a table of positions with patches of several frames, which the model itself cannot run."""
        if has_table(transformer.config) and transformer.config.get("patch_size_t") is not None:
            raise PackingError(
                "This CogVideoX transformer has a table of positions and patch_size_t, which do not go together."
            )
        super().check(transformer, strip_length=strip_length)

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also samples that do not have the size of learned positions."""
        super().check_layout(transformer, layout, stretched=stretched)
        height, width = base_grid(transformer)
        for sample, grid in enumerate(layout.grids):
            if transformer.config.use_learned_positional_embeddings and grid[1:] != (height, width):
                raise PackingError(
                    f"Sample {sample} has a token grid of {grid}, but the learned positions of this model are for "
                    f"{height}×{width} tokens per frame (sample_height, sample_width); it cannot run other sizes."
                )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the sides of the sample size for CogVideoX 1.5, whose positions are cut from it."""
        if transformer.config.get("patch_size_t") is None:
            return UNLIMITED, UNLIMITED, UNLIMITED
        return UNLIMITED, *base_grid(transformer)

    def trial_grids(self, transformer: Transformer) -> list[Grid]:
        """Return grids of the one size of learned positions, where the model has these."""
        grids = super().trial_grids(transformer)
        if not transformer.config.use_learned_positional_embeddings:
            return grids
        return [(frames, *base_grid(transformer)) for frames, _, _ in grids]

    def text_length(self, config: Mapping[str, Any]) -> int | None:
        """Return the length of the table of positions, where text is part of it."""
        return int(config.get("max_text_seq_length", 226)) if has_table(config) else None

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return `ofs`, `(n,)`, for the image-to-video model of 1.5."""
        return {"ofs": lambda grids: torch.full((len(grids),), 2.0)} if transformer.config.ofs_embed_dim else {}

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Return the tables that its pipeline would pass."""
        dim, whole = module.config.attention_head_dim, base_grid(module)
        if base_size is not None:
            axes = list(axis_coordinates(grid, base_size, device=device))
            if module.config.get("patch_size_t") is None:
                corners = zip(*centred(*base_size[1:], whole=whole), strict=True)
                for axis, (start, stop) in enumerate(corners, start=1):
                    last = max(base_size[axis] - 1, 1)  # the base size's tokens span start to stop·last/(last + 1)
                    axes[axis] = start + axes[axis] * (stop * last / (last + 1) - start) / last
            return rotary_tables((dim // 4, dim // 8 * 3, dim // 8 * 3), axes)
        frames, height, width = grid
        crop: dict[str, Any] = {"crops_coords": centred(height, width, whole=whole)}
        if module.config.get("patch_size_t") is not None:
            crop = {"crops_coords": None, "grid_type": "slice", "max_size": whole}
        cosines, sines = get_3d_rotary_pos_embed(
            embed_dim=dim, grid_size=(height, width), temporal_size=frames, device=device, **crop
        )
        return cosines, sines

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Pass each sample's own rotary positions, and add each sample's own table instead of the module's.

        Also modulate text by its own sample's timestep.
        """
        embed = transformer.patch_embed
        if base_size is not None and transformer.config.use_learned_positional_embeddings:
            raise PackingError("Learned positions cannot be stretched to a base size; use positions='native'.")
        norms = [norm for block in transformer.transformer_blocks for norm in (block.norm1, block.norm2)]
        handles = hook_joint_norms(norms, text_outputs=(1, 3))
        if transformer.config.use_rotary_positional_embeddings:
            handles += super().hook_positions(transformer, base_size)
        if has_table(transformer.config):
            tables = Tables(partial(one_table, partial(sincos_table, base_size=base_size)))
            handles += [_WithoutTable(embed), embed.register_forward_hook(partial(_add_table, tables))]
        return handles

    def unpacked_inputs(self, transformer: Transformer, rows: Rows) -> dict[str, Any]:
        """Return the rotary positions of the samples' size."""
        if not transformer.config.use_rotary_positional_embeddings:
            return {}
        return {"image_rotary_emb": self.positions(transformer, rows.grid, None, device=rows.latents.device)}


def _add_table(
    tables: Tables, embed: CogVideoXPatchEmbed, args: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    layout = active_layout()
    (table,) = position_strips(layout, lambda grid: tables(embed, grid, output.device))
    return output + F.pad(table.to(output.dtype), (0, 0, output.shape[1] - table.shape[1], 0))  # not to text


class _WithoutTable:
    """Keep a patch embedding from adding positions until removed: the table does not fit a strip's text slots."""

    def __init__(self, embed: CogVideoXPatchEmbed) -> None:
        self.embed = embed
        self.flags = embed.use_positional_embeddings, embed.use_learned_positional_embeddings
        embed.use_positional_embeddings = embed.use_learned_positional_embeddings = False

    def remove(self) -> None:
        """Let the patch embedding add its positions again."""
        self.embed.use_positional_embeddings, self.embed.use_learned_positional_embeddings = self.flags


def has_table(config: Mapping[str, Any]) -> bool:
    """Return whether a transformer adds positions to its tokens, beside or instead of rotating queries and keys."""
    rotates = config.get("use_rotary_positional_embeddings", False)
    return not rotates or bool(config.get("use_learned_positional_embeddings", False))


def base_grid(transformer: Transformer) -> tuple[int, int]:
    """Return rows and columns of tokens of the model's configured size."""
    config = transformer.config
    return config.sample_height // config.patch_size, config.sample_width // config.patch_size


def centred(height: int, width: int, *, whole: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the corners of a grid scaled to fit into the middle of the whole, as in CogVideoX 1.0."""
    scale = min(whole[0] / height, whole[1] / width)
    fitted = round(scale * height), round(scale * width)
    top, left = (round((side - part) / 2.0) for side, part in zip(whole, fitted, strict=True))
    return (top, left), (top + fitted[0], left + fitted[1])


def sincos_table(embed: CogVideoXPatchEmbed, grid: Grid, base_size: Grid | None, device: torch.device) -> torch.Tensor:
    """Return the positions that the patch embedding adds to the tokens of a sample, `(t·h·w, dim)`."""
    if base_size is not None:
        scales = (embed.temporal_interpolation_scale, *[embed.spatial_interpolation_scale] * 2)
        dims = (embed.embed_dim // 4, *[3 * embed.embed_dim // 8] * 2)
        axes = axis_coordinates(grid, base_size, device=device)
        frame_part, row_part, column_part = over_grid(
            [
                get_1d_sincos_pos_embed_from_grid(dim, axis / scale, output_type="pt")
                for dim, axis, scale in zip(dims, axes, scales, strict=True)
            ]
        )
        return torch.cat([frame_part, column_part, row_part], -1)
    height, width = grid[1] * embed.patch_size, grid[2] * embed.patch_size
    frames = (grid[0] - 1) * embed.temporal_compression_ratio + 1
    joint: torch.Tensor = embed.pos_embedding
    if (height, width, frames) != (embed.sample_height, embed.sample_width, embed.sample_frames):
        joint = embed._get_positional_embeddings(height, width, frames, device=device)
    return joint[0, embed.max_text_seq_length :]


FAMILY = CogVideoXFamily()
