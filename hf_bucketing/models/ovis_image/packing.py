"""How Ovis-Image is packed: as Flux, with text along the diagonal of the image's positions.

The pipeline attends to the padding of a text, whose embeddings it sets to zero: pass the embeddings with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ..flux.packing import FluxFamily


class OvisImageFamily(FluxFamily):
    """Packing of `OvisImageTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "OvisImageTransformer2DModel"
    tested_forwards: ClassVar[tuple[str, ...]] = ("6e80047554eb",)
    stock_processors: ClassVar[tuple[str, ...]] = ("OvisImageAttnProcessor",)
    text = replace(FluxFamily.text, padding="keep_padding")
    max_references: ClassVar[int] = 0
    original_names: ClassVar[tuple[tuple[str, str], ...] | None] = None

    def text_ids(self, length: int, *, device: torch.device) -> torch.Tensor:
        """Return the positions of a text's tokens, `(length, 3)`: zero, and their number as row and column."""
        return diagonal_ids(length, device=device)


def diagonal_ids(length: int, *, device: torch.device) -> torch.Tensor:
    """Return positions `(length, 3)` of zero, and the number of a token as row and column."""
    numbers = torch.arange(length, device=device, dtype=torch.float32)
    return torch.stack([torch.zeros_like(numbers), numbers, numbers], 1)


FAMILY = OvisImageFamily()
