"""What the recipes of joint text–video attention share: text tokens ride in the strips of their own sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import PackingError
from .attention.dispatch import Backend
from .family import Family, Transformer
from .layout import Grid, PackedLayout, fewest_places
from .processors.joint import PackedJointAttnProcessor

if TYPE_CHECKING:
    from .pack import PackedBatch


class JointFamily(Family):
    """Base of the recipes whose models attend to tokens and text tokens in one sequence.

    Attributes:
        guidance (`float`): The distilled guidance that the pipeline passes when nothing else is asked for.
    """

    guidance: ClassVar[float] = 3.5

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return pooled text embeddings, and what the pipelines pass by default."""
        draws: dict[str, Callable[[], torch.Tensor]] = {
            "pooled_projections": lambda: torch.randn(len(grids), transformer.config.pooled_projection_dim),
            "guidance": lambda: torch.full((len(grids),), self.guidance),
            "ofs": lambda: torch.full((len(grids),), 2.0),
        }
        return {name: draws[name]() for name in self.conditioning(transformer)}

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the one that attends jointly."""
        return PackedJointAttnProcessor(backend)

    def check_layout(self, transformer: Transformer, layout: PackedLayout) -> None:
        """Raise PackingError if the model cannot run a sample or a text of the pack."""

    def with_text_slots(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> PackedLayout:
        """Return the layout with text slots in its strips: as many as take fewest places, or a given number.

        Raises:
            PackingError: If the model cannot run such samples, or the given number is not the same for all strips.
        """
        self.check_layout(transformer, layout)
        if pad_text_to is None:
            return replace(layout, text_slots=fewest_places(layout))
        if pad_to is None or pad_text_to % pad_to or not pad_text_to:
            raise PackingError(
                "The text of this model rides in the strips, each with as many text slots: pad_text_to must be a "
                f"multiple of pad_to, got {pad_text_to} and {pad_to}."
            )
        return replace(layout, text_slots=pad_text_to // pad_to)

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Give each strip its sample's timestep, conditioning and part of its text."""
        return {
            "hidden_states": batch.strips,
            "timestep": batch.row_timesteps,
            "encoder_hidden_states": batch.layout.joint.text_rows(batch.text),
            **{name: values[batch.layout.row_segments] for name, values in batch.conditioning.items()},
        }


def refuse_videos(transformer: Transformer, grids: Sequence[Grid]) -> None:
    """Refuse samples of more than one frame, for models of images."""
    for sample, grid in enumerate(grids):
        if grid[0] > 1:
            raise PackingError(
                f"Sample {sample} has {grid[0]} latent frames, but {type(transformer).__name__} takes images."
            )


def refuse_stale_fusion(transformer: Transformer) -> None:
    """Refuse models that diffusers unfused by the processors alone: their modules still hold the fused projections."""
    for name, module in transformer.named_modules():
        if getattr(module, "fused_projections", False) and "Fused" not in type(module.processor).__name__:
            raise PackingError(
                f"{name} holds fused projections that its processor does not use, as diffusers' "
                "unfuse_qkv_projections leaves it; load the transformer again, or fuse it."
            )
