"""Charts of a report, on its page and as PNG files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .charts import Chart, bar_chart, histogram_chart, save_charts
from .compare import Report
from .text import measures_of, size_label

MAX_BARS = 40
"""Buckets that the occupancy figure names; more labels would not be readable."""


def draw_figures(report: Report, folder: Path) -> list[Path]:
    """Draw all four figures into a folder, which is created if it is missing.

    Returns:
        `list[Path]`: `aspects.png`, `occupancy.png`, `tokens.png` and `strategies.png`.
    """
    charts = {
        "aspects": [aspects(report)],
        "occupancy": [occupancy(report)],
        "tokens": [tokens(report)],
        "strategies": strategies(report),
    }
    paths = {folder / f"{name}.png": drawn for name, drawn in charts.items()}
    for path, drawn in paths.items():
        save_charts(path, drawn, columns=min(len(drawn), 2))
    return [*paths]


def data_charts(report: Report) -> list[Chart]:
    """Return the histograms of a report: sizes, aspect ratios, durations if a frame rate is known, and tokens."""
    sizes = histogram_chart(
        report.sizes,
        title="Sizes",
        x_label="√(width × height) in pixels, log scale",
        y_label="samples",
        note="Side of a square of the same area as the frame, before any resize.",
    )
    if report.durations is None:
        return [sizes, aspects(report), tokens(report)]
    durations = histogram_chart(
        report.durations,
        title="Durations",
        x_label="seconds, log scale",
        y_label="videos",
        note="Videos only, before frames are cut off.",
    )
    return [sizes, aspects(report), durations, tokens(report)]


def aspects(report: Report) -> Chart:
    """Return the histogram of aspect ratios, with a line above it for each aspect ratio of the buckets."""
    num_samples: Counter[float] = Counter()
    for bucket in report.buckets.buckets:
        num_samples[bucket.size.aspect_ratio] += bucket.num_samples
    return histogram_chart(
        report.aspects,
        title="Aspect ratios",
        x_label="width ÷ height, log scale",
        y_label="samples",
        note="1 is square, above 1 is landscape. The lines above are the ratios of the buckets.",
        marks={
            "ratios of empty buckets": [ratio for ratio, count in num_samples.items() if not count],
            "ratios of buckets in use": [ratio for ratio, count in num_samples.items() if count],
        },
    )


def tokens(report: Report) -> Chart:
    """Return the histogram of tokens per sample, at the sizes of their buckets and at their own."""
    return histogram_chart(
        report.tokens,
        title="Tokens",
        x_label="tokens per sample, log scale",
        y_label="samples",
        note="What the model computes per sample: cut to its bucket, or whole as in packs.",
        colours=(2, 3),
    )


def occupancy(report: Report) -> Chart:
    """Return how many samples the fullest buckets hold, by the kind of batch that they are in."""
    used = report.buckets.used
    bars = []
    for bucket in used[:MAX_BARS]:
        full = (bucket.batches - bucket.short_batches) * report.config.batch_size
        in_short = bucket.num_samples - full - bucket.mixed_samples - bucket.dropped
        parts = (full, in_short, bucket.mixed_samples, bucket.dropped)
        bars.append((size_label(bucket.size), tuple(map(float, parts)), f"{bucket.num_samples:,}"))
    title = "Samples by bucket and kind of batch"
    if len(bars) < len(used):
        title += f": the {len(bars)} fullest of {len(used)}"
    return bar_chart(
        bars,
        title=title,
        alt=f"Samples of the {len(bars)} fullest buckets, by the kind of batch that they are in.",
        x_label="samples",
        note="Samples in short batches and mixed steps fill less of a step.",
        parts=("in full batches", "in short batches", "in mixed steps", "dropped in this epoch"),
    )


def strategies(report: Report) -> list[Chart]:
    """Return charts of padding, bucketing and packing side by side, one per measure that has a note."""
    charts = []
    for measure in measures_of(report):
        if measure.note:
            ways = zip(report.strategies, measure.values(report), measure.cells(report), strict=True)
            bars = [(strategy.name, (value,), cell) for strategy, value, cell in ways]
            title = measure.title[0].upper() + measure.title[1:]
            charts.append(bar_chart(bars, title=title, x_label=measure.unit, note=measure.note, colours=(1, 0, 2)))
    return charts
