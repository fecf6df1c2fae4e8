"""Names of several sources, and how often their rows occur in an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
from datasets import Dataset

from ..buckets.arrays import FloatArray
from ..errors import BucketingError, ColumnError
from .arrays import column_array, numbers


def name_sources(sources: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the name of each source: its own, or the last part of its path, or the whole path if several end alike.

    Args:
        sources (sequence of pairs): Path or name on the hub, and given name or None.

    Raises:
        BucketingError: If there is no source, or two have one name, such as the same folder twice.

    Example:
        >>> name_sources([("data/clips", None), ("data/faces.jsonl", None), ("old/clips", None), ("data/clips", "x")])
        ['data/clips', 'faces', 'old/clips', 'x']
    """
    if not sources:
        raise BucketingError("Name at least one source of data as `dataset`.")
    short = [name or PurePath(path).stem or path for path, name in sources]
    paths: dict[str, set[str]] = {}
    for stem, (path, name) in zip(short, sources, strict=True):
        paths.setdefault(stem, set()).update([] if name else [path])
    names = [
        name or (path if len(paths[stem]) > 1 else stem) for (path, name), stem in zip(sources, short, strict=True)
    ]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise BucketingError(
            f"Two sources are named {twice[0]}. To train rows more often, list a source once and give it `repeats`; "
            "to read it in two ways, give each a `name` of its own."
        )
    return names


def row_weights(
    datasets: Sequence[Dataset],
    *,
    columns: Sequence[str | None],
    repeats: Sequence[float],
    shares: Sequence[float | None],
) -> FloatArray | None:
    """Return the occurrences of each row per epoch, source after source, or None if every row occurs once.

    Rows that a column of their source weighs keep their proportions.

    Args:
        datasets (sequence of `Dataset`): Rows of each source with their `bucket_id`; rejected rows do not count.
        columns (sequence of `str`, *optional*): Column of the weights of each source's rows; None where all are 1.
        repeats (sequence of `float`): Occurrences per row, where there are no shares.
        shares (sequence of `float`, *optional*): Share of each source in an epoch of as many samples as all sources
            have by themselves; given for all sources or for none.

    Raises:
        BucketingError: If some sources alone have shares, or a source with one has no usable row.
        ColumnError: If a column of weights is missing, or holds anything but numbers of 0 or more.
    """
    stored = [_stored_weights(dataset, column) for dataset, column in zip(datasets, columns, strict=True)]
    factors = np.asarray(repeats, np.float64)
    targets = normalized_shares(shares)
    if targets is not None:
        kept = [column_array(dataset, "bucket_id") >= 0 for dataset in datasets]
        usable = np.array([weights[rows].sum() for weights, rows in zip(stored, kept, strict=True)])
        if not usable.all():
            raise BucketingError(
                f"All rows of source {int(usable.argmin())} are rejected, so it cannot have a `weight`; look at why, "
                "or remove it."
            )
        factors = targets * usable.sum() / usable
    if np.all(factors == 1) and not any(columns):
        return None
    return np.concatenate([weights * factor for weights, factor in zip(stored, factors, strict=True)])


def normalized_shares(shares: Sequence[float | None]) -> FloatArray | None:
    """Return the shares of sources, `(n,)`, whose sum is 1; None if none is given.

    Raises:
        BucketingError: If some sources alone have shares.
    """
    stated = [share for share in shares if share is not None]
    if stated and len(stated) < len(shares):
        raise BucketingError("Give all sources a `weight`, or none: it is a share among them.")
    return np.asarray(stated, np.float64) / sum(stated) if stated else None


def _stored_weights(dataset: Dataset, column: str | None) -> FloatArray:
    if column is None:
        return np.ones(len(dataset))
    weights = numbers({column: column_array(dataset, column)}, column).astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise ColumnError(
            f"{len(wrong)} of {len(weights)} rows have no weight of 0 or more in the column {column}, such as row "
            f"{wrong[0]}, which has {weights[wrong[0]]:g}; correct them."
        )
    return weights
