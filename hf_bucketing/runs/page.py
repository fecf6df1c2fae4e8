"""Runs as a page: losses, speed, samples, settings and resumes, from their logs alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np

from ..adapters.settings import ADAPTER_NAMES
from ..buckets.sizes import Size
from ..configuration.outputs import rendering_name
from ..errors import BucketingError, MediaError
from ..files import complete_file
from ..marks import NOT_CHECKED, mark
from ..media.source import MediaSource
from ..media.thumbnails import Thumbnail, animation
from ..report.charts import Line, bar_chart, heat_map, line_chart
from ..report.page import Block, Charts, Facts, Gallery, Page, Paragraphs, Picture, Section, Table, render_page
from ..report.text import percent, short_number, size_label
from .held_out import held_out_changes
from .logs import Logs, StepLog
from .review import (
    FEWEST_STEPS,
    MIN_FALL,
    describe_end,
    duration,
    loss_charts,
    losses_by_bucket,
    review_experts,
    review_run,
    review_sources,
    running_mean,
    summarise_losses,
)
from .run_log import log_path, read_log

PAGE = "run.html"
"""File in the output folder of a run that shows it while it trains."""
_REFRESHED_AFTER = 60
"""Seconds after which a browser reads the page of a run that trains anew."""
_GALLERY_STEPS = 8
"""Renderings of a prompt that are shown side by side: the first, the last, and some between."""
_MOST_BARS = 20
"""Buckets whose losses are drawn."""
_MOST_PICTURES = 48
"""Renderings of a run that are shown."""
_LONGEST_SIDE = 160
"""Longest side of a rendering on a page in pixels."""
_MOST_BYTES = 2_500_000
"""Bytes of all renderings on a page, as text."""
_TRAINED = {"model": "pretrained_model_name_or_path", "data": "dataset_dir"}
"""Settings that a page begins with, by their titles."""
_READING = (
    "The first and last tenth of a run's steps. Kept area: of the frames of all rows, what is inside their buckets; "
    "in packs, at their own sizes in whole tokens."
)
_NOISE = "loss_by_noise/"
_TFLOPS = {"useful": ("model_tflops", "mfu"), "hardware": ("hardware_tflops", "hfu")}
"""Columns of TFLOP/s, each with that of its share of the peak, by their titles."""
_RENDERING = re.compile(r".*/step-\d+/\d+x\d+x\d+-[^/]+\.(mp4|png)")
"""Path of a rendering of a run, beside which people may keep files of their own."""


def write_live_page(folder: Path) -> None:
    """Write the page of a run that trains into its output folder, if it has made a step; see [`run_page`]."""
    if read_log(folder, "losses", last=1):
        with complete_file(folder / PAGE) as partial:
            partial.write_text(render_page(run_page([folder], live=True)), encoding="utf-8")


def run_page(folders: Sequence[Path], *, min_fall: float = MIN_FALL, live: bool = False) -> Page:
    """Lay out the logs of runs as a page.

    Args:
        folders (sequence of `Path`): Output folders of runs.
        min_fall (`float`): Smallest fall of the loss that passes, as a share of the first loss; below 0, how far it
            may rise.
        live (`bool`): Whether the page refreshes itself while a run trains. It then omits what needs the log of every
            sample, which takes long to read: checks, and losses by bucket and by source.

    Raises:
        BucketingError: If a run left no log, or one without samples and seconds of its steps.
    """
    same_names = len({folder.name for folder in folders}) < len(folders)
    runs = [Logs(folder, str(folder) if same_names else folder.name) for folder in folders]
    sections = [
        Section(name="overview", title="Overview", blocks=_overview(runs, None if live else min_fall)),
        Section(name="loss", title="Loss", blocks=[Charts(charts=loss_charts(runs))]),
        Section(name="noise", title="Loss by noise level", blocks=[_noise(runs)]),
        Section(name="buckets", title="Loss by bucket", blocks=[] if live else _buckets(runs)),
        Section(name="learned", title="What was learned, by size and noise level", blocks=_learned(runs)),
        Section(name="speed", title="Speed, fill and balance", blocks=[_speed(runs)]),
        Section(name="experts", title="Experts", blocks=_lines(runs, review_experts)),
        Section(name="sources", title="Sources", blocks=[] if live else _lines(runs, review_sources)),
        Section(name="samples", title="Samples", blocks=_samples(runs)),
        Section(name="settings", title="Settings", blocks=_settings(runs)),
        Section(name="resumes", title="Resumes", blocks=_resumes(runs)),
    ]
    trains = live and any(run.status.get("status") == "running" for run in runs)
    return Page(
        title="Training report",
        subtitle=f"Runs: {', '.join(run.name for run in runs)}",
        sections=sections,
        head=[Facts(facts=_heading(run), title=run.name if len(runs) > 1 else "") for run in runs],
        refresh=_REFRESHED_AFTER if trains else None,
    )


def _heading(run: Logs) -> list[tuple[str, str]]:
    """Return what a run trained, on what, when, and how far it came."""
    settings, status = run.settings, run.status
    rank, kind = settings.get("lora_rank"), ADAPTER_NAMES.get(settings.get("adapter", ""), "LoRA")
    time, planned = status.get("time"), status.get("max_train_steps")
    date = f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M} UTC" if time else "not logged"
    paths = {title: settings.get(name) for title, name in _TRAINED.items()}
    return [
        *((title, path if path else "not logged") for title, path in paths.items()),
        ("adapter", "none" if rank is None else f"{kind} of rank {rank}"),
        ("begun or resumed" if status.get("status") == "running" else "ended", date),
        ("optimizer steps", f"{len(run.losses):,}" + (f" of {planned:,}" if planned else "")),
        ("state", describe_end(status)),
        *(("attention", said) for said in status.get("attention", ())),
    ]


def _overview(runs: Sequence[Logs], min_fall: float | None) -> list[Block]:
    """Show what each run came to, and unless `min_fall` is None the checks of its log of every sample."""
    checks = [] if min_fall is None else [(run.name, *check) for run in runs for check in _checks(run, min_fall)]
    columns = [_figures_of(run) for run in runs]
    ends = [line for run in runs for line in run.losses[-1:]]
    counted = {title: names for title, names in _TFLOPS.items() if any(names[0] in line for line in ends)}
    for title, names in counted.items():
        for run, figures in zip(runs, columns, strict=True):
            figures[f"{title} TFLOP/s per process, median"] = _tflops(run, *names)
    rows = [(title, *(figures[title] for figures in columns)) for title in columns[0]]
    rows = [row for row in rows if {*row[1:]} != {"–"}]
    texts = [] if min_fall is None else [text for run in runs if (text := _not_finite(run))]
    return [
        *([Paragraphs(texts=texts, warning=True)] if texts else []),
        Table(title="Runs", head=("", *(run.name for run in runs)), rows=rows, note=_READING),
        *(
            [Table(title="Checks", head=("run", "result", "what was checked"), rows=checks, texts=(1, 2))]
            if checks
            else []
        ),
    ]


def _figures_of(run: Logs) -> dict[str, str]:
    """Return what a run came to, by the titles of the figures."""
    enough = len(run.steps.loss) >= FEWEST_STEPS
    first, last = summarise_losses(run.steps.loss.tolist()) if enough else (math.nan, math.nan)
    held_out = [float(entry["validation_loss"]) for entry in run.held_out]
    kept = run.plans[-1].get("kept_area") if log_path(run.folder, "plans").is_file() and run.plans else None
    return {
        "batching": str(run.settings.get("batching", "–")),
        "processes": f"{run.num_processes:,}",
        "steps": f"{len(run.steps.loss):,}",
        "samples": f"{int(run.steps.samples.sum()):,}",
        "time": duration(float(run.steps.seconds.sum())),
        "loss, first tenth": _number(first),
        "loss, last tenth": _number(last),
        "held-out loss, last": _number(held_out[-1] if held_out else math.nan),
        "held-out loss, lowest": _number(min(held_out) if held_out else math.nan),
        "tokens per second, median": short_number(float(np.median(run.column("tokens_per_second")))),
        "kept area, mean": percent(math.nan if kept is None else kept),
    }


def _not_finite(run: Logs) -> str:
    """Return a warning about losses of samples that are not finite, which end a run before it logs their step."""
    lines = [line for line in run.batches if not np.isfinite(line["loss"]).all()]
    if not lines:
        return ""
    count = sum(np.count_nonzero(~np.isfinite(line["loss"])) for line in lines)
    first = min(lines, key=lambda line: (line["epoch"], line["step"]))
    at = f"epoch {first['epoch']}, step {first['step']:,}"
    return f"The loss of {run.name} is not finite for {count:,} samples, first in {at}."


def _checks(run: Logs, min_fall: float) -> Iterator[tuple[str, str]]:
    try:
        review = review_run(run, min_fall=min_fall)
    except BucketingError as error:  # a run that has made no step, or of an earlier release
        yield NOT_CHECKED, str(error)
        return
    yield from ((mark(check.holds), check.statement) for check in review.checks)


def _noise(runs: Sequence[Logs]) -> Charts:
    charts = []
    for run in runs:
        names = sorted({name for line in run.losses for name in line if name.startswith(_NOISE)})
        levels = np.array([float(name.removeprefix(_NOISE)) + 0.05 for name in names])
        half = len(run.losses) // 2
        lines = []
        for colour, (title, part) in {3: ("first half", slice(half)), 4: ("second half", slice(half, None))}.items():
            columns = [run.column(name)[part] for name in names]
            means = [np.nan if np.isnan(column).all() else float(np.nanmean(column)) for column in columns]
            lines.append(Line(f"trained on, {title}", levels, np.array(means), colour))
        if run.held_out:
            last = run.held_out[-1]["by_noise"]
            x, y = (np.array([level[name] for level in last]) for name in ("noise_level", "loss"))
            lines.append(Line("held out, last", x, y, 5, "dots"))
        charts.append(
            line_chart(
                lines,
                title=run.name,
                alt=f"Mean loss of {run.name} by noise level.",
                x_label="noise level, 0 clean, 1 only noise",
                y_label="loss",
                note="Means over steps; each point covers a tenth of the noise levels.",
            )
        )
    return Charts(charts=charts)


def _buckets(runs: Sequence[Logs]) -> list[Block]:
    blocks: list[Block] = []
    for colour, run in enumerate(runs):
        last = run.held_out[-1]["by_bucket"] if run.held_out else []
        held_out = {bucket["bucket_id"]: bucket for bucket in last}
        trained = losses_by_bucket(run)
        fullest = sorted(trained, key=lambda bucket: -trained[bucket][0])
        names = {bucket: f"bucket {bucket}" for bucket in trained}
        names |= {bucket: size_label(Size(*entry["size"])) for bucket, entry in held_out.items()}
        names |= {bucket: size_label(size) for bucket, size in enumerate(run.sizes)}
        title = f"{run.name}: loss by bucket"
        if trained:
            losses = [(names[bucket], trained[bucket][1]) for bucket in fullest[:_MOST_BARS]]
            chart = bar_chart(
                [(name, (loss,), _number(loss)) for name, loss in losses],
                title=title,
                x_label="mean loss in the second half",
                note="The buckets of most samples come first; a bucket is frames×height×width, or height×width for "
                "images.",
                colours=[colour] * len(losses),
            )
            blocks.append(Charts(charts=[chart]))
        else:
            blocks.append(Paragraphs(texts=[f"{run.name}: packs, whose samples have no bucket."]))
        rows = []
        for bucket in [*fullest, *(set(held_out) - set(trained))]:
            count, loss = trained.get(bucket, (0, math.nan))
            apart = held_out.get(bucket, {"samples": 0, "loss": math.nan})
            numbers = (f"{count:,}", _number(loss), f"{apart['samples']:,}", _number(apart["loss"]))
            rows.append((names[bucket], f"{bucket}", *numbers))
        head = ("bucket", "id", "samples, second half", "mean loss", "samples held out", "held-out loss, last")
        if rows:
            long = len(rows) > _MOST_BARS
            blocks.append(Table(title=f"{title} in numbers", head=head, rows=rows, folded=long))
    return blocks


def _learned(runs: Sequence[Logs]) -> list[Block]:
    """Show the change of the held-out loss of each run since its first, by size, source, condition and noise level."""
    charts = []
    for run in runs:
        parts = held_out_changes(run)
        if parts is None:
            continue
        first, last = (run.held_out[place]["global_step"] for place in (0, -1))
        largest = sorted(parts.rows, key=lambda row: -row.samples)[:_MOST_BARS]
        rows = [row for row in parts.rows if row in largest]
        charts.append(
            heat_map(
                np.array([row.changes for row in rows]),
                rows=[row.name for row in rows],
                columns=[f"{level:.2f}" for level in parts.noise_levels],
                title=f"{run.name}: held-out loss of step {last:,} against step {first:,}",
                x_label="noise level, 0 clean, 1 only noise",
                alt=f"Change of the held-out loss of {run.name} by size and noise level.",
                note="A row that did not fall is a size, or a source, that is not learned; a column, noise levels "
                "that training draws too rarely (shift).",
            )
        )
    return [Charts(charts=charts)] if charts else []


def _speed(runs: Sequence[Logs]) -> Charts:
    panels = (
        ("Tokens per second", "tokens_per_second", "tokens per second", "All processes together."),
        (
            "Useful TFLOP/s per process",
            "model_tflops",
            "TFLOP/s",
            "Forward and backward pass of the samples, without recomputation and padding.",
        ),
        (
            "Hardware TFLOP/s per process",
            "hardware_tflops",
            "TFLOP/s",
            "All that is computed: checkpointed blocks again, scores of attention again, padding.",
        ),
        ("Fill", "fill", "tokens ÷ max_tokens", "1 is full; of runs whose batches have a limit of tokens."),
        ("Imbalance", "imbalance", "largest ÷ mean cost", "1: no process waits for another."),
    )
    charts = []
    for title, column, label, note in panels:
        lines = []
        for colour, run in enumerate(runs):
            values = run.column(column)
            if np.isfinite(values).any():
                x, ones = np.arange(1.0, len(values) + 1), np.ones(len(values))
                mean = running_mean(StepLog(values, ones.astype(np.int64), ones), window=max(1, len(values) // 20))
                median = f"{run.name} (median {short_number(float(np.nanmedian(values)))})"
                lines += [Line("", x, values, colour, "faint"), Line(median, x, mean, colour)]
        if lines:
            charts.append(
                line_chart(
                    lines,
                    title=title,
                    alt=f"{title} over the optimizer steps.",
                    x_label="optimizer steps",
                    y_label=label,
                    note=f"{note} Thick: mean over a twentieth of the steps.",
                )
            )
    return Charts(charts=charts)


def _lines(runs: Sequence[Logs], review: Callable[[Logs], list[str]]) -> list[Block]:
    lines = [line for run in runs for line in review(run)]
    return [Paragraphs(texts=lines)] if lines else []


def _samples(runs: Sequence[Logs]) -> list[Block]:
    """Show the renderings of each run as a strip per prompt, step by step, as long as the page stays small."""
    blocks: list[Block] = []
    left = _MOST_BYTES
    for run in runs:
        files = sorted(
            filter(lambda file: _RENDERING.fullmatch(file.as_posix()), (run.folder / "validation").glob("step-*/*.*")),
            key=lambda file: (file.stem, _step_of(file)),
        )
        count, beyond, faults = 0, 0, []
        prompts = len({file.stem for file in files})
        steps = min(_GALLERY_STEPS, max(2, _MOST_PICTURES // max(1, prompts)))
        for stem, same in groupby(files, key=lambda file: file.stem):
            every = list(same)
            size, prompt, references = _prompt_of(run, stem)
            pictures: list[Picture] = []
            for number, file in enumerate(references, 1):
                if count < _MOST_PICTURES and left > 0 and Path(file).is_file():
                    pictures.append(_picture(Path(file), f"Reference of “{prompt}”.", f"reference {number}"))
                    count, left = count + 1, left - len(pictures[-1].source)
            for at in sorted({round(at) for at in np.linspace(0, len(every) - 1, min(len(every), steps))}):
                if count == _MOST_PICTURES or left <= 0:
                    beyond += 1
                    continue
                try:
                    step = _step_of(every[at])
                    pictures.append(
                        _picture(every[at], f"Rendering of “{prompt}” after step {step}.", f"step {step:,}")
                    )
                except MediaError as error:
                    faults.append(f"{every[at]} could not be shown: {error}")
                    continue
                count, left = count + 1, left - len(pictures[-1].source)
            if pictures:
                blocks.append(Gallery(title=f"{run.name}, {size}: {prompt}", pictures=pictures, strip=True))
        if faults:
            blocks.append(Paragraphs(texts=faults, warning=True))
        if beyond:
            blocks.append(Paragraphs(texts=[f"{beyond:,} more renderings lie in {run.folder / 'validation'}."]))
    return blocks


def _step_of(file: Path) -> int:
    return int(file.parent.name.removeprefix("step-"))


def _prompt_of(run: Logs, stem: str) -> tuple[str, str, Sequence[str]]:
    """Return the size, the prompt and the references of a rendering by its file's name.

    Where no prompt has this name, its words stand for one, without references.
    """
    size, _, words = stem.partition("-")
    prompts = run.settings.get("validation_prompts") or []
    shape = Size(*map(int, size.split("x")))
    files = run.settings.get("validation_references") or []
    per_prompt = len(files) // max(1, len(prompts))
    named = {
        rendering_name(prompts, number, shape): (prompt, files[per_prompt * number : per_prompt * (number + 1)])
        for number, prompt in enumerate(prompts)
    }
    return size_label(shape), *named.get(stem, (words.replace("-", " "), []))


@lru_cache(maxsize=2 * _MOST_PICTURES)
def _small(file: Path, changed: int) -> Thumbnail:
    """Return a rendering as it is shown; `changed`, when its file was, tells versions of it apart."""
    return animation(MediaSource.from_cell(file), max_side=_LONGEST_SIDE)


def _picture(file: Path, alt: str, name: str) -> Picture:
    small = _small(file, file.stat().st_mtime_ns)
    return Picture(
        source=small.uri,
        width=small.width,
        height=small.height,
        alt=alt,
        name=name,
    )


def _settings(runs: Sequence[Logs]) -> list[Block]:
    names = [*dict.fromkeys(name for run in runs for name in run.settings)]
    if not names:
        return []
    table = {name: [_setting(run.settings.get(name)) for run in runs] for name in names}
    head, texts = ("setting", *(run.name for run in runs)), range(1, len(runs) + 1)
    different = [(name, *values) for name, values in table.items() if len(set(values)) > 1]
    blocks: list[Block] = []
    if different:
        blocks.append(Table(title="Settings that differ", head=head, rows=different, texts=texts))
    rows = [(name, *values) for name, values in table.items()]
    blocks.append(Table(title="All settings", head=head, rows=rows, texts=texts, folded=True))
    return blocks


def _setting(value: object) -> str:
    return "not given" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _resumes(runs: Sequence[Logs]) -> list[Block]:
    rows = []
    for run in runs:
        for line in run.resumes:
            changes = ", ".join(line["changes"]) or "none"
            numbers = (f"{line['global_step']:,}", f"{line['epoch']}", f"{line['num_processes']}")
            rows.append((run.name, *numbers, changes))
    if not rows:
        return []
    head = ("run", "after step", "in epoch", "processes", "settings that changed")
    return [Table(title="Resumes", head=head, rows=rows, texts=(4,))]


def _tflops(run: Logs, name: str, of_peak: str) -> str:
    """Return the median of a column of TFLOP/s, with its share of the peak where that is known."""
    rates, shares = run.column(name), run.column(of_peak)
    if np.isnan(rates).all():
        return "–"
    share = "" if np.isnan(shares).all() else f" ({np.nanmedian(shares):.0%} of the peak)"
    return f"{short_number(float(np.nanmedian(rates)))}{share}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
