"""Position tables of samples, laid out as the tokens of a pack lie.

A module of its own, which is imported where a pack runs: `torch.compiler` imports a second of compilers, and what only
reads the settings of a model needs none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .layout import PackedLayout
from .names import Grid
from .strips import by_strip


@torch.compiler.disable  # its loops follow the composition of the pack: a graph of them would serve no other pack
def position_strips(
    layout: PackedLayout,
    table: Callable[[Grid], tuple[torch.Tensor, ...]],
    references: Callable[[tuple[Grid, ...]], tuple[torch.Tensor, ...]] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Lay out the position tables of each sample, `(tokens, …)`, as the tokens of a pack lie; zeros for padding.

    The results have shape `(num_strips, strip_length, …)`. Tables are made once per distinct sample: `table` makes
    those of its own grid, and `references` those of its references, given all its grids.
    """

    def tables_of(grids: tuple[Grid, ...]) -> tuple[torch.Tensor, ...]:
        sample_grid, *others = grids
        if not others:
            return table(sample_grid)
        assert references is not None, "checked when the pack was made"
        return tuple(map(torch.cat, zip(table(sample_grid), references(grids), strict=True)))

    tables = {grids: tables_of(grids) for grids in dict.fromkeys(layout.sample_grids)}
    by_table = zip(*(tables[grids] for grids in layout.sample_grids), strict=True)
    return tuple(by_strip(samples, layout) for samples in by_table)
