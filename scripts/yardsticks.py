"""Shared parts of the benchmarks on what others published: flags, figures of plans, drawings, published data sets."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from benchmark_tools import machine, write_figures
from update_docs import table_of

from hf_bucketing import CostModel, LatentSpec
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.files import complete_file
from hf_bucketing.plans import EpochPlan
from hf_bucketing.report.figures import BLUE, GREEN, GREY, ORANGE, RED

COLORS = (GREY, ORANGE, BLUE, GREEN, RED)
VIDEO_MODEL = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
"""Strides and patch of Wan, HunyuanVideo and Open-Sora 2."""


def yardstick_parser(description: str | None, *, samples: int, unit: str = "Samples") -> FlagParser:
    """Return a parser of the flags that all yardsticks have."""
    parser = FlagParser(description)
    parser.add_argument("--samples", type=int, default=samples, help=f"{unit} that are drawn.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--figure", type=Path, help="PNG file for the figure; needs matplotlib.")
    return parser


def finish(figures: dict[str, Any], output: Path | None) -> None:
    """Print the figures, tables as in Markdown, and write them with the machine to a JSON file if one is given."""
    for name, value in figures.items():
        print(f"\n{name}\n{table_of(value, '.3f')}" if isinstance(value, list) else f"{name}: {value}")
    write_figures({**machine("numpy"), **figures}, output)


def measure_plan(
    plan: EpochPlan, tokens: np.ndarray, costs: np.ndarray, *, max_tokens: int, padded: bool = False
) -> dict[str, float]:
    """Return the steps of a plan, its use of tokens, and its balance.

    `fill` is the share of the limits that real tokens take; a batch above its limit counts as full.

    Args:
        plan: Plan of an epoch.
        tokens: Tokens of each row, those of its text included.
        costs: Cost of each row.
        max_tokens: Tokens that a process may take in a step.
        padded: Whether each sample of a batch takes as many tokens as its longest.
    """
    summary = plan.summary(num_tokens=tokens, costs=costs, max_tokens=None if padded else max_tokens)
    real = np.add.reduceat(tokens[plan.indices], plan.offsets[:-1])
    return {
        "steps": plan.num_steps,
        "samples per step": len(plan.indices) / plan.num_steps,
        "real ÷ computed": 1 - summary["padding"] if padded else 1.0,
        "fill": float(real.sum() / np.maximum(real, max_tokens).sum()),
        "largest ÷ mean cost": summary["cost_imbalance"],
    }


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """What is documented of a published data set, and what is assumed beyond it.

    Attributes:
        clips: Documented number of clips.
        hours: Documented hours of all clips together.
        bounds: Shortest and longest clip in seconds.
        sizes: Share of the clips by `(height, width)`.
        deviation: Assumed standard deviation of the logarithm of durations. None: all clips last as long as the
            longest, but for a share that is spread evenly; the share follows from the mean.
        source: Where it is documented.
        assumed: What is not documented there.
    """

    clips: int
    hours: float
    bounds: tuple[float, float]
    sizes: Mapping[tuple[int, int], float] = field(default_factory=lambda: {(720, 1280): 1.0})
    deviation: float | None = 0.7
    source: str
    assumed: str

    @property
    def mean_seconds(self) -> float:
        """Documented mean duration of a clip."""
        return self.hours * 3600 / self.clips

    def seconds(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw durations whose mean is the documented one."""
        low, high = self.bounds
        if self.deviation is None:
            share = 2 * (high - self.mean_seconds) / (high - low)
            return np.where(rng.random(count) < share, rng.uniform(low, high, count), high)
        shares = rng.random(count)
        below, above = -20.0, 20.0  # medians in ln; the mean rises with the median
        while above - below > 1e-6:
            middle = (below + above) / 2
            mean = float(_log_normal(np.linspace(0, 1, 4001), middle, self.deviation, self.bounds).mean())
            below, above = (middle, above) if mean < self.mean_seconds else (below, middle)
        return _log_normal(shares, below, self.deviation, self.bounds)

    def draw(self, count: int, *, fps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw clips: seconds, frames at a frame rate, heights and widths, each of shape `(count,)`."""
        rng = np.random.default_rng(0)
        seconds = self.seconds(count, rng)
        kinds = rng.choice(len(self.sizes), count, p=list(self.sizes.values()))
        heights, widths = np.array(list(self.sizes))[kinds].T
        return seconds, np.maximum((seconds * fps).astype(np.int64), 1), heights, widths


def _log_normal(shares: np.ndarray, location: float, deviation: float, bounds: tuple[float, float]) -> np.ndarray:
    """Return the quantiles, at shares from 0 to 1, of the part of a log-normal distribution within bounds."""
    normal = NormalDist(location, deviation)
    low, high = (min(max(normal.cdf(math.log(bound)), 1e-12), 1 - 1e-12) for bound in bounds)
    grid = np.linspace(low, high, 2001)
    quantiles = np.clip(np.exp([normal.inv_cdf(float(share)) for share in grid]), *bounds)
    return np.interp(shares, np.linspace(0, 1, len(grid)), quantiles)


DATA_SETS = {
    "Panda-70M": DataSet(
        clips=70_723_513,
        hours=167_000,
        bounds=(2, 60),
        source="snap-research/Panda-70M, README.md",
        assumed="log-normal durations from 2 to 60 s; all 720p at 16:9",
    ),
    "InternVid": DataSet(
        clips=234_000_000,
        hours=760_000,
        bounds=(1, 120),
        sizes={(720, 1280): 0.85, (480, 854): 0.075, (360, 640): 0.075},
        deviation=1.0,
        source="arXiv 2307.06942 and its data card: 85 % at 720p, the others from 360p to 720p",
        assumed="log-normal durations from 1 to 120 s; the others half 480p, half 360p; all at 16:9",
    ),
    "Koala-36M": DataSet(
        clips=36_000_000,
        hours=172_000,
        bounds=(2, 120),
        source="arXiv 2410.08260: a mean of 17.2 s, as cited elsewhere",
        assumed="log-normal durations from 2 to 120 s; all 720p at 16:9",
    ),
    "OpenVid-1M": DataSet(
        clips=1_019_957,
        hours=2_100,
        bounds=(1, 60),
        sizes={(1080, 1920): 0.425, (720, 1280): 0.275, (960, 540): 0.15, (512, 512): 0.15},
        source="arXiv 2407.02371 and its data card: at least 512×512, 433 thousand clips at 1080p",
        assumed="2.1 thousand hours; log-normal durations from 1 to 60 s; the others at 720p, portrait and square",
    ),
    "SpatialVID": DataSet(
        clips=2_710_000,
        hours=7_089,
        bounds=(3, 15),
        source="arXiv 2509.09676: clips of 3 to 15 s",
        assumed="log-normal durations; all 720p at 16:9",
    ),
    "MiraData": DataSet(
        clips=57_803,
        hours=1_754,
        bounds=(60, 120),
        deviation=None,
        source="mira-space/MiraData, README.md of the first version: 1 to 2 minutes, longer ones cut; a later version "
        "has a mean of 72 s",
        assumed="clips below 2 minutes spread evenly; all 720p at 16:9",
    ),
}


@contextmanager
def figure_at(path: Path | None, *, rows: int, height: float) -> Iterator[Sequence[Any]]:
    """Give the axes of a figure, one below the other and readable on a phone, and write it when the block is done.

    Nothing is written without a path.
    """
    if path is None:
        yield ()
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "font.size": 12}
    with rc_context(style):
        figure = Figure(figsize=(7, height), layout="constrained")
        yield np.atleast_1d(figure.subplots(rows))
        path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(path) as partial:
            figure.savefig(partial, dpi=110, format="png")


def draw_bars(
    axes: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    text: Callable[[float], str],
) -> None:
    """Draw horizontal bars with their values; a value of None has no bar."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(groups))]
        bars = axes.barh(places, [value or 0 for value in values], width * 0.92, label=name, color=COLORS[number])
        texts = [text(value) if value is not None else "" for value in values]
        axes.bar_label(bars, texts, padding=3, fontsize=10 if len(series) < 5 else 8)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(title, loc="left", fontsize=12)
    columns = 2 if max(map(len, series)) <= 24 else 1
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=columns, frameon=False, fontsize=10)


def model_cost(width: int, gamma: float = 1.0) -> CostModel:
    """Return the cost of a transformer, whose attention is weighted by gamma."""
    model = CostModel.for_transformer(width)
    return CostModel(linear=model.linear, quadratic=gamma * model.quadratic)
