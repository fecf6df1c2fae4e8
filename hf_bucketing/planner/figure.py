"""Chart of a table of options: a bar for each, by kind of memory, and a line at the memory of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..report.charts import Chart, bar_chart
from .options import MEMORY_KINDS, MemoryOption


def options_chart(rows: Sequence[MemoryOption], *, gpu_memory: float) -> Chart:
    """Chart the highest memory of a step with each option; bars beyond three times the GPU's memory are cut.

    Args:
        rows (sequence of [`MemoryOption`][hf_bucketing.planner.options.MemoryOption]): Rows of the table.
        gpu_memory (`float`): GiB of the GPU, where a line is drawn.
    """
    bars = []
    for place, row in enumerate(rows):
        peak = asdict(row.plan.peak)
        name = f"+ {row.name}" if place else row.name
        bars.append((name, [peak[kind] / 2**30 for kind in MEMORY_KINDS], f"{row.plan.total / 2**30:.1f}"))
    return bar_chart(
        bars,
        title="Memory of a training step",
        x_label="GiB per process at the highest moment of a step",
        parts=[*MEMORY_KINDS.values()],
        limit=(gpu_memory, f"{gpu_memory:g} GiB"),
    )
