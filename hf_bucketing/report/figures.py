"""Figures of a report, each one PNG file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..files import complete_file
from .compare import Report
from .histograms import Histogram
from .text import percent, short_number, size_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with any colour vision.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
MAX_BARS = 40
"""Buckets that the occupancy figure names; more labels would not be readable."""


def draw_figures(report: Report, folder: Path) -> list[Path]:
    """Draw all four figures into a folder, which is created if it is missing.

    Returns:
        `list[Path]`: `aspects.png`, `occupancy.png`, `tokens.png` and `strategies.png`.
    """
    paths = []
    for draw in (draw_aspects, draw_occupancy, draw_tokens, draw_strategies):
        paths.append(folder / f"{draw.__name__.removeprefix('draw_')}.png")
        draw(report, paths[-1])
    return paths


def draw_aspects(report: Report, path: Path) -> None:
    """Draw the histogram of aspect ratios, and below it a line for each aspect ratio of the buckets."""
    num_samples: Counter[float] = Counter()
    for bucket in report.buckets.buckets:
        num_samples[bucket.size.aspect_ratio] += bucket.num_samples
    groups = {
        "used buckets": [ratio for ratio, count in num_samples.items() if count],
        "empty buckets": [ratio for ratio, count in num_samples.items() if not count],
    }
    with _figure(path, (9, 5)) as figure:
        axes, strip = figure.subplots(2, sharex=True, height_ratios=(8, 1))
        _draw_histogram(axes, report.aspects, stacked=True)
        for place, (group, color) in enumerate(zip(groups.values(), (BLUE, GREY), strict=True)):
            strip.vlines(group, place - 0.4, place + 0.4, color=color, linewidth=1)
        strip.set_yticks([0, 1], [f"{name} ({len(group)} ratios)" for name, group in groups.items()])
        strip.set(ylim=(1.6, -0.6), xlabel="aspect ratio: width ÷ height (log scale)")
        strip.grid(visible=False, axis="y")
        low, high = min(report.aspects.edges[0], *num_samples), max(report.aspects.edges[-1], *num_samples)
        _log_ticks(strip, low / 1.02, high * 1.02)


def draw_occupancy(report: Report, path: Path) -> None:
    """Draw how many samples the fullest buckets hold, by the kind of batch that they are in."""
    shown = report.buckets.used[:MAX_BARS]
    names = ("num_samples", "batches", "short_batches", "mixed_samples", "dropped")
    rows = [[getattr(bucket, name) for name in names] for bucket in shown]
    held, batches, short, mixed, dropped = np.array(rows, np.int64).reshape(-1, len(names)).T
    full = (batches - short) * report.config.batch_size
    parts = {
        "in full batches": (BLUE, full),
        "in short batches": (ORANGE, held - full - mixed - dropped),
        "in mixed steps": (GREEN, mixed),
        "dropped in this epoch": (RED, dropped),
    }
    places, start = np.arange(len(shown)), np.zeros(len(shown))
    with _figure(path, (9, 1.9 + 0.24 * max(len(shown), 5)), grid="x") as figure:
        axes = figure.add_subplot()
        for name, (color, counts) in parts.items():
            bars = axes.barh(places, counts, left=start, color=color, label=f"{name} ({sum(counts):,})")
            start += counts
        axes.bar_label(bars, [f"{bucket.num_samples:,}" for bucket in shown], padding=3, fontsize=8)
        axes.set_yticks(places, [f"{bucket.bucket_id}: {size_label(bucket.size)}" for bucket in shown], fontsize=8)
        axes.set(xlabel="samples", ylabel="bucket: [frames×]height×width", ylim=(max(len(shown), 1) - 0.4, -0.6))
        axes.set_xlim(0, max([bucket.num_samples for bucket in shown], default=1) * 1.1)
        _count_ticks(axes.xaxis)
        axes.set_title(_occupancy_title(report, len(shown)), fontsize=10)
        if shown:
            figure.legend(loc="outside lower center", ncols=len(parts), fontsize=9)


def draw_tokens(report: Report, path: Path) -> None:
    """Draw the histogram of tokens per sample, at the sizes of their buckets and at their own."""
    with _figure(path, (9, 4.5)) as figure:
        axes = figure.add_subplot()
        _draw_histogram(axes, report.tokens, histtype="stepfilled", alpha=0.5)
        axes.set_xlabel("tokens per sample (log scale)")
        _log_ticks(axes, report.tokens.edges[0], report.tokens.edges[-1])


def draw_strategies(report: Report, path: Path) -> None:
    """Draw padding, bucketing and packing side by side, one panel per measure."""
    from matplotlib.ticker import MaxNLocator

    strategies, units = report.strategies, report.config.units
    panels: tuple[tuple[str, str, Sequence[float]], ...] = (
        ("real ÷ computed tokens", "% of computed tokens", [strategy.token_use for strategy in strategies]),
        ("step-time balance", "% of the slowest process's cost", [strategy.step_balance for strategy in strategies]),
        ("useful work", "% of all processes' time", [strategy.efficiency for strategy in strategies]),
        ("cropped area, mean", "% of the frame", [strategy.cropped_area for strategy in strategies]),
        ("samples kept", "samples", [strategy.kept for strategy in strategies]),
        ("tokens per sample, mean", "tokens", [strategy.tokens_per_sample for strategy in strategies]),
        ("steps per epoch", "steps", [strategy.num_steps for strategy in strategies]),
        ("epoch cost", units.epoch, [strategy.epoch_cost * units.epoch_factor for strategy in strategies]),
    )
    with _figure(path, (13, 5), grid="x") as figure:
        grid: Any = figure.subplots(2, 4, sharey=True)
        for axes, (title, unit, values) in zip(grid.flat, panels, strict=True):
            is_share = unit.startswith("%")
            lengths = [0.0 if math.isnan(value) else value * (100 if is_share else 1) for value in values]
            bars = axes.barh([strategy.name for strategy in strategies], lengths, color=(RED, BLUE, GREEN))
            axes.bar_label(bars, [percent(value) if is_share else short_number(value) for value in values], padding=3)
            axes.set_title(title, fontsize=11)
            axes.set(xlabel=unit, xlim=(0, max(*lengths, 1e-9) * 1.5))
            ticks = MaxNLocator(3, steps=[1, 2, 5, 10]).tick_values(0, max(*lengths, 1e-9))
            axes.set_xticks([tick for tick in ticks if tick <= max(lengths)])
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        grid[0, 0].invert_yaxis()


def _occupancy_title(report: Report, shown: int) -> str:
    used, config = report.buckets.used, report.config
    text = f"{len(used)} of {len(report.buckets.buckets)} buckets hold samples"
    if shown < len(used):
        rest = sum(bucket.num_samples for bucket in used[shown:]) / sum(bucket.num_samples for bucket in used)
        text += f"; here the {shown} fullest, the others hold {percent(rest)}"
    return f"{text} (batches of {config.batch_size} on {config.num_processes} processes)"


@contextmanager
def _figure(path: Path, size: tuple[float, float], *, grid: Literal["x", "both"] = "both") -> Iterator[Figure]:
    """Make a figure in the style of all of them, and write it when the block is done."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.grid": True, "axes.grid.axis": grid, "grid.alpha": 0.3,
    }):  # fmt: skip
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        with complete_file(path) as partial:
            figure.savefig(partial, dpi=120, format="png")


def _draw_histogram(axes: Axes, histogram: Histogram, **style: Any) -> None:
    edges, counts = histogram.edges, histogram.counts
    axes.hist(
        [edges[:-1]] * len(counts),
        edges,
        weights=[*counts.values()],
        color=(BLUE, ORANGE),
        label=[f"{name} ({sum(values):,} samples)" for name, values in counts.items()],
        **style,
    )
    axes.set_ylabel("samples per bin")
    _count_ticks(axes.yaxis)
    axes.legend()


def _count_ticks(axis: Axis) -> None:
    """Put ticks at whole numbers, written with commas."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter("{x:,.0f}")


def _log_ticks(axes: Axes, low: float, high: float) -> None:
    """Make the x axis logarithmic, with ticks at round numbers, more of them if the range is short."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 30 else (1, 2, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=50))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlim(low, high)
