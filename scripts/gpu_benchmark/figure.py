"""Draw what scripts/benchmark_gpu.py measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_bucketing.files import complete_file

COLORS = {"varlen": "#2f6fb0", "flex": "#c0562f", "segments": "#4b8f4b", "stock": "#888888"}


def draw_figure(figures: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per part that was measured, as a PNG; what a device could not run is absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [
        (draw, figures["parts"][name]) for name, draw in PANELS.items() if "seconds" in figures["parts"].get(name, ())
    ]
    columns = min(3, max(1, len(drawn)))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(6.5 * columns, 4.5 * max(1, rows)), layout="constrained")
    figure.suptitle(f"{figures['device']}, torch {figures['torch']}, {figures['scale']} sizes")
    for place, (draw, part) in enumerate(drawn, 1):
        draw(figure.add_subplot(rows, columns, place), part)
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=120, format="png")


def _grouped(axes: Any, groups: Mapping[str, Mapping[str, float]], *, title: str, unit: str) -> None:
    """Draw groups of bars: a value per group and series."""
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / max(1, len(series))
    for number, name in enumerate(series):
        places = [place + number * width for place, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        bars = axes.bar(places, heights, width, label=name, color=COLORS.get(name))
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], list(groups))
    axes.set(title=title, ylabel=unit)
    axes.legend(fontsize=8)


def _values(part: Mapping[str, Any], key: str) -> dict[str, float]:
    return {name: values[key] for name, values in part.items() if isinstance(values, Mapping) and key in values}


def _parity(axes: Any, part: Mapping[str, Any]) -> None:
    groups = {
        f"{where},\n{what}": _values(part[where], f"{what}_relative_error")
        for where in ("attention", "model")
        for what in ("output", "gradients")
    }
    _grouped(axes, groups, title="Errors of bf16 against float32", unit="norm of errors ÷ norm")


def _attention(axes: Any, part: Mapping[str, Any]) -> None:
    key = "forward_backward_of_flash_throughput"
    groups = {name: _values(case, key) for name, case in part.items() if isinstance(case, Mapping)}
    _grouped(axes, groups, title="Attention, forward and backward", unit="throughput ÷ that of flash attention")
    axes.axhline(1, color="black", linewidth=0.8)


def _step(axes: Any, part: Mapping[str, Any]) -> None:
    groups = {
        weights: {name: part[weights][f"{name}_tokens_per_s"] for name in ("packed", "fixed_size")}
        for weights in ("lora", "full")
        if "packed_tokens_per_s" in part[weights]
    }
    _grouped(axes, groups, title="Training step", unit="tokens per second")


def _reading(axes: Any, part: Mapping[str, Any]) -> None:
    groups = {name: values for name, values in part.items() if isinstance(values, Mapping)}
    _grouped(axes, groups, title="LoRA step by when it is read", unit="seconds")


def _strategies(axes: Any, part: Mapping[str, Any]) -> None:
    speeds = _values(part, "real_tokens_per_s")
    _grouped(axes, {"one mixed set": speeds}, title="Epoch of a mixed set, LoRA", unit="real tokens per second")


def _planner(axes: Any, part: Mapping[str, Any]) -> None:
    groups = {
        name: {"planned": case["planned_gib"], "measured": case["measured_gib"]}
        for name, case in part.items()
        if isinstance(case, Mapping) and "measured_gib" in case
    }
    _grouped(axes, groups, title="Peak memory", unit="GiB")
    axes.tick_params(axis="x", rotation=60)


def _quantization(axes: Any, part: Mapping[str, Any]) -> None:
    named = {"peak, GiB": _values(part, "peak_gib"), "step, s": _values(part, "step_s")}
    groups = {name: values for name, values in named.items() if values}
    _grouped(axes, groups, title="LoRA on a quantised base", unit="GiB, seconds")


PANELS = {
    "parity": _parity,
    "attention": _attention,
    "step": _step,
    "reading": _reading,
    "strategies": _strategies,
    "planner": _planner,
    "quantization": _quantization,
}
