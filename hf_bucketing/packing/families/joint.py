"""What the recipes of joint text–video attention share: text tokens ride in the strips of their own sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import PackingError
from ..joint_layout import fewest_places
from ..layout import Grid, PackedLayout
from .base import Transformer

if TYPE_CHECKING:
    from ..pack import PackedBatch


class JointFamily:
    """Base of the recipes whose models attend to tokens and text tokens in one sequence."""

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Refuse strips longer than the model's positions."""
        longest = self.longest_strip(transformer)
        if strip_length > longest:
            raise PackingError(f"strip_length={strip_length} exceeds the {longest} positions of this model's axes.")

    def longest_strip(self, transformer: Transformer) -> int:
        """Return no limit: positions are computed, or made by the hook alone."""
        return sys.maxsize

    def with_text_slots(self, transformer: Transformer, layout: PackedLayout) -> PackedLayout:
        """Return the layout with as many text slots per strip as take fewest places.

        Raises:
            PackingError: If the model cannot run a text of that length.
        """
        return replace(layout, text_slots=fewest_places(layout))

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give each strip its sample's timestep, conditioning and part of its text."""
        rows = batch.layout.row_segments
        return {
            "hidden_states": batch.strips,
            "timestep": batch.timesteps[rows],
            "encoder_hidden_states": batch.layout.joint.text_rows(batch.text),
            **{name: values[rows] for name, values in batch.conditioning.items()},
        }


def swap_processors(transformer: Transformer, packed: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Swap attention processors; return what undoes it.

    Args:
        transformer: A diffusers model.
        packed (callable): Returns the processor that takes the place of another, from its name and itself.
    """
    originals = transformer.attn_processors
    transformer.set_attn_processor({name: packed(name, original) for name, original in originals.items()})
    return lambda: transformer.set_attn_processor(dict(originals))


def fused_by_processor(transformer: Transformer) -> bool:
    """Return whether projections are fused, for models whose `fused_projections` stays set after unfusing."""
    return any("Fused" in type(processor).__name__ for processor in transformer.attn_processors.values())


def refuse_videos(transformer: Transformer, grids: Sequence[Grid]) -> None:
    """Refuse samples of more than one frame, for models of images."""
    for sample, grid in enumerate(grids):
        if grid[0] > 1:
            raise PackingError(
                f"Sample {sample} has {grid[0]} latent frames, but {type(transformer).__name__} takes images."
            )
