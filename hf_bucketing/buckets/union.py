"""One bucket table in place of several, for data sets whose sources have tables of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import BucketingError
from .arrays import IntArray
from .sizes import Size
from .table import BucketTable


def union_of_tables(tables: Sequence[BucketTable]) -> tuple[BucketTable, list[IntArray]]:
    """Return a table with the buckets of several, and for each of these the ids of its buckets in it.

    Buckets of equal size become one, so that the rows of several sources share batches. They keep the order in which
    they first occur. Tiers of different tables are compared by their largest frames: a bucket that several tables
    have takes the highest. Tables with the same buckets and tiers give that table.

    Args:
        tables (sequence of [`BucketTable`]): At least one.

    Returns:
        The table, and one `int64` array of shape `(number of buckets,)` per given table.

    Raises:
        BucketingError: If there is no table, or two have different base buckets.

    Example:
        >>> a, b = BucketTable.parse("64,96;96,64"), BucketTable.parse("80,80;96,64")
        >>> table, ids = union_of_tables([a, b])
        >>> [tuple(size) for size in table.sizes], [positions.tolist() for positions in ids]
        ([(1, 64, 96), (1, 96, 64), (1, 80, 80)], [[0, 1], [2, 1]])
    """
    if not tables:
        raise BucketingError("A union of bucket tables needs at least one table.")
    bases = list(dict.fromkeys(table.sizes[table.base] for table in tables if table.base is not None))
    if len(bases) > 1:
        raise BucketingError(
            f"The tables have different base buckets, {' and '.join(map(str, bases))}, and batches that mix buckets "
            "take one size; give them the same base, or none."
        )
    sizes = tuple(dict.fromkeys(size for table in tables for size in table.sizes))
    position = {size: number for number, size in enumerate(sizes)}
    tiers = _tiers(tables)
    union = BucketTable(
        sizes=sizes, tiers=tuple(tiers[size] for size in sizes), base=position[bases[0]] if bases else None
    )
    return union, [np.array([position[size] for size in table.sizes], np.int64) for table in tables]


def _tiers(tables: Sequence[BucketTable]) -> dict[Size, int]:
    """Return the tier of each size: that of its table, if all agree, or the rank of that tier's largest frame."""
    named: dict[Size, set[int]] = {}
    areas: dict[tuple[int, int], int] = {}
    for number, table in enumerate(tables):
        for size, tier in zip(table.sizes, table.tiers, strict=True):
            named.setdefault(size, set()).add(tier)
            areas[number, tier] = max(areas.get((number, tier), 0), size.height * size.width)
    if all(set(table.sizes) == set(tables[0].sizes) for table in tables) and all(
        len(tiers) == 1 for tiers in named.values()
    ):
        return {size: next(iter(tiers)) for size, tiers in named.items()}
    rank = {area: number for number, area in enumerate(sorted(set(areas.values())))}
    ranks: dict[Size, int] = {}
    for number, table in enumerate(tables):
        for size, tier in zip(table.sizes, table.tiers, strict=True):
            ranks[size] = max(ranks.get(size, 0), rank[areas[number, tier]])
    return ranks
