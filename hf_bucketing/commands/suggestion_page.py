"""Suggested runs as a page: what each needs and takes, what speaks against it, and which ways are not possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ..planner.rows import DataRows
from ..planner.settings import MachineConfig
from ..planner.suggestion import Candidate, Suggestion
from ..report.charts import Chart, bar_chart
from ..report.page import Charts, Page, Paragraphs, Section, Table, Verdict
from ..units import format_bytes, format_seconds
from .suggested import OBJECTIVE, candidate_cells, describe_best


def suggestion_page(
    suggestion: Suggestion, rows: DataRows, *, name: str, machine: MachineConfig, price_per_hour: float | None = None
) -> Page:
    """Lay out suggested runs as a page.

    Args:
        suggestion ([`Suggestion`][hf_bucketing.planner.suggestion.Suggestion]): The runs.
        rows ([`DataRows`]): What is known of the rows.
        name (`str`): What is trained, and on what.
        machine ([`MachineConfig`]): The machine.
        price_per_hour (`float`, *optional*): Price of a GPU.
    """
    runs, best = suggestion.candidates, suggestion.candidates[0]
    verdict = (
        f"Train with {best.name}: an epoch takes {format_seconds(best.time.seconds)} and keeps {best.kept:.1%} of the "
        f"pixels, in {format_bytes(best.memory.total)} of {machine.gpu_memory:g} GiB."
    )
    cells = [candidate_cells(run, machine, price_per_hour) for run in runs]
    table = Table(
        title="Runs, the best first",
        head=["", "run", "what speaks against it", *cells[0]],
        rows=[
            [str(rank), run.name, suggestion.reason_against(run) or "nothing", *values.values()]
            for rank, (run, values) in enumerate(zip(runs, cells, strict=True), start=1)
        ],
        texts=range(1, 3 + len(cells[0])),
        note="The config files of the first ones are numbered so.",
    )
    refused = Table(
        title="Ways that are not possible",
        head=["way", "why"],
        rows=[[way.name, way.reason] for way in suggestion.refused],
        texts=[1],
    )
    sections = [
        Section(name="runs", title="Runs", blocks=[table, Charts(charts=_charts(suggestion, machine))]),
        Section(name="best", title="The first run", blocks=[Paragraphs(texts=describe_best(suggestion, machine)[1:])]),
        Section(
            name="data", title="What is known of the data", blocks=[Paragraphs(texts=rows.notes)] * bool(rows.notes)
        ),
        Section(name="refused", title="Not possible", blocks=[refused] * bool(suggestion.refused)),
    ]
    subtitle = f"{name}, on {machine.num_gpus} × {machine.gpu_memory:g} GiB."
    return Page(
        title="Suggested runs", subtitle=subtitle, sections=sections, head=[Verdict(text=verdict, rule=OBJECTIVE)]
    )


def _charts(suggestion: Suggestion, machine: MachineConfig) -> Sequence[Chart]:
    runs, best = suggestion.candidates, suggestion.candidates[0]
    names = [
        f"{rank}: {run.way.batching}, {run.config.run.batches.token_limit:,}" for rank, run in enumerate(runs, start=1)
    ]

    def interval(run: Candidate) -> str:
        return f"{format_seconds(run.time.least)} to {format_seconds(run.time.most)}"

    ratios = [run.seconds_per_pixel / best.seconds_per_pixel for run in runs]
    parts = [asdict(run.memory.peak) for run in runs]
    return [
        bar_chart(
            [(label, [ratio], f"{ratio:.2f}") for label, ratio in zip(names, ratios, strict=True)],
            title="Time per kept pixel",
            x_label="÷ that of the first run",
            note="The objective. Runs below that are shorter drop too many rows.",
        ),
        bar_chart(
            [(label, [run.time.seconds / 3600], interval(run)) for label, run in zip(names, runs, strict=True)],
            title="An epoch",
            x_label="hours",
            note="The interval is that of the utilisation of the GPU.",
        ),
        bar_chart(
            [
                (label, [count / 2**30 for count in kinds.values()], format_bytes(run.memory.total))
                for label, run, kinds in zip(names, runs, parts, strict=True)
            ],
            title="Memory of a GPU",
            x_label="GiB at the highest moment of a step",
            parts=[kind.replace("_", " ") for kind in parts[0]],
            limit=(machine.gpu_memory, f"{machine.gpu_memory:g} GiB"),
        ),
        bar_chart(
            [(label, [100 * run.kept], f"{run.kept:.1%}") for label, run in zip(names, runs, strict=True)],
            title="Pixels kept",
            x_label="% of those of all readable files",
        ),
    ]
