"""Figure of a table of options: a bar for each, by kind of memory, and a line at the memory of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ..files import complete_file
from .options import MemoryOption

# Okabe and Ito's colours, distinguishable with any colour vision.
_COLORS = {
    "weights": "#0072B2",
    "text_encoder": "#CC79A7",
    "vae": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer": "#E69F00",
    "averages": "#F0E442",
    "context": "#666666",
    "activations": "#009E73",
}


def draw_options(rows: Sequence[MemoryOption], path: Path, *, gpu_memory: float) -> None:
    """Draw the highest memory of a step with each option; bars beyond three times the GPU's memory are cut.

    Args:
        rows (sequence of [`MemoryOption`][hf_bucketing.planner.options.MemoryOption]): Rows of the table.
        path (`Path`): PNG file to write.
        gpu_memory (`float`): GiB of the GPU, where a line is drawn.
    """
    from matplotlib.figure import Figure

    peaks = [asdict(row.plan.peak) for row in rows]
    totals = [row.plan.total / 2**30 for row in rows]
    longest = min(max(*totals, gpu_memory), 3 * gpu_memory)
    places, start = np.arange(len(rows)), np.zeros(len(rows))
    figure = Figure(figsize=(9, 1.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for kind, color in _COLORS.items():
        sizes = np.array([peak[kind] / 2**30 for peak in peaks])
        if sizes.any():
            axes.barh(places, sizes, left=start, color=color, label=kind.replace("_", " ").replace("vae", "VAE"))
        start += sizes
    for place, total in enumerate(totals):
        label = axes.text(min(total, longest) + 0.01 * longest, place, f"{total:.1f}", va="center", fontsize=8)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    axes.axvline(gpu_memory, color="black", linewidth=1, linestyle="--")
    axes.text(gpu_memory, -0.75, f"{gpu_memory:g} GiB", ha="center", fontsize=8)
    axes.set_yticks(places, [row.name if not place else f"+ {row.name}" for place, row in enumerate(rows)], fontsize=8)
    axes.set(xlabel="GiB per process at the highest moment of a step", xlim=(0, 1.1 * longest))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_COLORS), fontsize=8)
    with complete_file(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
