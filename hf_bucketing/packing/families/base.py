"""What a family's recipe provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from ..attention import Backend
from ..layout import Grid

if TYPE_CHECKING:
    from ..pack import PackedBatch


Transformer: TypeAlias = Any
"""A diffusers model; its attributes differ by family."""


class Family(Protocol):
    """How the transformers of one class attend, place and are called.

    Attributes:
        drops_tokens (`bool`): Whether tokens may be left out: all that the model does between attentions is per token,
            and attention minds positions alone, not which tokens there are.
    """

    drops_tokens: bool

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

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the names of further per-sample tensors that the transformer's own forward needs beside the text."""

    def attach(self, transformer: Transformer, backend: Backend) -> Callable[[], None]:
        """Swap the attention processors and hook the positions; return what undoes both."""

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the transformer's own forward for a pack."""

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the transformer's output for a pack as strips `(rows, channels, p_t, p_h, strip_length·p_w)`."""

    def run_alone(
        self,
        transformer: Transformer,
        latent: torch.Tensor,
        *,
        timestep: torch.Tensor,
        text: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run the unpacked transformer on one sample as its pipeline does.

        Args:
            transformer: Of this family, packing not enabled.
            latent (`torch.Tensor` of shape `(channels, frames, height, width)`): The sample.
            timestep (`torch.Tensor` of shape `()`): Its timestep.
            text (`torch.Tensor` of shape `(length, text_dim)`): Its text.
            conditioning (mapping of `str` to `torch.Tensor`): Its row of each further tensor.

        Returns:
            `torch.Tensor` of shape `(out_channels, frames, height, width)`.
        """
