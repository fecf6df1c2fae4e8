"""How LongCat-Image is packed: as Flux, with text and, behind its last position, the image along both axes.

The pipeline pads every text to 512 tokens and attends to the padding as the text encoder makes it: pass the embeddings
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...devices import to_device
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ...packing.processors import Rotary
from ..flux.packing import FluxFamily, token_ids
from ..ovis_image.packing import diagonal_ids

TEXT_LENGTH = 512
"""Tokens of a text, with its padding."""


class LongCatImageFamily(FluxFamily):
    """Packing of `LongCatImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "LongCatImageTransformer2DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("abe7ca1adaa9",)
    stock_processors: ClassVar[tuple[str, ...]] = ("LongCatImageAttnProcessor",)
    attention_kwargs: ClassVar[str | None] = None
    max_references: ClassVar[int] = 0
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = None

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return nothing: the forward takes no pooled text, though the configuration counts its channels."""
        return {}

    def text_length(self, config: Mapping[str, Any]) -> int:
        """Return the tokens to which the pipeline pads a text."""
        return TEXT_LENGTH

    def positions(self, module: Any, grid: Grid, base_size: Grid | None, *, device: torch.device) -> Rotary:
        """Number tokens by row and column, from the last position of a text on."""
        return tuple(module.forward(token_ids(grid, base_size, device=device) + _start(device)))

    def ids(self, grids: tuple[Grid, ...], *, device: torch.device) -> torch.Tensor:
        """Return the positions of a sample's tokens, `(tokens, 3)`."""
        return super().ids(grids, device=device) + _start(device)

    def text_ids(self, length: int, *, device: torch.device) -> torch.Tensor:
        """Return the positions of a text's tokens, `(length, 3)`: zero, and their number as row and column."""
        return diagonal_ids(length, device=device)


def _start(device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([1, TEXT_LENGTH, TEXT_LENGTH]), device)


FAMILY = LongCatImageFamily()
