"""What a family's recipe provides, and what most families share."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .attention.dispatch import Backend
from .layout import Grid

if TYPE_CHECKING:
    from .pack import PackedBatch


Transformer: TypeAlias = Any
"""A diffusers model; its attributes differ by family."""

TextRule: TypeAlias = Literal["masked", "keep_padding", "encoded_padding"]

UNLIMITED = sys.maxsize
"""Positions of an axis that are computed for any length."""


class Family(ABC):
    """How the transformers of one class attend, place and are called.

    A recipe holds no state; each method is given the transformer. What is written here suits a model that takes
    latents `(batch, channels, frames, height, width)`, one timestep per row, and text that each row attends to.

    Attributes:
        text_rule (`"masked"`, `"keep_padding"` or `"encoded_padding"`): What the pipeline does with the padding of a
            text: leaves it out of attention, attends to it as zeros, or attends to it as the text encoder makes it.
        shares_texts (`bool`): Whether samples of one caption can read one copy of it: texts are only ever attended to.
        interpolates (`bool`): Whether positions can be stretched to a base size.
        drops_tokens (`bool`): Whether tokens may be left out: all that the model does between attentions is per token,
            and attention minds positions alone, not which tokens there are.
        by_frame (`bool`): Whether tokens attend inside their frame and over the frames, and not to their sample.
    """

    text_rule: ClassVar[TextRule] = "masked"
    shares_texts: ClassVar[bool] = True
    interpolates: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = True
    by_frame: ClassVar[bool] = False

    def check(self, transformer: Transformer, *, strip_length: int) -> None:
        """Raise PackingError if this transformer cannot run strips of that length."""
        longest = self.longest_strip(transformer)
        if strip_length > longest:
            raise PackingError(f"strip_length={strip_length} exceeds the {longest} positions of this model's axes.")

    def check_grids(self, transformer: Transformer, grids: Sequence[Grid]) -> None:
        """Raise PackingError if a sample's grid is beyond the model's positions."""
        for sample, grid in enumerate(grids):
            for axis, count, limit in zip(("frames", "rows", "columns"), grid, self.limits(transformer), strict=True):
                if count > limit:
                    raise PackingError(
                        f"Sample {sample} has a token grid of {grid}, but this model has {limit} positions for "
                        f"{axis}; use a smaller size."
                    )

    def limits(self, transformer: Transformer) -> Grid:
        """Return the largest token grid that the model has positions for."""
        return UNLIMITED, UNLIMITED, UNLIMITED

    def longest_strip(self, transformer: Transformer) -> int:
        """Return the longest strip that the model's positions allow: it is looked up as one row of columns."""
        return self.limits(transformer)[2]

    def patch(self, transformer: Transformer) -> Grid:
        """Return latent frames, rows and columns per token."""
        size = transformer.config.patch_size
        if isinstance(size, int):
            return getattr(transformer.config, "patch_size_t", None) or 1, size, size
        t, h, w = size
        return t, h, w

    def in_channels(self, transformer: Transformer) -> int:
        """Return the channels of a latent."""
        return int(transformer.config.in_channels)

    @abstractmethod
    def text_dim(self, transformer: Transformer) -> int:
        """Return the channels of a text embedding."""

    def conditioning(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the names of further per-sample tensors that the transformer's own forward needs beside the text."""
        return ()

    def draw_conditioning(self, transformer: Transformer, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
        """Return plausible values of [`conditioning`] for samples of these grids, to try a model out."""
        return {}

    @abstractmethod
    def processor(self, name: str, backend: Backend) -> Any:
        """Return the packed processor for the attention module of that name; `None` leaves it its own."""

    @abstractmethod
    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Register hooks that place each token by its own sample; return their handles.

        Args:
            transformer: Of this family.
            base_size (`(t, h, w)` or `None`): Token grid to which positions are stretched; `None` for the model's own.
        """

    def attach(
        self, transformer: Transformer, backend: Backend, *, base_size: Grid | None = None
    ) -> Callable[[], None]:
        """Swap the attention processors and hook the positions; return what undoes both."""
        handles = self.hook_positions(transformer, base_size)
        originals = {name: module.processor for name, module in _attentions(transformer)}
        for name, module in _attentions(transformer):
            module.set_processor(self.processor(name, backend) or originals[name])

        def detach() -> None:
            for handle in handles:
                handle.remove()
            for name, module in _attentions(transformer):
                module.set_processor(originals[name])

        return detach

    def forward_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Return the arguments of the transformer's own forward for a pack: one timestep per row, one row of text."""
        return {
            "hidden_states": batch.strips,
            "timestep": batch.row_timesteps,
            "encoder_hidden_states": batch.text[None],
        }

    def output_strips(self, batch: PackedBatch, output: torch.Tensor) -> torch.Tensor:
        """Return the transformer's output for a pack as strips `(rows, channels, p_t, p_h, strip_length·p_w)`."""
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
        output: torch.Tensor = transformer(
            hidden_states=latent[None],
            timestep=timestep[None],
            encoder_hidden_states=text[None],
            return_dict=False,
            **{name: values[None] for name, values in conditioning.items()},
        )[0]
        return output[0]


def texts_over_rows(batch: PackedBatch) -> torch.Tensor:
    """Cut the texts into as many rows as there are strips, padded at the end: `(rows, tokens, text_dim)`.

    For models that view their text by the number of rows. Attention reads the rows one after the other again.
    """
    rows, tokens = batch.layout.num_rows, max(1, len(batch.text))
    per_row = -(-tokens // rows)
    return F.pad(batch.text, (0, 0, 0, rows * per_row - len(batch.text))).unflatten(0, (rows, per_row))


def shape_only(like: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
    """Return a latent of a grid that takes no memory, for position modules that read nothing but its shape."""
    sides = (count * part for count, part in zip(grid, patch, strict=True))
    return like.new_empty(()).expand(1, 1, *sides)


def _attentions(transformer: Transformer) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in transformer.named_modules() if hasattr(module, "set_processor")]
