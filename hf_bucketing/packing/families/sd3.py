"""Stable Diffusion 3 and 3.5: images, with positions cropped from the middle of one table; text in joint attention.

Its pipeline masks no text: hand over the embeddings with their padding, as the pipeline makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PackingError
from ..attention import Backend
from ..context import active_layout
from ..layout import Grid
from ..processors import PackedJointAttnProcessor
from ..strips import position_rows
from .base import Transformer
from .joint import JointFamily, fused_by_processor, refuse_videos, swap_processors

if TYPE_CHECKING:
    from diffusers.models.embeddings import PatchEmbed

    from ..pack import PackedBatch


class SD3Family(JointFamily):
    """Recipe of `SD3Transformer2DModel`; see [`Family`][hf_bucketing.packing.families.Family]."""

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse strips longer than the table of positions, and fused projections that skip a norm."""
        if transformer.config.pos_embed_max_size is None:
            raise PackingError("Packing needs an SD3 transformer with a table of positions (pos_embed_max_size).")
        super().check(transformer, strip_length=strip_length)
        if fused_by_processor(transformer) and transformer.config.qk_norm is not None:
            raise PackingError(
                "diffusers' fused SD3 attention skips the norms of queries and keys that this model has; call "
                "transformer.unfuse_qkv_projections() first."
            )

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the table's width: the model crops a strip's positions before the hook replaces them."""
        return int(transformer.pos_embed.pos_embed_max_size)

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Refuse videos, and samples beyond the table of positions."""
        refuse_videos(transformer, grids)
        longest = transformer.pos_embed.pos_embed_max_size
        for sample, grid in enumerate(grids):
            if max(grid) > longest:
                raise PackingError(
                    f"Sample {sample} has a token grid of {grid}, but this model has {longest}×{longest} positions "
                    "(pos_embed_max_size); use a smaller size."
                )

    def patch(self, transformer: Transformer) -> Grid:
        """Return the configured patch."""
        side = transformer.config.patch_size
        return 1, side, side

    def in_channels(self, transformer: Transformer) -> int:
        """Return the configured channels."""
        return int(transformer.config.in_channels)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the configured text channels."""
        return int(transformer.config.joint_attention_dim)

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the pooled text embeddings, `(n, pooled_projection_dim)`."""
        return ("pooled_projections",)

    def attach(self, transformer: Transformer, backend: Backend) -> Callable[[], None]:
        """Swap in [`PackedJointAttnProcessor`] and hook `pos_embed`."""
        processor = PackedJointAttnProcessor(backend, fused=fused_by_processor(transformer))
        restore = swap_processors(transformer, lambda name, original: processor)
        handle = transformer.pos_embed.register_forward_hook(_embed)

        def detach() -> None:
            handle.remove()
            restore()

        return detach

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
        """Run a batch of one."""
        output: torch.Tensor = transformer(
            hidden_states=latent[None, :, 0],
            timestep=timestep[None],
            encoder_hidden_states=text[None],
            pooled_projections=conditioning["pooled_projections"][None],
            return_dict=False,
        )[0]
        return output[0].unsqueeze(1)


def _embed(embed: PatchEmbed, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the strips' tokens at each sample's own positions, `(rows, strip_length, dim)`."""
    side = embed.patch_size
    (positions,) = position_rows(
        active_layout(), lambda grid: (embed.cropped_pos_embed(grid[1] * side, grid[2] * side)[0],)
    )
    tokens = embed.proj(args[0]).flatten(2).transpose(1, 2)
    return (tokens + positions).to(tokens.dtype)
