"""A report as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import fill

from ..buckets.sizes import Size
from .buckets import BucketReport, BucketUse, Spread
from .config import ReportConfig
from .report import Report
from .strategies import StrategyReport

Line = tuple[str, ...]


def format_report(report: Report) -> str:
    """Return the report as text of three parts: the table on the data, its used buckets, the three strategies."""
    parts = (
        _summary(report.buckets),
        _bucket_lines(report.buckets, report.config),
        _strategy_lines(report.strategies, report.config),
    )
    return "\n\n".join(parts)


def size_label(size: Size) -> str:
    """Return `frames×height×width`, or `height×width` for one frame."""
    return "×".join(map(str, size if size.frames > 1 else size[1:]))


def percent(share: float) -> str:
    """Return a share as per cent with one decimal, or a dash for NaN."""
    return "–" if math.isnan(share) else f"{share:.1%}"


def short_number(value: float) -> str:
    """Return a number with three digits or more, or a dash for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def columns(lines: Sequence[Line]) -> str:
    """Align lines of cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = (
        (cell.rjust(width) if column else cell.ljust(width))
        for line in lines
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "\n".join("  ".join(next(aligned) for _ in widths).rstrip() for _ in lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _summary(report: BucketReport) -> str:
    def spread(values: Spread) -> Line:
        return tuple("–" if math.isnan(value) else f"{value:.4f}" for value in values)

    errors = columns([
        ("aspect error", "mean", "median", "max"),
        ("  |ln(aspect ratio ÷ bucket's)|", *spread(report.aspect_error)),
        ("  |aspect ratio − bucket's|", *spread(report.aspect_difference)),
    ])  # fmt: skip
    return "\n".join([
        f"{report.num_samples:,} samples: {report.num_samples - report.skipped:,} in {len(report.used)} of "
        f"{len(report.buckets)} buckets, {report.skipped:,} skipped",
        f"skipped by reason: {_counts(report.rejections)}",
        errors,
        f"kept area {percent(report.kept_area)} (mean), enlarged {report.enlarged:,} samples",
    ])  # fmt: skip


def _bucket_lines(report: BucketReport, config: ReportConfig) -> str:
    title = (
        f"Buckets by size, with batches of {config.batch_size} on {config.num_processes} processes: "
        f"{report.num_steps:,} steps, {report.mixed_steps:,} of them mixed"
    )
    head = (
        *("bucket", "aspect", "entries", "kept area", "kept frames", "scale", "enlarged", "tokens", "GFLOP"),
        *("batches", "short", "mixed", "left out"),
    )
    lines = [
        title,
        columns([head, *map(_bucket_line, report.used)]),
        "tokens and GFLOP (one block, forward) are those of one sample; scale is the mean factor of cover-resize;",
        "batches are those of all processes, short the ones that are not full; mixed and left out count samples",
    ]
    empty = [f"{bucket.bucket_id}:\u00a0{size_label(bucket.size)}" for bucket in report.buckets if not bucket.entries]
    if empty:
        text = f"{len(empty)} buckets without a sample: {', '.join(empty)}"
        lines.append(fill(text, width=118, subsequent_indent="  ").replace("\u00a0", " "))
    return "\n".join(lines)


def _bucket_line(bucket: BucketUse) -> Line:
    return (
        f"{bucket.bucket_id}: {size_label(bucket.size)}",
        f"{bucket.size.aspect_ratio:.3f}",
        f"{bucket.entries:,}",
        percent(bucket.kept_area),
        percent(bucket.kept_frames),
        f"{bucket.scale:.3f}",
        f"{bucket.enlarged:,}",
        f"{bucket.num_tokens:,}",
        short_number(bucket.cost / 1e9),
        f"{bucket.batches:,}",
        f"{bucket.short_batches:,}",
        f"{bucket.mixed_samples:,}",
        f"{bucket.left_out:,}",
    )


def _strategy_lines(strategies: Sequence[StrategyReport], config: ReportConfig) -> str:
    rows: list[Line] = [
        ("", *(strategy.name for strategy in strategies)),
        ("samples kept", *(f"{strategy.kept:,}" for strategy in strategies)),
        ("samples dropped", *(f"{sum(strategy.dropped.values()):,}" for strategy in strategies)),
        ("steps per epoch", *(f"{strategy.num_steps:,}" for strategy in strategies)),
        ("tokens per sample, mean", *(short_number(strategy.tokens_per_sample) for strategy in strategies)),
        ("real ÷ computed tokens", *(percent(strategy.token_use) for strategy in strategies)),
        ("cropped area, mean", *(percent(strategy.cropped_area) for strategy in strategies)),
        ("cut-off frames, mean", *(percent(strategy.cropped_frames) for strategy in strategies)),
        ("step-time balance", *(percent(strategy.step_balance) for strategy in strategies)),
        ("useful work", *(percent(strategy.efficiency) for strategy in strategies)),
        ("epoch cost, TFLOP per block", *(short_number(strategy.epoch_cost / 1e12) for strategy in strategies)),
    ]
    own = "at their own sizes" if config.max_area is None else f"at up to {config.max_area:,} pixels per frame"
    capacity = next(strategy.capacity for strategy in strategies if strategy.capacity is not None)
    reasons = [f"{strategy.name} drops {_counts(strategy.dropped)}" for strategy in strategies if strategy.dropped]
    return "\n".join([
        f"Strategies on {config.num_processes} processes, from the plan of one epoch",
        columns(rows),
        *reasons,
        f"Padding and packing take samples {own}, bucketing at those of its buckets.",
        f"Padding and bucketing take {config.batch_size} samples per process and step, packing {capacity:,} tokens.",
        "step-time balance: mean over steps of mean cost over processes ÷ largest cost over processes",
        "epoch cost: sum over steps of the largest cost over processes, forward pass",
        "useful work: cost of the samples alone, without padding and waiting, ÷ (epoch cost × processes)",
    ])  # fmt: skip
