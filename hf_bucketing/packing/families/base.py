"""What a family's recipe provides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from ..attention import Backend
from ..layout import Grid

if TYPE_CHECKING:
    from ..pack import PackedBatch


Transformer: TypeAlias = Any
"""A diffusers model; its attributes differ by family."""


class Family(Protocol):
    """How the transformers of one class attend, place and are called."""

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Raise PackingError if this transformer cannot run strips of that length."""

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Raise PackingError if a sample's grid is beyond the model's positions."""

    def patch(self, transformer: Transformer) -> Grid:
        """Return latent frames, rows and columns per token."""

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent."""

    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding."""

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the longest strip that the model's positions allow."""

    def alone_kwargs(self, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the transformer's own forward for one sample alone."""

    def attach(self, transformer: Transformer, backend: Backend) -> Callable[[], None]:
        """Swap the attention processors and hook the positions; return what undoes both."""

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the transformer's own forward."""
