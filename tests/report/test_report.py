"""Reports: every number against a small case computed by hand, invariants on any data, figures and the script."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import AssignmentRule, BucketingError, BucketTable, LatentSpec, Size, cover_resize
from hf_bucketing.report import ReportConfig, SizeColumns, format_report, make_report
from hf_bucketing.report.compare import StrategyReport
from hf_bucketing.report.measure import BucketReport, read_subject
from hf_bucketing.report.samples import aspect_histogram, token_histogram
from hf_bucketing.report.text import strategy_cells

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))  # a token is 16 × 16 pixels
TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 32, 64), Size(9, 32, 32), Size(9, 32, 64)))
SAMPLES = SizeColumns(*zip(
    *[(1, 64, 64)] * 7,    # bucket 0: a full step of 4, a short one of 2, and one is left
    *[(1, 40, 100)] * 4,   # bucket 1: a full step
    (18, 32, 40),          # bucket 2: left over, so it shares a mixed step with the one of bucket 0
    (5, 64, 64), (1, 32, 32), (1, 20, 100), (1, -1, 64), (0, 64, 64),  # rejected, for five reasons
    strict=True,
))  # fmt: skip
TWO = ReportConfig(batch_size=2, num_processes=2, width=1)


def describe(config: ReportConfig) -> BucketReport:
    return make_report(SAMPLES, TABLE, spec=SPEC, config=config).buckets


def strategies(samples: list[tuple[int, int, int]], table: BucketTable = TABLE, **config) -> dict[str, StrategyReport]:
    columns = SizeColumns(*zip(*samples, strict=True))
    compared = make_report(columns, table, spec=SPEC, config=ReportConfig(**{"width": 1, **config})).strategies
    assert [strategy.name for strategy in compared] == ["padding", "bucketing", "packing"]
    return {strategy.name: strategy for strategy in compared}


def test_a_table_is_described_as_computed_by_hand() -> None:
    report = describe(TWO)
    assert report.num_samples == 17
    assert report.rejections == {"aspect": 1, "too_short": 1, "too_small": 1, "unreadable": 1, "empty": 1}
    assert report.rejected == 5
    assert report.aspect_error == pytest.approx((5 * math.log(1.25) / 12, 0, math.log(1.25)))
    assert report.aspect_difference == pytest.approx((2.25 / 12, 0, 0.5))
    assert report.kept_area == pytest.approx((7 + 5 * 0.8) / 12)
    assert (report.num_steps, report.mixed_steps, report.enlarged) == (4, 1, 0)
    assert [bucket.bucket_id for bucket in report.used] == [0, 1, 2]


def test_each_bucket_is_described_as_computed_by_hand() -> None:
    square, wide, clips, empty = describe(TWO).buckets
    counts = [
        (bucket.num_samples, bucket.batches, bucket.short_batches, bucket.mixed_samples, bucket.dropped)
        for bucket in (square, wide, clips, empty)
    ]
    assert counts == [(7, 4, 2, 1, 0), (4, 2, 0, 0, 0), (1, 0, 0, 1, 0), (0, 0, 0, 0, 0)]
    assert [bucket.num_tokens for bucket in (square, wide, clips, empty)] == [16, 8, 12, 24]
    assert [bucket.cost for bucket in (square, wide)] == [24 * 16 + 4 * 16**2, 24 * 8 + 4 * 8**2]
    assert (wide.kept_area, wide.scale, wide.enlarged) == pytest.approx((0.8, 0.8, 0))
    assert (clips.kept_area, clips.kept_frames, clips.scale) == pytest.approx((0.8, 0.5, 1))
    assert math.isnan(empty.kept_area)


def test_enlarged_samples_are_counted() -> None:
    config = replace(TWO, rule=AssignmentRule(max_upscale=2))
    report = describe(config)
    assert report.enlarged == report.buckets[0].enlarged == 1
    assert report.buckets[0].scale == pytest.approx((7 + 2) / 8)


def test_padding_computes_the_largest_frames_height_and_width_of_a_batch() -> None:
    samples = [(1, 32, 64), (1, 32, 64), (1, 64, 32), (1, 64, 32), (5, 32, 32)]  # 8 tokens each
    padding = strategies(samples, batch_size=5, num_processes=1)["padding"]
    assert (padding.kept, padding.dropped, padding.num_steps) == (5, {}, 1)
    assert (padding.real_tokens, padding.computed_tokens) == (5 * 8, 5 * 2 * 4 * 4)
    assert (padding.token_use, padding.tokens_per_sample) == (0.25, 8)
    assert padding.epoch_cost == 5 * (24 * 32 + 4 * 32**2)
    assert padding.efficiency == pytest.approx((24 * 8 + 4 * 8**2) / (24 * 32 + 4 * 32**2))
    assert padding.step_balance == 1


def test_packing_computes_whole_strips_up_to_max_tokens() -> None:
    samples = [(1, 32, 64), (1, 32, 64), (1, 64, 32), (1, 64, 32), (5, 32, 32)]
    config = {"batch_size": 5, "num_processes": 1, "max_area": "none"}
    packing = strategies(samples, strip_length=16, max_tokens=50, **config)["packing"]
    assert (packing.num_steps, packing.real_tokens, packing.computed_tokens) == (2, 40, 80)
    assert packing.epoch_cost == 5 * (24 * 16 + 4 * 16**2)
    packing = strategies(samples, strip_length=8, **config)["packing"]
    assert (packing.num_steps, packing.token_use, packing.efficiency, packing.max_tokens) == (1, 1, 1, 5 * 8)
    packing = strategies([*samples, (1, 128, 128)], strip_length=16, **config)["packing"]
    assert packing.max_tokens == 64, "the largest sample, as five of median tokens have 40"


def test_text_in_the_sequence_counts_and_costs_as_the_samples_tokens_do() -> None:
    samples = [(1, 32, 64)] * 4  # 8 tokens each, and 3 of text
    found = strategies(samples, batch_size=2, num_processes=1, text_tokens=3, strip_length=16, max_tokens=38)
    cost = [24 * length + 4 * length**2 for length in (8 + 3, 16 + 3)]
    tokens = {name: (strategy.real_tokens, strategy.computed_tokens) for name, strategy in found.items()}
    assert tokens["bucketing"] == (4 * 11, 4 * 11)
    assert tokens["packing"] == (4 * 11, 4 * 19)
    assert tokens.keys() == {"padding", "bucketing", "packing"}
    assert (found["bucketing"].epoch_cost, found["packing"].epoch_cost) == (4 * cost[0], 4 * cost[1])
    assert (found["bucketing"].efficiency, found["packing"].efficiency) == (1, pytest.approx(cost[0] / cost[1]))
    assert found["packing"].num_steps == 2
    by_default = strategies(samples, batch_size=2, num_processes=1, text_tokens=3, strip_length=16)
    assert by_default["packing"].max_tokens == 22
    columns = SizeColumns(*zip(*samples, strict=True))
    config = ReportConfig(num_processes=1, text_tokens=3, width=1)
    assert make_report(columns, TABLE, spec=SPEC, config=config).buckets.buckets[1].cost == cost[0]


def test_bucketing_computes_real_tokens_alone_and_names_what_it_drops() -> None:
    samples = [(1, 32, 64), (1, 32, 64), (1, 64, 64), (1, 64, 64), (5, 32, 32), (1, 40, 70)]
    bucketing = strategies(samples, batch_size=5, num_processes=1)["bucketing"]
    assert (bucketing.kept, bucketing.dropped, bucketing.num_steps) == (5, {"too_short": 1}, 2)
    assert bucketing.real_tokens == bucketing.computed_tokens == 3 * 8 + 2 * 16
    assert bucketing.kept_area == pytest.approx(1 - 0.125 / 5), (
        "40 × 70 pixels become 36.6 × 64, of which 32 rows are kept"
    )
    assert bucketing.max_tokens is None


@pytest.mark.parametrize("name", ["padding", "bucketing", "packing"])
def test_balance_compares_the_processes_of_each_step(name: str) -> None:
    samples = [(1, 32, 64), (1, 64, 64)]  # 8 and 16 tokens, one for each process
    result = strategies(samples, batch_size=1, num_processes=2, strip_length=8)[name]
    small, large = 24 * 8 + 4 * 8**2, 24 * 16 + 4 * 16**2
    assert result.num_steps == 1
    assert result.mixed_steps == (name == "bucketing")
    assert result.step_balance == pytest.approx((small + large) / 2 / large)
    assert result.epoch_cost == large
    assert result.efficiency == pytest.approx(result.step_balance)


def test_lockstep_makes_the_processes_of_each_step_cost_the_same() -> None:
    bucketing = strategies([(1, 32, 64), (1, 64, 64)] * 2, batch_size=1, num_processes=2)["bucketing"]
    assert (bucketing.num_steps, bucketing.mixed_steps, bucketing.step_balance) == (2, 0, 1)
    assert bucketing.epoch_cost == 24 * (8 + 16) + 4 * (8**2 + 16**2)


def test_own_sizes_lose_the_rounding_alone() -> None:
    result = strategies([(7, 30, 64), (7, 30, 64)], num_processes=1, batch_size=2)
    for name in ("padding", "packing"):
        assert result[name].tokens_per_sample == 2 * 2 * 4, "5 frames of 32 × 64 pixels"
        assert result[name].kept_area == pytest.approx(30 / 32)
        assert result[name].kept_frames == pytest.approx(5 / 7)
    assert result["bucketing"].kept == 0


def test_all_ways_train_at_about_the_same_size_by_default() -> None:
    """Clips of 9 frames have the smaller buckets here, so padding and packing shrink them more than images."""
    table = BucketTable(sizes=(Size(1, 256, 256), Size(1, 64, 64), Size(9, 64, 64)))
    sizes = [(1, 1024, 1024), (12, 1024, 1024), (20, 64, 32)]
    found = strategies(sizes[:2], table, num_processes=1, batch_size=1)
    assert {strategy.real_tokens for strategy in found.values()} == {16 * 16 + 3 * 4 * 4}
    assert strategies(sizes[2:], table, num_processes=1)["packing"].real_tokens == 5 * 4 * 2, "none is enlarged"
    free = strategies(sizes[:2], table, num_processes=1, max_area="none")["packing"]
    assert free.real_tokens == 64 * 64 * 4
    columns = SizeColumns(*zip(*sizes, strict=True))
    for limit, said in {
        "table": "at up to 4,096 to 65,536 pixels per frame (those of the largest bucket of as many frames)",
        "none": "at their own sizes",
        1000: "at up to 1,000 pixels per frame",
    }.items():
        config = ReportConfig(num_processes=1, max_area=limit)
        text = " ".join(format_report(make_report(columns, table, spec=SPEC, config=config)).split())
        assert f"take samples {said}, bucketing" in text


def test_max_area_shrinks_what_padding_and_packing_take() -> None:
    sizes = [(1, 1000, 4000), (1, 300, 300)]
    free, bound = (strategies(sizes, num_processes=1, max_area=area)["packing"] for area in ("none", 1_000_000))
    assert free.real_tokens == 63 * 250 + 19 * 19
    assert bound.real_tokens == 32 * 125 + 19 * 19, "500 × 2000 pixels, rounded up to whole tokens"
    assert bound.kept_area > 0.94


def test_too_few_samples_are_reported_and_not_refused() -> None:
    report = make_report(SizeColumns([1, 1], [8, 64], [8, 64]), TABLE, spec=SPEC, config=TWO)
    bucketing = report.strategies[1]
    assert report.buckets.rejections == {"too_small": 1}
    assert report.buckets.buckets[0].dropped == 1
    assert (bucketing.kept, bucketing.num_steps, bucketing.epoch_cost) == (0, 0, 0)
    assert bucketing.dropped == {"too_small": 1, "remainder": 1}
    assert report.strategies[0].kept == 2
    assert report.to_dict()["strategies"][1]["token_use"] is None
    assert "–" in format_report(report)


SIZES = st.tuples(st.sampled_from([-1, 0, 1, 1, 1, 9, 17]), st.integers(0, 200), st.integers(0, 200))


@given(st.lists(SIZES, min_size=1, max_size=80), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_sample_is_counted_once(samples, batch_size: int, num_processes: int, seed: int) -> None:
    columns = SizeColumns(*zip(*samples, strict=True))
    config = ReportConfig(batch_size=batch_size, num_processes=num_processes, seed=seed, strip_length=16)
    report = make_report(columns, TABLE, spec=SPEC, config=config)
    buckets = report.buckets
    assert sum(bucket.num_samples for bucket in buckets.buckets) + buckets.rejected == len(samples)
    assert sum(bucket.batches for bucket in buckets.buckets) + buckets.mixed_steps * num_processes == (
        buckets.num_steps * num_processes
    )
    for bucket in buckets.buckets:
        full = (bucket.batches - bucket.short_batches) * batch_size
        short = bucket.num_samples - full - bucket.mixed_samples - bucket.dropped
        assert bucket.short_batches <= short <= bucket.short_batches * (batch_size - 1)
    for strategy in report.strategies:
        assert strategy.kept + sum(strategy.dropped.values()) == len(samples)
        assert strategy.dropped.get("remainder", 0) < num_processes
        if strategy.kept:
            assert 0 < strategy.token_use <= 1
            assert 0 < strategy.step_balance <= 1
            assert 0 < strategy.efficiency <= 1 + 1e-9
            assert 0 < strategy.kept_area <= 1
            assert 0 < strategy.kept_frames <= 1
    assert sum(report.aspects.counts["with a bucket"]) == len(samples) - buckets.rejected
    assert sum(report.tokens.counts["at their own size"]) == sum(min(size) > 0 for size in samples)
    json.dumps(report.to_dict(), allow_nan=False)
    assert format_report(report)


@given(st.integers(100, 3000), st.integers(100, 3000))
def test_kept_area_is_what_cover_resize_and_crop_keep(height: int, width: int) -> None:
    table = BucketTable(sizes=(Size(1, 512, 704),))
    config = ReportConfig(num_processes=1, rule=AssignmentRule(max_aspect_error=9, max_upscale=99))
    (bucket,) = make_report(SizeColumns([1], [height], [width]), table, spec=SPEC, config=config).buckets.buckets
    resized = cover_resize(height, width, target=bucket.size)
    assert bucket.kept_area == pytest.approx(512 * 704 / math.prod(resized), rel=1 / 512)
    assert bucket.scale == pytest.approx(max(512 / height, 704 / width))


def test_histograms_count_in_bins_of_equal_ratio() -> None:
    subject = read_subject(SAMPLES, TABLE, spec=SPEC, config=TWO)
    histogram = aspect_histogram(subject, num_bins=4)
    assert np.diff(np.log(histogram.edges)) == pytest.approx([math.log(5 * 1.05**2) / 4] * 4)
    assert histogram.counts == {"with a bucket": (7 + 1, 0, 4, 0), "rejected": (2, 0, 0, 1)}
    tokens = token_histogram(subject, num_bins=2)
    assert tokens.edges[0] == pytest.approx(4 / 1.05)
    assert {name: sum(counts) for name, counts in tokens.counts.items()} == {
        "at their bucket's size": 12,
        "at their own size": 15,
    }


@pytest.mark.parametrize("change", [
    {"batch_size": 3}, {"num_processes": 3}, {"max_tokens": 80}, {"strip_length": 8}, {"seed": 1}, {"width": 2},
    {"max_area": 1000}, {"text_tokens": 5}, {"rule": AssignmentRule(max_upscale=2)},
    {"rule": AssignmentRule(max_aspect_error=0.1)},
], ids=str)  # fmt: skip
def test_every_setting_changes_the_report(change) -> None:
    before, after = (
        make_report(SAMPLES, TABLE, spec=SPEC, config=config).to_dict() for config in (TWO, replace(TWO, **change))
    )
    assert {**before, "config": None} != {**after, "config": None}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ReportConfig(batch_size=0), "`batch_size` must be at least 1, got 0"),
    (lambda: ReportConfig(max_tokens=0), "`max_tokens` must be at least 1"),
    (lambda: ReportConfig(max_area=0), "`max_area` must be a number of pixels of at least 1"),
    (lambda: ReportConfig(max_area="own"), "got 'own'"),
    (lambda: ReportConfig(text_tokens=-1), "`text_tokens` must be at least 0"),
    (lambda: ReportConfig(seed=-1), "`seed` must be at least 0"),
    (lambda: make_report(SizeColumns([], [], []), TABLE, spec=SPEC), "empty"),
    (lambda: make_report(SizeColumns([1], [64, 64], [64, 64]), TABLE, spec=SPEC), "equally long"),
    (lambda: make_report(SAMPLES, BucketTable.parse("40,40"), spec=SPEC), "does not divide into whole tokens"),
    (lambda: make_report(SAMPLES, TABLE, spec=SPEC, config=replace(TWO, max_tokens=63)), "Raise `max_tokens`"),
])  # fmt: skip
def test_impossible_reports_are_errors_that_say_why(make, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        make()


def test_the_kept_area_is_one_figure_of_buckets_and_ways() -> None:
    """Rows that occur twice, and samples that fill no step, change what is trained, and not what a table keeps."""
    columns = SizeColumns([1, 1, 1], [64, 40, 64], [64, 70, 96])
    for weights in (None, [1.0, 2.0, 1.0]):
        report = make_report(columns, TABLE, spec=SPEC, config=TWO, weights=weights)
        kept = {row.row: row.kept_area for row in report.random_samples}
        assert kept == pytest.approx({0: 1, 1: 0.875, 2: 0.75})
        assert report.buckets.kept_area == report.strategies[1].kept_area == pytest.approx(2.625 / 3)
        assert report.buckets.buckets[1].kept_area == pytest.approx((kept[1] + kept[2]) / 2)
        area = next(line for line in strategy_cells(report) if line[0] == "kept area, mean")
        assert f"kept area {area[2]} (mean)" in format_report(report)
