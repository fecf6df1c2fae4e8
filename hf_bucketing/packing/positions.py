"""Where tokens lie on the axes of their grid, natively or stretched to a base size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .layout import Grid


def axis_coordinates(
    grid: Grid, base_size: Grid | None, *, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Return the coordinates of frames, rows and columns, in tokens.

    Args:
        grid (`(t, h, w)`): Of the sample.
        base_size (`(t, h, w)` or `None`): Coordinate `i` of an axis of `n` tokens becomes `i·base/n`, so that every
            sample spans the base grid (fractional positions: NaViT, Dehghani et al., 2023). `None` leaves `i`.
        device (`torch.device`): Of the result.
        dtype (`torch.dtype`): Of the result.

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
