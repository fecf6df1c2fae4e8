"""Wan 2.1 and 2.2 text-to-video: rotary positions over frames, rows and columns; text in cross-attention.

Wan attends to the zeros after its text (512 tokens): hand over the embeddings with them, as its pipeline makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PackingError
from ..attention import Backend
from ..context import active_layout
from ..layout import Grid
from ..processors import PackedWanAttnProcessor
from ..strips import position_rows
from .base import Transformer

if TYPE_CHECKING:
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

    from ..pack import PackedBatch


class WanFamily:
    """Recipe of `WanTransformer3DModel`; see [`Family`][hf_bucketing.packing.families.Family]."""

    drops_tokens = True

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse image-to-video models, and strips longer than the rotary table."""
        if transformer.config.added_kv_proj_dim is not None or transformer.config.image_dim is not None:
            raise PackingError(
                "This Wan transformer also attends to image tokens (image-to-video), which packing does not carry; "
                "use a text-to-video model."
            )
        longest = self.longest_strip(transformer)
        if strip_length > longest:
            raise PackingError(f"strip_length={strip_length} exceeds the {longest} positions of this model's axes.")

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the rotary table's length: the model looks up a strip's columns before the hook replaces them."""
        return int(transformer.rope.max_seq_len)

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Refuse samples beyond the rotary table."""
        longest = transformer.rope.max_seq_len
        for sample, grid in enumerate(grids):
            if max(grid) > longest:
                raise PackingError(
                    f"Sample {sample} has a token grid of {grid}, but this model has {longest} positions per axis "
                    "(rope_max_seq_len); use a smaller size."
                )

    def patch(self, transformer: Transformer) -> Grid:
        """Return the configured patch."""
        t, h, w = transformer.config.patch_size
        return t, h, w

    def in_channels(self, transformer: Transformer) -> int:
        """Return the configured channels."""
        return int(transformer.config.in_channels)

    def text_dim(self, transformer: Transformer) -> int:
        """Return the configured text channels."""
        return int(transformer.config.text_dim)

    def attach(self, transformer: Transformer, backend: Backend) -> Callable[[], None]:
        """Swap in [`PackedWanAttnProcessor`] and hook `rope`."""
        originals = transformer.attn_processors
        transformer.set_attn_processor(PackedWanAttnProcessor(backend))
        handle = transformer.rope.register_forward_hook(_positions)

        def detach() -> None:
            handle.remove()
            transformer.set_attn_processor(dict(originals))

        return detach

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return none: text is all that Wan text-to-video is told."""
        return ()

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give each strip its sample's timestep; all texts form one row."""
        return {
            "hidden_states": batch.strips,
            "timestep": batch.timesteps[batch.layout.row_segments],
            "encoder_hidden_states": batch.text[None],
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the output, which has the form of the input."""
        return output

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
        output: torch.Tensor = transformer(latent[None], timestep[None], text[None], return_dict=False)[0]
        return output[0]


def _positions(
    rope: WanRotaryPosEmbed, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's own cosines and sines, in strips: two of `(rows, strip_length, 1, head_dim)`."""
    p_t, p_h, p_w = rope.patch_size

    def table(grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        t, h, w = grid
        shape_only = args[0].new_empty(()).expand(1, 1, t * p_t, h * p_h, w * p_w)
        cosines, sines = rope.forward(shape_only)  # not rope(…), which would come back here
        return cosines[0], sines[0]

    cosines, sines = position_rows(active_layout(), table)
    return cosines, sines
