"""Draw what scripts/benchmarks/benchmark_gpu.py measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hf_bucketing.files import complete_file

Groups = dict[str, dict[str, float]]


class Panel(NamedTuple):
    """What is drawn of a part: bars in groups.

    Attributes:
        title: Title of the panel.
        unit: Unit of its axis.
        groups: Returns the values of each group by the names of its bars, out of the cases of the part.
    """

    title: str
    unit: str
    groups: Callable[[Mapping[str, Any]], Groups]


def draw_figure(described: Mapping[str, Any], parts: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per part that was measured, as a PNG; what a device could not run is absent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [(panel, groups) for name, panel in PANELS.items() if (groups := panel.groups(parts.get(name, {})))]
    columns = min(3, max(1, len(drawn)))
    rows = -(-len(drawn) // columns)
    figure = Figure(figsize=(6.5 * columns, 4.5 * max(1, rows)), layout="constrained")
    figure.suptitle(f"{described['device']}, torch {described['torch']}, {described['scale']} sizes")
    for place, (panel, groups) in enumerate(drawn, 1):
        _draw(figure.add_subplot(rows, columns, place), panel, groups)
    with complete_file(path) as partial:
        FigureCanvasAgg(figure).print_figure(str(partial), dpi=120, format="png")


def _draw(axes: Any, panel: Panel, groups: Groups) -> None:
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    width = 0.8 / len(series)
    for number, name in enumerate(series):
        places = [place + number * width for place, values in enumerate(groups.values()) if name in values]
        heights = [values[name] for values in groups.values() if name in values]
        bars = axes.bar(places, heights, width, label=name)
        axes.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=7)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], list(groups), rotation=20, fontsize=7)
    axes.set(title=panel.title, ylabel=panel.unit)
    axes.legend(fontsize=7)


def _nested(key: str) -> Callable[[Mapping[str, Any]], Groups]:
    """Return a function that takes one value of each series of each case."""
    return lambda cases: _without_empty(
        {
            case: {name: values[key] for name, values in nested.items() if isinstance(values, dict) and key in values}
            for case, nested in cases.items()
        }
    )


def _of_cases(*keys: str) -> Callable[[Mapping[str, Any]], Groups]:
    """Return a function that takes some values of each case."""
    return lambda cases: _without_empty(
        {case: {key: values[key] for key in keys if key in values} for case, values in cases.items()}
    )


def _all_numbers(cases: Mapping[str, Any]) -> Groups:
    return _without_empty(
        {
            case: {key: value for key, value in values.items() if isinstance(value, float)}
            for case, values in cases.items()
        }
    )


def _without_empty(groups: Groups) -> Groups:
    return {name: values for name, values in groups.items() if values}


_STEP = ("TFLOP/s", _of_cases("useful_tflops"))
_ERRORS = _of_cases("output_relative_error", "gradients_relative_error")
PANELS = {
    "attention": Panel("Attention, forward and backward", "TFLOP/s", _nested("forward_backward_tflops")),
    "steps": Panel("Step of LoRA, useful operations", *_STEP),
    "compiled_steps": Panel("The same, compiled", *_STEP),
    "wide_steps": Panel("Step of all weights at a larger width", *_STEP),
    "compiled_wide_steps": Panel("The same, compiled", *_STEP),
    "memory": Panel("Peak memory", "GiB", _of_cases("planned_gib", "measured_gib")),
    "quantization": Panel("LoRA on a quantised base", "GiB, seconds", _of_cases("peak_gib", "s")),
    "offload": Panel("LoRA with blocks on the CPU", "GiB, seconds", _of_cases("peak_gib", "s")),
    "reading": Panel("LoRA step by when it is read", "seconds", _all_numbers),
    "strategies": Panel("Epoch of a mixed set, LoRA", "real tokens per second", _of_cases("real_tokens_per_s")),
    "parity": Panel("Errors of bf16 against float32", "norm of errors ÷ norm", _ERRORS),
}
