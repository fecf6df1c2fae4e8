"""Tables chosen from the sizes of samples: the best of all choices, found by trying each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings, strategies as st

from hf_bucketing import AssignmentRule, BucketingError, BucketTable, LatentSpec, Size, fitted_ladder, token_ladder
from hf_bucketing.buckets.fitted import _share_out
from hf_bucketing.buckets.kept import kept_area
from hf_bucketing.buckets.ladders import all_ladder_sizes

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def kept(table: BucketTable, samples, rule: AssignmentRule | None = None) -> float:
    """Return the sum of kept areas; samples without a bucket keep nothing."""
    ids = table.assign(*samples, rule=rule).bucket_id
    sizes = np.array(table.sizes, np.int64)[np.maximum(ids, 0)]
    return float((kept_area(*samples[1:3], target_heights=sizes[:, 1], target_widths=sizes[:, 2]) * (ids >= 0)).sum())


def best_count(every: BucketTable, samples, most: int) -> dict[tuple[int, ...], float]:
    """Return what each choice of up to `most` sizes counts: the kept area in the nearest, 0 where it enlarges."""
    sizes = np.array(every.sizes)[:, 1:]
    heights, widths = (np.asarray(column)[:, None] for column in samples[1:])
    distances = np.abs(np.log(sizes[:, 1] / sizes[:, 0]) - np.log(widths / heights))
    fits = (heights >= sizes[:, 0]) & (widths >= sizes[:, 1]) & (distances <= np.log(2))
    values = kept_area(heights, widths, target_heights=sizes[:, 0], target_widths=sizes[:, 1]) * fits
    distances = np.round(distances, 12)
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(
    curves=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=4),
    spare=st.integers(0, 6),
)
def test_buckets_are_shared_out_so_that_groups_keep_the_most(curves: list[list[int]], spare: int) -> None:
    most = len(curves) + spare
    shared = _share_out([np.array(curve, np.float64) for curve in curves], most, tie=0.5)
    possible = {
        counts: sum(curve[count - 1] for curve, count in zip(curves, counts, strict=True))
        for counts in itertools.product(*(range(1, len(curve) + 1) for curve in curves))
        if sum(counts) <= most
    }
    best = max(possible.values())
    assert possible[tuple(shared)] == best
    assert sum(shared) == min(sum(counts) for counts, value in possible.items() if value == best)


def test_samples_of_one_size_get_one_bucket() -> None:
    for number in (1, 1000):
        samples = [1] * number, [480] * number, [832] * number
        table = fitted_ladder(SPEC, [1560], samples, num_buckets=10)
        assert table.sizes == (Size(1, 480, 832),)
        assert kept(table, samples) == number


def test_of_equal_ratios_the_size_nearest_to_the_budget_is_chosen_unless_it_enlarges() -> None:
    for side, chosen in ((330, 320), (310, 304)):
        table = fitted_ladder(SPEC, [400], ([1], [side], [side]), num_buckets=3)
        assert table.sizes == (Size(1, chosen, chosen),)


def test_portraits_and_their_landscapes_keep_alike() -> None:
    rng = np.random.default_rng(0)
    heights, widths = rng.integers(500, 700, 200), rng.integers(700, 1100, 200)
    both = np.ones(400, np.int64), np.append(heights, widths), np.append(widths, heights)
    alone = np.ones(200, np.int64), heights, widths
    limits = {"max_aspect_ratio": 2.5}
    half = kept(fitted_ladder(SPEC, [400], alone, num_buckets=3, **limits), alone)
    assert kept(fitted_ladder(SPEC, [400], both, num_buckets=6, **limits), both) == pytest.approx(2 * half)


def test_each_number_of_frames_and_budget_that_has_samples_gets_buckets() -> None:
    samples = [1, 20, 49, 300, 9, 0, -1], [720, 720, 480, 1080, 720, 720, -1], [1280, 1280, 480, 1920, 1280, 1280, -1]
    budgets, frames = [8190, 32760], [1, 17, 49, 81]
    table = fitted_ladder(SPEC, budgets, samples, num_buckets=9, frames=frames)
    assert [(size.frames, size.height, size.width) for size in table.sizes] == [
        (17, 496, 880),
        (49, 400, 400),
        (81, 464, 832),
    ]


def test_more_buckets_never_keep_less_and_as_many_keep_more_than_a_ladder() -> None:
    rng = np.random.default_rng(1)
    ratios, sides = np.exp(rng.normal(0.2, 0.35, 500)), np.exp(rng.normal(7.2, 0.3, 500))
    heights, widths = (sides / np.sqrt(ratios)).astype(int), (sides * np.sqrt(ratios)).astype(int)
    samples = rng.choice([1, 30, 90], 500), heights, widths
    limits = {"frames": [1, 17, 81], "max_aspect_ratio": 2.5}
    ladder = token_ladder(SPEC, [2000, 8190], **limits)
    numbers = [8, 16, 32, len(ladder)]
    tables = [fitted_ladder(SPEC, [2000, 8190], samples, num_buckets=number, **limits) for number in numbers]
    assert [len(table) <= number for table, number in zip(tables, numbers, strict=True)] == [True] * 4
    sums = [kept(table, samples) for table in tables]
    assert sums == sorted(sums)
    assert sums[-1] > kept(ladder, samples)


def test_columns_of_a_data_set_are_samples() -> None:
    rows = Dataset.from_dict({"num_frames": [1, 1], "height": [480, 640], "width": [640, 480]})
    columns = rows["num_frames"], rows["height"], rows["width"]
    assert len(fitted_ladder(SPEC, [1024], columns, num_buckets=2)) == 2


def test_enlarging_is_counted_as_the_rule_says() -> None:
    samples = [1, 1], [390, 1000], [390, 1500]  # the square fills a budget of 676 tokens only if it is enlarged
    assert [size[1:] for size in fitted_ladder(SPEC, [676], samples, num_buckets=2).sizes] == [(336, 512)]
    rule = AssignmentRule(max_upscale=1.1)
    enlarged = fitted_ladder(SPEC, [676], samples, num_buckets=2, rule=rule)
    assert len(enlarged) == 2
    assert kept(enlarged, samples, rule) == pytest.approx(1 + 1.5 * 336 / 512)


@pytest.mark.parametrize(
    ("samples", "num_buckets", "message"),
    [
        (([1, 30], [720, 720], [1280, 1280]), 1, "at least 2, got 1: the samples fall into 2 budgets"),
        (([1], [64], [64]), 5, "No sample fills a bucket.*Lower `bucket_tokens`"),
        (([1], [64, 64], [64]), 5, "equally long"),
        (([1], [640], [640]), 0, "at least 1, got 0"),
    ],
)
def test_what_makes_no_table_is_said(samples, num_buckets: int, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        fitted_ladder(SPEC, [400], samples, num_buckets=num_buckets, frames=[1, 17])
