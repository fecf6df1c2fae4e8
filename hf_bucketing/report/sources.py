"""What each of several sources adds to an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import column_values
from ..buckets.assignment import count_rejections
from .text import align, percent, short_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUse:
    """Rows of one source, and what they add to an epoch.

    Attributes:
        name (`str`): Name of the source.
        rows (`int`): All its rows.
        rejections (mapping of `str` to `int`): Rejected rows by reason.
        buckets (`int`): Number of buckets that its rows are in.
        samples (`float`): Samples per epoch, on average over epochs.
        tokens (`float`): Tokens of these samples.
    """

    name: str
    rows: int
    rejections: Mapping[str, int]
    buckets: int
    samples: float
    tokens: float


def count_sources(
    sources: npt.ArrayLike,
    names: Sequence[str],
    *,
    columns: Mapping[str, npt.ArrayLike],
    weights: npt.ArrayLike | None = None,
) -> list[SourceUse]:
    """Count the rows of each source.

    Args:
        sources (array of `int`, shape `(n,)`): Source of each row, a position in `names`.
        names (sequence of `str`): Name of each source.
        columns (mapping of `str` to array, shape `(n,)`): The columns `bucket_id`, `num_tokens` and `rejection`.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default source.
    """
    ids, tokens = column_values(columns["bucket_id"], np.int64), column_values(columns["num_tokens"], np.int64)
    rejection, source = column_values(columns["rejection"]), column_values(sources, np.int64)
    often = np.ones(len(ids)) if weights is None else column_values(weights, np.float64)
    often = np.where(ids >= 0, often, 0.0)
    counts = []
    for number, name in enumerate(names):
        of_source = source == number
        counts.append(
            SourceUse(
                name=name,
                rows=int(of_source.sum()),
                rejections=dict(count_rejections(rejection[of_source])),
                buckets=len(np.unique(ids[of_source & (ids >= 0)])),
                samples=float(often[of_source].sum()),
                tokens=float((often * tokens)[of_source].sum()),
            )
        )
    return counts


def describe_sources(counts: Sequence[SourceUse]) -> str:
    """Return a table with a line per source."""
    return align(source_cells(counts))


def source_cells(counts: Sequence[SourceUse]) -> list[tuple[str, ...]]:
    """Return a table of sources, its titles first; shares are those of the samples and tokens of all sources."""
    head = ("source", "rows", "rejected", "buckets", "samples per epoch", "share of samples", "share of tokens")
    samples, tokens = (max(sum(getattr(source, name) for source in counts), 1.0) for name in ("samples", "tokens"))
    rows = [
        (
            source.name,
            f"{source.rows:,}",
            f"{sum(source.rejections.values()):,}",
            f"{source.buckets:,}",
            short_number(source.samples),
            percent(source.samples / samples),
            percent(source.tokens / tokens),
        )
        for source in counts
    ]
    return [head, *rows]
