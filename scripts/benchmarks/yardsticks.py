"""Shared parts of the benchmarks on what others published: flags, figures of plans, drawings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_tools import machine, write_figures

from hf_bucketing import CostModel, LatentSpec
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.files import complete_file
from hf_bucketing.plans import EpochPlan
from hf_bucketing.report.charts import COLOURS
from hf_bucketing.report.markdown import markdown_table

COLORS = [COLOURS[number] for number in (4, 1, 0, 2, 3)]
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
        print(f"\n{name}\n{markdown_table(value, '.3f')}" if isinstance(value, list) else f"{name}: {value}")
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
