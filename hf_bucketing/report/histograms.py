"""Histograms of the samples of a data set, before and after they are assigned to buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, column_values
from ..buckets.assignment import has_bucket
from ..errors import BucketingError
from .measure import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of several groups of samples in the same bins.

    Attributes:
        edges (`tuple[float, ...]`): Rising edges, one more than there are bins; a bin holds its lower edge, the last
            bin both.
        counts (mapping of `str` to `tuple[int, ...]`): Samples in each bin, by group.
    """

    edges: tuple[float, ...]
    counts: Mapping[str, tuple[int, ...]]


def aspect_histogram(subject: Subject, *, num_bins: int = 60) -> Histogram:
    """Count readable samples by aspect ratio (width ÷ height), those with a bucket and those rejected."""
    return _by_bucket(subject, subject.sizes.widths.clip(0) / np.maximum(subject.sizes.heights, 1), num_bins)


def token_histogram(subject: Subject, *, num_bins: int = 50) -> Histogram:
    """Count samples by their tokens, at the sizes of their buckets and at their own."""
    bucketed, packed = subject.bucketed.num_tokens, subject.packed.num_tokens
    groups = {"at their bucket's size": bucketed[bucketed > 0], "at their own size": packed[packed > 0]}
    return _in_log_bins(groups, num_bins)


def size_histogram(subject: Subject, *, num_bins: int = 50) -> Histogram:
    """Count readable samples by the square root of their frame's area, in pixels."""
    return _by_bucket(subject, np.sqrt(subject.sizes.heights.clip(0) * subject.sizes.widths.clip(0)), num_bins)


def duration_histogram(subject: Subject, fps: npt.ArrayLike | None, *, num_bins: int = 50) -> Histogram | None:
    """Count readable videos by their duration in seconds; None if no frame rate is known.

    Raises:
        BucketingError: If there are not as many frame rates as samples.
    """
    rates = np.zeros(0) if fps is None else column_values(fps, np.float64)
    if not np.any(rates > 0):
        return None
    if len(rates) != len(subject.sizes.frames):
        raise BucketingError(f"Expected {len(subject.sizes.frames)} frame rates, one per sample, got {len(rates)}.")
    seconds = np.divide(subject.sizes.frames, rates, out=np.zeros(len(rates)), where=rates > 0)
    return _by_bucket(subject, seconds, num_bins)


def _by_bucket(subject: Subject, values: FloatArray, num_bins: int) -> Histogram:
    """Count positive values of readable samples, those with a bucket and those rejected."""
    kept = has_bucket(subject.bucketed.bucket_id)
    known = (np.minimum.reduce(subject.sizes) > 0) & (values > 0)
    return _in_log_bins({"with a bucket": values[known & kept], "rejected": values[known & ~kept]}, num_bins)


def _in_log_bins(groups: Mapping[str, npt.NDArray[np.number[Any]]], num_bins: int) -> Histogram:
    """Count in bins of equal ratio that hold all values."""
    values = np.concatenate([np.asarray(group, np.float64) for group in groups.values()])
    low, high = (values.min(), values.max()) if len(values) else (1.0, 1.0)
    edges = np.geomspace(low / 1.05, high * 1.05, num_bins + 1)
    counts = {name: tuple(np.histogram(group, edges)[0].tolist()) for name, group in groups.items()}
    return Histogram(edges=tuple(edges.tolist()), counts=counts)
