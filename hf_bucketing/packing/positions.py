"""Positions of tokens on the axes of their grid, native or stretched to a base size, and as tables by strip."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from .context import active_layout
from .names import Grid

Table: TypeAlias = Callable[..., tuple[torch.Tensor, ...]]
"""Function of a hooked module, a token grid and a `device`: position tables of such a sample, `(t·h·w, …)` each.

Like every hook, it is copied and pickled with its transformer: a function of a module, or a `partial` of one.
"""


CACHED_BYTES = 128 * 2**20
"""Bytes of position tables that a hook keeps."""


class Tables:
    """A function that makes position tables, which keeps those of the grids used last.

    Tables follow from the grid, the device, and the module's buffers, which it may move, cast or load: all are part of
    the key. Copies of the function, as in a copied or pickled model, begin empty.
    """

    def __init__(self, make: Table) -> None:
        self.make = make
        self._kept: dict[Hashable, tuple[torch.Tensor, ...]] = {}

    def __reduce__(self) -> tuple[type[Tables], tuple[Table]]:
        """Copy and pickle without the tables."""
        return Tables, (self.make,)

    def __call__(self, module: Any, grid: Hashable, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the tables of a grid, or of whatever else they follow from."""
        buffers = [(buffer.data_ptr(), buffer.dtype, _version(buffer)) for buffer in module.buffers(recurse=False)]
        key = (grid, device, torch.is_inference_mode_enabled(), *buffers)
        tables = self._kept.pop(key, None)
        tables = self.make(module, grid, device=device) if tables is None else tables
        self._kept[key] = tables  # the last of the dictionary: used most recently
        while sum(table.nbytes for kept in [*self._kept.values()] for table in kept) > CACHED_BYTES:
            self._kept.pop(next(iter(self._kept)), None)
        return tables


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def axis_coordinates(
    grid: Grid, base_size: Grid | None, *, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Return the coordinates of frames, rows and columns, in tokens.

    Args:
        grid (`(t, h, w)`): The sample's token grid.
        base_size (`(t, h, w)` or `None`): Token grid over which every sample is stretched: coordinate `i` of an axis
            of `n` tokens becomes `i·base/n` (fractional positions: NaViT, Dehghani et al., 2023). `None` keeps `i`.
        device (`torch.device`): Device of the result.
        dtype (`torch.dtype`): Dtype of the result.

    Returns:
        `tuple` of three `torch.Tensor`, of lengths t, h and w.

    Example:
        >>> [axis.tolist() for axis in axis_coordinates((1, 2, 4), (1, 2, 2), device="cpu")]
        [[0.0], [0.0, 1.0], [0.0, 0.5, 1.0, 1.5]]
    """
    axes = [torch.arange(count, device=device, dtype=dtype) for count in grid]
    if base_size is None:
        return tuple(axes)
    return tuple(axis * base / len(axis) for axis, base in zip(axes, base_size, strict=True))


def over_grid(tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Repeat the tables of three axes, `(t, …)`, `(h, …)` and `(w, …)`, for each token of their grid, `(t·h·w, …)`."""
    t, h, w = (len(table) for table in tables)
    shapes = ((t, 1, 1), (1, h, 1), (1, 1, w))
    return tuple(
        table.view(*shape, *table.shape[1:]).expand(t, h, w, *table.shape[1:]).flatten(0, 2)
        for table, shape in zip(tables, shapes, strict=True)
    )


PackTables: TypeAlias = Callable[[Any], tuple[torch.Tensor, ...]]
"""Function of a hooked module: its position tables for the active pack, `(num_strips, …)` each."""


def strip_tables(tables: Tables, references: Tables, module: Any) -> tuple[torch.Tensor, ...]:
    """Return the position tables of the active pack's tokens by strip."""
    from .strip_positions import position_strips

    layout = active_layout()
    device = torch.device(layout.device)
    return position_strips(
        layout, lambda grid: tables(module, grid, device), lambda grids: references(module, grids, device)
    )


def hook_tables(transformer: Any, module: str | None, tables: PackTables) -> RemovableHandle:
    """Replace the output of a position module by the tables of the pack; return the hook's handle.

    Where there is no such module, pass them to the transformer, as its pipeline does.
    """
    if module is None:
        return transformer.register_forward_pre_hook(partial(_add, tables), with_kwargs=True)
    return getattr(transformer, module).register_forward_hook(partial(_replace, tables))


def _replace(tables: PackTables, module: Any, args: tuple[Any, ...], output: Any) -> tuple[torch.Tensor, ...]:
    return tables(module)


def _add(tables: PackTables, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args, {**kwargs, "image_rotary_emb": tables(module)}


def shape_only(like: torch.Tensor, grid: Grid, patch: Grid) -> torch.Tensor:
    """Return a latent of a grid that takes no memory, for position modules that read nothing but its shape."""
    sides = (count * part for count, part in zip(grid, patch, strict=True))
    return like.new_empty(()).expand(1, 1, *sides)
