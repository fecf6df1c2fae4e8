"""Suggested runs as text, as a page, and as config files that prepare, cache and train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..batching.ways import WAYS
from ..columns.settings import SourceConfig
from ..columns.source_lists import settings_of_sources
from ..command_line.config_file import CACHED_DIR, CONFIG_FILE, SOURCES, write_config
from ..files import complete_file
from ..planner.memory import PLAN_ERROR, verdict_on
from ..planner.rows import DataRows
from ..planner.settings import MachineConfig
from ..planner.suggestion import MOST_DROPPED, Candidate, Suggestion
from ..report.charts import Chart, bar_chart
from ..report.page import Charts, Page, Paragraphs, Section, Table, Verdict
from ..report.text import align
from ..settings import changed_settings
from ..units import format_bytes, format_seconds
from .script_settings import launcher

FILES = 3
"""Candidates that are written."""

OBJECTIVE = (
    "The objective is the least time per kept pixel among runs that fit and drop at most "
    f"{MOST_DROPPED}% of the rows more than the best of them. It does not count how many pixels are kept: "
    "a run of fewer may be first, as small samples take less time per pixel."
)

_HELD_OUT, _LEAST_ROWS = 0.05, 40
"""Share of the rows whose loss is computed while training, and the rows from which on some are held out."""

_CHECKPOINTS = 10
"""Checkpoints over the whole run, of which the last ones are kept."""

_STREAMED_STEPS = 1000


def write_suggestion(
    suggestion: Suggestion,
    folder: Path,
    *,
    model: str,
    data: Sequence[SourceConfig] | str,
    machine: MachineConfig,
    rows: DataRows,
) -> list[Path]:
    """Write a config.yaml of each of the best candidates, in folders 1, 2 and 3.

    Args:
        suggestion ([`Suggestion`][hf_bucketing.planner.suggestion.Suggestion]): The runs.
        folder (`Path`): Folder to write into.
        model (`str`): Diffusers pipeline.
        data (sequence of [`SourceConfig`] or `str`): Sources to prepare, or a prepared folder.
        machine ([`MachineConfig`]): The machine.
        rows ([`DataRows`]): What is known of the rows.

    Returns:
        `list` of `Path`: The files.
    """
    files = []
    for rank, candidate in enumerate(suggestion.candidates[:FILES], start=1):
        place = folder / str(rank)
        settings = _settings_of(candidate, place, model=model, data=data, machine=machine, rows=rows)
        commands = _commands(candidate, place / CONFIG_FILE, prepared=isinstance(data, str), streaming=not rows.total)
        place.mkdir(parents=True, exist_ok=True)
        with complete_file(place / CONFIG_FILE) as partial:
            partial.write_text(
                write_config(settings, comment="\n".join([candidate.name, *commands])), encoding="utf-8"
            )
        files.append(place / CONFIG_FILE)
    return files


def _settings_of(
    candidate: Candidate,
    folder: Path,
    *,
    model: str,
    data: Sequence[SourceConfig] | str,
    machine: MachineConfig,
    rows: DataRows,
) -> dict[str, Any]:
    table = candidate.way.settings
    values: dict[str, Any] = {"pretrained_model_name_or_path": model}
    values |= {"dataset_dir": data if isinstance(data, str) else str(folder / "prepared")}
    if not isinstance(data, str) and table is not None:
        values[SOURCES] = settings_of_sources([replace(source, table=table) for source in data])
    if candidate.once is not None:
        values |= {"cache_dir": str(folder / "cache"), CACHED_DIR: str(folder / "cached")}
    return {**values, "output_dir": str(folder / "trained"), **run_settings(candidate, machine=machine, rows=rows)}


def run_settings(candidate: Candidate, *, machine: MachineConfig, rows: DataRows) -> dict[str, Any]:
    """Return the settings of training a candidate, whatever its model, data and folders are called.

    Args:
        candidate ([`Candidate`][hf_bucketing.planner.suggestion.Candidate]): The run.
        machine ([`MachineConfig`]): The machine.
        rows ([`DataRows`]): What is known of the rows.
    """
    values = changed_settings(candidate.config.run)
    values |= {"dataloader_num_workers": candidate.num_workers}
    steps = _STREAMED_STEPS
    if rows.total is None:
        values |= {"streaming": True, "max_train_steps": steps}
    else:
        steps = candidate.time.steps * machine.num_train_epochs
        values |= {"num_train_epochs": machine.num_train_epochs}
        values |= {"validation_split": _HELD_OUT} if rows.total >= _LEAST_ROWS else {}
    values |= {"checkpointing_steps": max(1, steps // _CHECKPOINTS)}
    return {**values, "checkpoints_total_limit": machine.checkpoints_total_limit}


def _commands(candidate: Candidate, file: Path, *, prepared: bool, streaming: bool) -> list[str]:
    """Return the commands that run a candidate by its file."""
    launch = launcher(candidate.config.launch)
    commands = [f"{launch} train --config {file}"]
    if candidate.once is not None:
        commands.insert(0, f"{launch} cache --config {file}")
    if not prepared:
        commands.insert(0, f"hf_bucketing prepare --config {file}" + " --streaming" * streaming)
    return commands


def describe_suggestion(suggestion: Suggestion, *, machine: MachineConfig, price_per_hour: float | None) -> str:
    """Return the ranked runs with what speaks against each, a table of them, and more about the first."""
    text = []
    for rank, candidate in enumerate(suggestion.candidates, start=1):
        reason = suggestion.reason_against(candidate)
        text.append(f"{rank}: {candidate.name}" + f"; {reason}" * bool(reason))
    rows = [candidate_cells(candidate, machine, price_per_hour) for candidate in suggestion.candidates]
    cells = [("", *rows[0]), *((str(rank), *row.values()) for rank, row in enumerate(rows, start=1))]
    text += ["", align(cells), ""]
    text += [f"Not possible: {way.name}: {way.reason.rstrip('.')}." for way in suggestion.refused]
    return "\n".join([*text, "", *describe_best(suggestion, machine)])


def candidate_cells(candidate: Candidate, machine: MachineConfig, price_per_hour: float | None) -> dict[str, str]:
    """Return what a run needs and takes, by the title of its column in a table of runs."""
    time, total = candidate.time, candidate.memory.total
    verdict = verdict_on(total, machine.gpu_memory * 2**30)
    row = {
        f"in {machine.gpu_memory:g} GiB": f"{format_bytes(total)}, {verdict}",
        "machine": format_bytes(candidate.host.total),
        "pixels kept": f"{candidate.kept:.1%}",
        "fill": f"{candidate.fill:.0%}",
        "rows dropped": ", ".join(f"{count:,} {reason}" for reason, count in candidate.dropped.items()) or "none",
        "steps per epoch": f"{time.steps:,}",
        "epoch": f"{format_seconds(time.seconds)} ({format_seconds(time.least)} to {format_seconds(time.most)})",
        "P5 to P95 of steps": f"{format_seconds(time.p5)} to {format_seconds(time.p95)}",
    }
    if price_per_hour is not None:
        row["price of an epoch"] = f"{time.price(price_per_hour, num_gpus=machine.num_gpus):,.2f}"
    return row


def describe_best(suggestion: Suggestion, machine: MachineConfig) -> list[str]:
    """Return sentences on how the first run was chosen, what it needs beside its GPUs, and how it reads its data."""
    best = suggestion.candidates[0]
    lines = [
        OBJECTIVE,
        f"Times: {suggestion.source}. Memory: runs may take {PLAN_ERROR:.0%} more than planned.",
        f"Of 1, the machine's memory: {best.host}.",
        f"Of 1, on disk: {best.disk}.",
    ]
    if best.once is not None:
        epochs = machine.num_train_epochs
        lines.append(
            f"Of 1, latents and texts are cached: encoding takes {format_seconds(best.once.seconds)} "
            f"({format_seconds(best.once.least)} to {format_seconds(best.once.most)}) once, and not in each of "
            f"{epochs} epochs. The cache holds one view of each sample, or more "
            f"with --views_per_sample of hf_bucketing cache, {WAYS[best.way.batching].more_cached_sizes}."
        )
    if best.workers is not None and best.once is not None:
        lines.append(f"Of 1, without the cache {best.workers:,} decoding processes per GPU would keep up with it.")
    elif best.workers is not None and best.workers > best.num_workers:
        lines.append(
            f"Of 1, decoding is slower than the GPU: {best.workers:,} processes per GPU would keep up, and "
            f"{best.num_workers} are started; cache latents."
        )
    elif best.workers is not None:
        lines.append(f"Of 1, {best.num_workers} decoding processes per GPU keep up with it.")
    return lines


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
