"""Base of the families that refine tokens and text apart before both attend in one sequence: Lumina 2 and Z-Image.

Both models run from noise at time 0 to data at time 1 and predict data − noise. Their pipelines turn that round, and
so do these families: timesteps are the scheduler's, up to 1000, and outputs are noise − data, as for the others.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import PackingError
from ..packing.family import Transformer
from ..packing.layout import PackedLayout
from ..packing.names import Backend, Grid
from ..packing.processors import PackedRowAttnProcessor, RowScope
from ..packing.texts import TextTokens
from .joint import JointFamily

_SCOPES: dict[str, RowScope] = {"noise_refiner": "tokens", "context_refiner": "text", "layers": "joint"}


class RefinedFamily(JointFamily):
    """Base of the families with a `noise_refiner` of tokens, a `context_refiner` of text, and `layers` of both."""

    processor_class: ClassVar[type[PackedRowAttnProcessor]] = PackedRowAttnProcessor
    text = TextTokens(rows="slots", channels="cap_feat_dim")
    images_only = True
    negates = True

    def axes(self, transformer: Transformer) -> tuple[int, int, int]:
        """Return the model's positions for text and, after it, the image, for rows, and for columns."""
        first, rows, columns = transformer.config.axes_lens
        return first, rows, columns

    def limits(self, transformer: Transformer) -> Grid:
        """Return one frame, and the positions of rows and columns."""
        return 1, *self.axes(transformer)[1:]

    def check_layout(self, transformer: Transformer, layout: PackedLayout, *, stretched: bool = False) -> None:
        """Refuse also texts after which the model has no position for the image."""
        super().check_layout(transformer, layout, stretched=stretched)
        longest = self.longest_text(transformer)
        for sample, length in enumerate(layout.text_lengths):
            if length > longest:
                raise PackingError(
                    f"Text {sample} has {length} tokens, but this model has positions for {longest}; shorten it."
                )

    def longest_text(self, transformer: Transformer) -> int:
        """Return the text tokens after which there is still a position for the image."""
        return self.axes(transformer)[0] - 1

    def processor(self, name: str, backend: Backend) -> Any:
        """Return the processor of a refiner of tokens or of text, or of the layers that see both."""
        return self.processor_class(backend, scope=_SCOPES[name.partition(".")[0]])
