"""Counts of samples by aspect ratio and by tokens, in bins of equal ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from .config import ReportConfig, SizeColumns
from .targets import bucket_targets, own_targets, read_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of several groups of samples in the same bins.

    Attributes:
        edges (`tuple[float, ...]`): Rising, one more than there are bins; a bin holds its lower edge, the last both.
        counts (mapping of `str` to `tuple[int, ...]`): Samples in each bin, by group.
    """

    edges: tuple[float, ...]
    counts: Mapping[str, tuple[int, ...]]


def _in_log_bins(groups: Mapping[str, npt.NDArray[np.number[Any]]], num_bins: int) -> Histogram:
    values = np.concatenate([np.asarray(group, np.float64) for group in groups.values()])
    low, high = (values.min(), values.max()) if len(values) else (1.0, 1.0)
    edges = np.geomspace(low / 1.05, high * 1.05, num_bins + 1)
    counts = {name: tuple(np.histogram(group, edges)[0].tolist()) for name, group in groups.items()}
    return Histogram(edges=tuple(edges.tolist()), counts=counts)


def aspect_histogram(
    columns: SizeColumns, table: BucketTable, *, config: ReportConfig, num_bins: int = 60
) -> Histogram:
    """Count samples by aspect ratio (width ÷ height), those with a bucket and those rejected; unreadable ones not.

    Raises:
        BucketingError: If there is no row.
    """
    sizes = read_sizes(columns)
    kept = table.assign(*sizes, rule=config.rule).bucket_id >= 0
    known = np.minimum.reduce(sizes) > 0
    ratios = sizes.widths / np.maximum(sizes.heights, 1)
    return _in_log_bins({"with a bucket": ratios[kept], "rejected": ratios[known & ~kept]}, num_bins)


def token_histogram(
    columns: SizeColumns, table: BucketTable, *, spec: LatentSpec, config: ReportConfig, num_bins: int = 50
) -> Histogram:
    """Count samples by their tokens, at the sizes of their buckets and at their own.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
    """
    sizes = read_sizes(columns)
    bucketed = bucket_targets(sizes, table, spec=spec, config=config).num_tokens
    own = own_targets(sizes, spec=spec, config=config).num_tokens
    groups = {"at their bucket's size": bucketed[bucketed > 0], "at their own size": own[own > 0]}
    return _in_log_bins(groups, num_bins)
