"""A column of lists as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..buckets.arrays import IntArray


class Lists(NamedTuple):
    """Lists of whole numbers, one for each row.

    Attributes:
        values (array of `int`, shape `(k,)`): Numbers of one list after another.
        counts (array of `int`, shape `(n,)`): Length of each list.
    """

    values: IntArray
    counts: IntArray

    @classmethod
    def of(cls, cells: Sequence[Sequence[int]]) -> Lists:
        """Return those of cells.

        Example:
            >>> [part.tolist() for part in Lists.of([[1, 2], [], [3]])]
            [[1, 2, 3], [2, 0, 1]]
        """
        counts = np.fromiter(map(len, cells), np.int64, len(cells))
        return cls(np.array([number for cell in cells for number in cell], np.int64), counts)
