"""Stable Diffusion 3 and 3.5: images, with positions cropped from the middle of one table; text in joint attention.

Its pipeline masks no text: hand over the embeddings with their padding, as the pipeline makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PackingError
from ..packing.context import active_layout
from ..packing.family import Transformer
from ..packing.joint_family import JointFamily, refuse_stale_fusion, refuse_videos
from ..packing.layout import Grid, PackedLayout
from ..packing.positions import axis_coordinates
from ..packing.strips import position_rows

if TYPE_CHECKING:
    from diffusers.models.embeddings import PatchEmbed

    from ..packing.pack import PackedBatch


class SD3Family(JointFamily):
    """Recipe of `SD3Transformer2DModel`; see [`Family`][hf_bucketing.models.registry.Family]."""

    text_rule = "encoded_padding"
    interpolates = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse models without a table of positions, and fused projections that skip a norm."""
        if transformer.config.pos_embed_max_size is None:
            raise PackingError("Packing needs an SD3 transformer with a table of positions (pos_embed_max_size).")
        refuse_stale_fusion(transformer)
        if transformer.config.qk_norm is not None and transformer.transformer_blocks[0].attn.fused_projections:
            raise PackingError(
                "diffusers' fused SD3 attention skips the norms of queries and keys that this model has; load the "
                "transformer again and leave its projections apart."
            )
        super().check(transformer, strip_length=strip_length)

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame, and the table's sides: a strip is looked up there too before the hook replaces it."""
        side = int(transformer.pos_embed.pos_embed_max_size)
        return 1, side, side

    def text_dim(self, transformer: Transformer) -> int:
        """Return the configured text channels."""
        return int(transformer.config.joint_attention_dim)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the pooled text embeddings, `(n, pooled_projection_dim)`."""
        return ("pooled_projections",)

    def check_layout(self, transformer: Transformer, layout: PackedLayout) -> None:
        """Refuse videos also where positions are stretched."""
        refuse_videos(transformer, layout.grids)

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Hook `pos_embed`."""

        def embed_strips(embed: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            (positions,) = position_rows(active_layout(), lambda grid: (_table(embed, grid, base_size),))
            tokens = embed.proj(args[0]).flatten(2).transpose(1, 2)
            embedded: torch.Tensor = (tokens + positions).to(tokens.dtype)
            return embedded

        return [transformer.pos_embed.register_forward_hook(embed_strips)]

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Drop the frames of the strips, which are images."""
        return {**super().forward_kwargs(batch), "hidden_states": batch.strips.squeeze(2)}

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the images with one frame."""
        return output.unsqueeze(2)

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run a batch of one image."""
        output = super().run_alone(transformer, latent[:, 0], timestep=timestep, text=text, conditioning=conditioning)
        return output.unsqueeze(1)


def _table(embed: PatchEmbed, grid: Grid, base_size: Grid | None) -> torch.Tensor:
    """Return a sample's positions, `(h·w, dim)`: the middle of the table, or that of the base size interpolated."""
    _, height, width = base_size or grid
    middle: torch.Tensor = embed.cropped_pos_embed(height * embed.patch_size, width * embed.patch_size)[0]
    if base_size is None:
        return middle
    table = middle.unflatten(0, (height, width))
    for axis, places in enumerate(axis_coordinates(grid, base_size, device=table.device)[1:]):
        table = _between(table, places, axis)
    return table.flatten(0, 1)


def _between(table: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    """Interpolate a table linearly at fractional places of an axis; beyond its last entry lies that one."""
    last = table.shape[axis] - 1
    below = places.long().clamp(max=last)
    share = (places - below).to(table.dtype).view(-1, *[1] * (table.ndim - 1 - axis))
    return table.index_select(axis, below).lerp(table.index_select(axis, (below + 1).clamp(max=last)), share)
