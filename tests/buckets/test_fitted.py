"""Tables chosen from the sizes of samples: the best of all choices, by trying them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_bucketing import AssignmentRule, BucketingError, BucketTable, LatentSpec, Size, fitted_ladder, token_ladder
from hf_bucketing.buckets.fitted import _share_out
from hf_bucketing.buckets.ladders import all_ladder_sizes
from hf_bucketing.buckets.sizes import kept_area

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
NO_LIMITS = AssignmentRule(max_upscale=float("inf"), max_aspect_error=float("inf"))


def kept(table: BucketTable, samples, rule: AssignmentRule | None = None) -> float:
    """Return the sum of kept areas; samples without a bucket keep nothing."""
    ids = table.assign(*samples, rule=rule).bucket_id
    sizes = np.array(table.sizes, np.int64)[np.maximum(ids, 0)]
    return float((kept_area(np.asarray(samples[1]), np.asarray(samples[2]), *sizes[:, 1:].T) * (ids >= 0)).sum())


def best_count(every: BucketTable, samples, most: int) -> dict[tuple[int, ...], float]:
    """Return what each choice of up to `most` sizes counts: the kept area in the nearest, 0 where it enlarges."""
    sizes = np.array(every.sizes)[:, 1:]
    heights, widths = (np.asarray(column)[:, None] for column in samples[1:])
    distances = np.abs(np.log(sizes[:, 1] / sizes[:, 0]) - np.log(widths / heights))
    fits = (heights >= sizes[:, 0]) & (widths >= sizes[:, 1]) & (distances <= np.log(2))
    values, distances = kept_area(heights, widths, *sizes.T) * fits, np.round(distances, 12)
    counts = {}
    for number in range(1, most + 1):
        for choice in itertools.combinations(range(len(sizes)), number):
            nearest = np.array(choice)[distances[:, choice].argmin(axis=1)]
            counts[choice] = float(values[np.arange(len(values)), nearest].sum())
    return counts


def all_sizes(tokens: list[int], frames: list[int], *, max_aspect_ratio: float, tolerance: float = 0.1) -> BucketTable:
    limits = {"max_aspect_ratio": max_aspect_ratio, "tolerance": tolerance, "own_budgets": True}
    return all_ladder_sizes(SPEC, tokens, frames=frames, sizes=(), **limits)[0]


sides = st.integers(90, 330)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(sides, sides, st.integers(1, 4)), min_size=1, max_size=12),
    num_buckets=st.integers(1, 3),
)
def test_no_choice_of_sizes_counts_more(shapes, num_buckets: int) -> None:
    every = all_sizes([60], [1], max_aspect_ratio=2.5)
    heights, widths = (np.repeat([shape[side] for shape in shapes], [shape[2] for shape in shapes]) for side in (0, 1))
    samples = np.ones_like(heights), heights, widths
    fills = every.assign(*samples).bucket_id >= 0
    if not fills.any():
        with pytest.raises(BucketingError, match="No sample fills a bucket"):
            fitted_ladder(SPEC, [60], samples, num_buckets=num_buckets, max_aspect_ratio=2.5)
        return
    table = fitted_ladder(SPEC, [60], samples, num_buckets=num_buckets, max_aspect_ratio=2.5)
    usable = tuple(column[fills] for column in samples)
    counts = best_count(every, usable, num_buckets)
    best = max(counts.values())
    assert len(table) <= num_buckets
    assert counts[tuple(every.sizes.index(size) for size in table.sizes)] == pytest.approx(best, abs=1e-7)
    assert kept(table, usable) >= best - 1e-7


@settings(max_examples=25, deadline=None)
@given(
    ratios=st.lists(st.floats(0.4, 2.5), min_size=1, max_size=30),
    num_buckets=st.integers(1, 3),
    metric=st.sampled_from(["log", "linear"]),
)
def test_no_table_keeps_more_of_samples_larger_than_every_bucket(ratios, num_buckets: int, metric) -> None:
    rule = AssignmentRule(metric=metric)
    every = all_sizes([100], [1], max_aspect_ratio=2.5, tolerance=0.05)
    widths = np.round(2000 * np.sqrt(ratios)).astype(np.int64)
    samples = np.ones_like(widths), np.round(widths / ratios).astype(np.int64), widths
    limits = {"max_aspect_ratio": 2.5, "tolerance": 0.05, "rule": rule}
    table = fitted_ladder(SPEC, [100], samples, num_buckets=num_buckets, **limits)
    best = max(
        kept(BucketTable(sizes=sizes), samples, rule)
        for count in range(1, num_buckets + 1)
        for sizes in itertools.combinations(every.sizes, count)
    )
    assert kept(table, samples, rule) == pytest.approx(best, abs=1e-7)
