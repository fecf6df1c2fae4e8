"""Base of the families whose text attends in one sequence with the tokens: each strip carries text of its sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from ..errors import PackingError
from ..packing.batch import PackedBatch
from ..packing.context import active_layout
from ..packing.family import Draw, Family, Transformer
from ..packing.layout import PackedLayout, best_text_slots
from ..packing.processors import PackedJointAttnProcessor


class JointFamily(Family):
    """Base of the families whose models attend to tokens and text tokens in one sequence.

    Attributes:
        text_apart (`bool`): Whether text may fill the slots of any strips: its modulation is made apart.
        guidance (`float`): The distilled guidance that the pipeline passes by default.
    """

    processor_class = PackedJointAttnProcessor
    text_apart: ClassVar[bool] = False
    guidance: ClassVar[float] = 3.5

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the pooled text embeddings, `(n, pooled_projection_dim)`, and any distilled guidance, `(n,)`."""
        width = transformer.config.pooled_projection_dim
        draws: dict[str, Draw] = {"pooled_projections": lambda grids: torch.randn(len(grids), width)}
        if transformer.config.get("guidance_embeds"):
            draws["guidance"] = lambda grids: torch.full((len(grids),), self.guidance)
        return draws

    def check_layout(self, transformer: Transformer, layout: PackedLayout) -> None:
        """Raise PackingError if the model cannot run a sample or a text of the pack, such as a video for images."""
        for sample, grid in enumerate(layout.grids):
            if self.images_only and grid[0] > 1:  # also where positions are stretched
                raise PackingError(
                    f"Sample {sample} has {grid[0]} latent frames, but {type(transformer).__name__} takes images."
                )

    def fit_text(
        self, transformer: Transformer, layout: PackedLayout, *, pad_to: int | None, pad_text_to: int | None
    ) -> tuple[PackedLayout, int | None]:
        """Return the layout with text slots: the number with fewest entries, or the given number per strip."""
        self.check_layout(transformer, layout)
        layout = replace(layout, text_apart=self.text_apart)
        if pad_text_to is None:
            return replace(layout, text_slots=best_text_slots(layout)), None
        if pad_to is None or pad_text_to % pad_to or not pad_text_to:
            raise PackingError(
                "The strips of this model carry its text, each with the same number of text slots: pad_text_to must "
                f"be a multiple of pad_to, got {pad_text_to} and {pad_to}."
            )
        layout = replace(layout, text_slots=pad_text_to // pad_to)
        if layout.text_apart and sum(layout.text_strips_per_sample) > pad_to:
            raise PackingError(
                f"The texts fill {sum(layout.text_strips_per_sample)} strips of {layout.text_slots} text slots, more "
                f"than the {pad_to} to pad to; give a larger pad_text_to, or pack fewer samples."
            )
        return layout, None

    def text_rows(self, batch: PackedBatch) -> torch.Tensor:
        """Give each strip its part of its sample's text."""
        return batch.layout.joint.text_by_strip(batch.text)


def of_text(values: torch.Tensor) -> torch.Tensor:
    """Return modulation `(strips, …)` of strips' tokens as that of the text in their slots."""
    strips = active_layout().joint.text_strips()
    return values if strips is None else values.index_select(0, strips)
