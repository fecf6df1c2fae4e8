"""Chart of a table of options: a bar for each, by kind of memory, and a line at the memory of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..report.charts import Chart, bar_chart
from .options import MemoryOption, titles_of


def options_chart(rows: Sequence[MemoryOption], *, gpu_memory: float) -> Chart:
    """Chart the highest memory of a step with each option; bars beyond three times the GPU's memory are cut.

    Args:
        rows (sequence of [`MemoryOption`][hf_bucketing.planner.options.MemoryOption]): Rows of the table.
        gpu_memory (`float`): GiB of the GPU, where a line is drawn.
    """
    peaks = [asdict(row.plan.peak) for row in rows]
    bars: list[tuple[str, list[float], str]] = []
    for row, peak in zip(rows, peaks, strict=True):
        name = f"+ {row.name}" if bars else row.name
        bars.append((name, [count / 2**30 for count in peak.values()], f"{row.plan.total / 2**30:.1f}"))
    return bar_chart(
        bars,
        title="Memory of a training step",
        x_label="GiB per process at the highest moment of a step",
        parts=[*titles_of(peaks[0]).values()],
        limit=(gpu_memory, f"{gpu_memory:g} GiB"),
    )
