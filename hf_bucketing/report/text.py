"""Reports as text: about a table and its data, about assigned and rejected rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import column_values
from ..buckets.assignment import AssignmentRule, has_bucket
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..conditions.appended import RowAppended
from ..conditions.references import RowReferences
from .compare import Report
from .measure import (
    BucketReport,
    BucketUse,
    CostUnits,
    CutSamples,
    ReportConfig,
    SizeColumns,
    Spread,
    Targets,
    assigned_targets,
    bucket_targets,
    largest_areas,
    mean,
    read_sizes,
    samples_cut_short,
)
from .references import describe_appended, describe_references
from .rejections import explain_rejections
from .verdict import FIGURES_HEAD, RULE, Verdict, choose_way

Line = tuple[str, ...]

_COUNTED_ELSEWHERE = "Steps and the comparison count them; tokens and costs of buckets are those of samples alone."


NO_BUCKET = (
    "No row has a bucket, so that nothing can be trained in buckets of this table. Packs (--batching pack) take rows "
    "at their own sizes, if these could be read."
)

_NAMED_BUCKETS = 20
"""Most buckets without a sample that are named."""


def format_report(report: Report) -> str:
    """Return the report as text: its verdict, the data in the table, used buckets, any references, the strategies."""
    parts = [
        _verdict_lines(choose_way(report)),
        _summary(report.buckets),
        _bucket_lines(report.buckets, report.config),
        _strategy_lines(report),
    ]
    parts[3:3] = [fill(text, width=118) for text in describe_condition_costs(report)]
    return "\n\n".join(parts)


def _verdict_lines(verdict: Verdict) -> str:
    """Return a verdict, its figures if there are any, and how it is decided."""
    figures = [align([FIGURES_HEAD, *verdict.figures])] if verdict.figures else []
    return "\n".join([fill(str(verdict), width=118), *figures, fill(RULE, width=118)])


def describe_condition_costs(report: Report) -> list[str]:
    """Return what conditions cost in buckets, references and appended frames at length; nothing if there are none."""
    at_length = {RowReferences.name, RowAppended.name}
    shares = [f"{name} {share:.0%}" for name, share in report.condition_shares.items() if name not in at_length]
    said = [f"Conditions, of all tokens in buckets: {', '.join(shares)}."] if shares else []
    said += [] if report.references is None else [describe_references(report.references)]
    said += [] if report.appended is None else [describe_appended(report.appended)]
    return [f"{text} {_COUNTED_ELSEWHERE}" for text in said]


def size_label(size: Size) -> str:
    """Return `frames×height×width`, or `height×width` for one frame."""
    return "×".join(map(str, size if size.frames > 1 else size[1:]))


def percent(share: float) -> str:
    """Return a share as a percentage with one decimal, or a dash for NaN."""
    return "–" if math.isnan(share) else f"{share:.1%}"


def short_number(value: float) -> str:
    """Return a number with at least three significant digits, or a dash for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def align(lines: Sequence[Line]) -> str:
    """Align cells in columns, the first column to the left and the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = (
        (cell.rjust(width) if column else cell.ljust(width))
        for line in lines
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "\n".join("  ".join(next(aligned) for _ in widths).rstrip() for _ in lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def describe_cut_samples(cut: CutSamples, *, name: str) -> str:
    """Return how many samples lose more than half of their frames, and which one most, by its name."""
    lose = "1 sample loses" if cut.samples == 1 else f"{cut.samples:,} samples lose"
    return (
        f"{lose} more than half of the frames: {name} keeps {cut.kept:,} of {cut.frames:,}. --clips all of "
        "hf_bucketing prepare makes several samples of a long video."
    )


def describe_occurrences(report: BucketReport) -> str | None:
    """Return how many samples the rows make in an epoch, by their repeats and weights; None where each occurs once."""
    if report.samples_per_epoch == report.num_samples:
        return None
    return f"{report.samples_per_epoch:,} samples per epoch, by repeats and weights"


def _summary(report: BucketReport) -> str:
    def spread(values: Spread) -> Line:
        return tuple("–" if math.isnan(value) else f"{value:.4f}" for value in values)

    cut = report.cut_short
    errors = align([
        ("aspect error", "mean", "median", "max"),
        ("  |ln(aspect ratio ÷ bucket's)|", *spread(report.aspect_error)),
        ("  |aspect ratio − bucket's|", *spread(report.aspect_difference)),
    ])  # fmt: skip
    return "\n".join([
        f"{report.num_samples:,} samples: {report.num_samples - report.rejected:,} in {len(report.used)} of "
        f"{len(report.buckets)} buckets, {report.rejected:,} rejected",
        *([] if (often := describe_occurrences(report)) is None else [often]),
        f"rejected by reason: {_counts(report.rejections)}",
        errors,
        f"kept area {percent(report.kept_area)} (mean), enlarged {report.enlarged:,} samples",
        *([] if cut is None else [describe_cut_samples(cut, name=f"row {cut.row}")]),
    ])  # fmt: skip


def bucket_cells(buckets: Sequence[BucketUse], units: CostUnits) -> list[Line]:
    """Return a table of buckets, its titles first: size, id, width ÷ height, and what their samples become."""
    columns: dict[str, Callable[[BucketUse], str]] = {
        "bucket": lambda bucket: size_label(bucket.size),
        "id": lambda bucket: f"{bucket.bucket_id}",
        "width ÷ height": lambda bucket: f"{bucket.size.aspect_ratio:.3f}",
        "samples": lambda bucket: f"{bucket.num_samples:,}",
        "kept area": lambda bucket: percent(bucket.kept_area),
        "kept frames": lambda bucket: percent(bucket.kept_frames),
        "scale": lambda bucket: f"{bucket.scale:.3f}",
        "enlarged": lambda bucket: f"{bucket.enlarged:,}",
        "tokens": lambda bucket: f"{bucket.num_tokens:,}",
        units.sample: lambda bucket: short_number(bucket.cost * units.sample_factor),
        "batches": lambda bucket: f"{bucket.batches:,}",
        "short": lambda bucket: f"{bucket.short_batches:,}",
        "mixed": lambda bucket: f"{bucket.mixed_samples:,}",
        "dropped": lambda bucket: f"{bucket.dropped:,}",
    }
    return [(*columns,), *(tuple(write(bucket) for write in columns.values()) for bucket in buckets)]


def bucket_note(config: ReportConfig) -> str:
    """Return what the columns of [`bucket_cells`] mean."""
    units = config.units
    return (
        f"A bucket is named frames×height×width, or height×width for images. Scale is the mean factor of the sides; "
        f"tokens and {units.sample} ({units.counts}) are those of one sample. Batches are those of all processes, "
        f"short ones hold fewer than {config.batch_size} samples; mixed and dropped count samples."
    )


def _bucket_lines(report: BucketReport, config: ReportConfig) -> str:
    title = (
        f"Buckets by size, with batches of {config.batch_size} on {config.processes}: "
        f"{report.num_steps:,} steps, {report.mixed_steps:,} of them mixed"
    )
    lines = [title, align(bucket_cells(report.used, config.units)), fill(bucket_note(config), width=118)]
    empty = [
        f"{bucket.bucket_id}:\u00a0{size_label(bucket.size)}" for bucket in report.buckets if not bucket.num_samples
    ]
    if empty:
        more = f", and {len(empty) - _NAMED_BUCKETS:,} more (--json, --html)" if len(empty) > _NAMED_BUCKETS else ""
        text = f"{len(empty)} buckets without a sample: {', '.join(empty[:_NAMED_BUCKETS])}{more}"
        lines.append(fill(text, width=118, subsequent_indent="  ").replace("\u00a0", " "))
    return "\n".join(lines)


def _packed_sizes(report: Report) -> str:
    """Return at which sizes padding and packing take samples, as text that follows "take samples"."""
    limit = report.config.max_area
    if limit == "none":
        return "at their own sizes"
    if limit != "table":
        return f"at up to {limit:,} pixels per frame"
    areas = sorted({*largest_areas(bucket.size for bucket in report.buckets.buckets).values()})
    pixels = " to ".join(f"{area:,}" for area in dict.fromkeys((areas[0], areas[-1])))
    return f"at up to {pixels} pixels per frame (those of the largest bucket of as many frames)"


class Measure(NamedTuple):
    """What compares strategies: an attribute of [`StrategyReport`], its title, its unit, and how to read it."""

    name: str
    title: str
    unit: str
    note: str = ""

    def values(self, report: Report) -> list[float]:
        """Return the measure of each strategy in its unit, shares in per cent."""
        factor = 100.0 if self.unit.startswith("%") else 1.0
        if self.name == "epoch_cost":
            factor = report.config.units.epoch_factor
        return [factor * getattr(strategy, self.name) for strategy in report.strategies]

    def cells(self, report: Report) -> list[str]:
        """Return the measure of each strategy as text."""
        values = self.values(report)
        return [percent(value / 100) if self.unit.startswith("%") else short_number(value) for value in values]


def measures_of(report: Report) -> list[Measure]:
    """Return what compares the strategies of a report; some counts need no note."""
    units = report.config.units
    return [
        Measure("kept", "samples kept", "samples", "Of one epoch."),
        Measure("num_dropped", "samples dropped", "samples"),
        Measure("num_steps", "steps per epoch", "steps", "Of each process."),
        Measure("mixed_steps", "mixed steps", "steps"),
        Measure("tokens_per_sample", "tokens per sample, mean", "tokens", "Without padding."),
        Measure("token_use", "real ÷ computed tokens", "% of computed tokens", "The rest is padding."),
        Measure("kept_area", "kept area, mean", "% of the frame", "Inside the target after cover-resize and crop."),
        Measure("kept_frames", "kept frames, mean", "% of the frames"),
        Measure(
            "step_balance",
            "step-time balance",
            "% of the slowest process",
            "Mean over steps of mean ÷ largest cost over processes; the rest is waiting.",
        ),
        Measure(
            "epoch_cost",
            "epoch cost",
            units.epoch,
            f"Sum over steps of the largest cost over processes, {units.counts}.",
        ),
        Measure(
            "efficiency",
            "useful work",
            "% of all processes' time",
            "Cost of the samples alone, without padding and waiting, ÷ (epoch cost × processes).",
        ),
    ]


def strategy_cells(report: Report) -> list[Line]:
    """Return what compares the strategies, one measure after another: its title and a cell for each strategy."""
    lines = [("way", *(strategy.name for strategy in report.strategies))]
    for measure in measures_of(report):
        title = measure.title if measure.name != "epoch_cost" else f"{measure.title}, {measure.unit}"
        lines.append((title, *measure.cells(report)))
    return lines


def describe_strategies(report: Report) -> list[str]:
    """Return what padding, bucketing and packing are, with the limits of a report, and why they drop samples."""
    config = report.config
    max_tokens = next(strategy.max_tokens for strategy in report.strategies if strategy.max_tokens is not None)
    drawn = f"{config.batch_size} samples of any sizes and pads each to the largest"
    drawn = "1 sample of any size" if config.batch_size == 1 else drawn
    how = (
        f"Padding draws {drawn}; bucketing draws "
        f"{config.batch_size} of one bucket; packing joins samples up to {max_tokens:,} tokens. Padding and packing "
        f"take samples {_packed_sizes(report)}, bucketing at those of its buckets: an epoch costs less where it crops "
        "more. All numbers come from the plan of a real epoch."
    )
    return [how, *(f"{way.name} drops {_counts(way.dropped)}" for way in report.strategies if way.dropped)]


def _strategy_lines(report: Report) -> str:
    config = report.config
    return "\n".join([
        f"Strategies on {config.processes}, from the plan of one epoch",
        align(strategy_cells(report)),
        *(fill(text, 118) for text in describe_strategies(report)),
        *(f"{measure.title}: {measure.note}" for measure in measures_of(report) if measure.note),
    ])  # fmt: skip


def describe_assignment(
    columns: Mapping[str, npt.ArrayLike],
    *,
    table: BucketTable,
    spec: LatentSpec,
    rule: AssignmentRule,
    name_rows: Callable[[Sequence[int]], Sequence[str]],
    table_of_frames: Callable[[int], BucketTable] | None = None,
    others: Mapping[str, BucketTable] | None = None,
) -> str:
    """Return the buckets in use, the fullest first, then each kind of rejection with three file names and a remedy.

    Args:
        columns (mapping of `str` to array, shape `(n,)`): The columns `num_frames`, `height`, `width`, `bucket_id`
            (negative for a rejected row) and `rejection` (labels of [`Rejection`][hf_bucketing.Rejection]).
        table ([`BucketTable`][hf_bucketing.BucketTable]): Table that `bucket_id` refers to.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): Rule by which the rows were assigned.
        name_rows (callable): Function from row numbers to the names of their files.
        table_of_frames (callable, *optional*): Function from a number of frames to the table that would have it, to
            count what it would keep of samples that are too short; by default it has the sizes of `table`.
        others (mapping of `str` to [`BucketTable`][hf_bucketing.BucketTable], *optional*): Other tables by name, to
            say how many rows they would assign, and what these would keep.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
    """
    sizes = read_sizes(SizeColumns(columns["num_frames"], columns["height"], columns["width"]))
    ids, rejection = column_values(columns["bucket_id"], np.int32), column_values(columns["rejection"])
    targets = assigned_targets(sizes, ids, rejection, table=table, spec=spec)
    by_bucket = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    used, starts = np.unique(ids[by_bucket], return_index=True)
    parts = []
    if len(used):
        lines: list[Line] = [("bucket", "rows", "kept area", "kept frames", "scale", "enlarged", "tokens")]
        for rows in sorted(np.split(by_bucket, starts[1:]), key=len, reverse=True):
            scale = targets.scale[rows]
            low, high = f"{scale.min():.2f}", f"{scale.max():.2f}"
            lines.append((
                size_label(table.size(int(ids[rows[0]]))),
                f"{len(rows):,}",
                percent(mean(targets.kept_area[rows])),
                percent(mean(targets.kept_frames[rows])),
                low if low == high else f"{low}–{high}",
                f"{np.count_nonzero(scale > 1):,}",
                f"{targets.num_tokens[rows[0]]:,}",
            ))  # fmt: skip
        parts.append(align(lines))
        parts.append(
            "kept area: mean share of a frame inside the bucket; kept frames: mean share of the frames that it has; "
            "scale: least to largest factor of the sides"
        )
    parts.append(_assigned_line(targets, table))
    for name, other in (others or {}).items():
        parts.append(f"{name}: {_assigned_line(bucket_targets(sizes, other, spec=spec, rule=rule), other)}")
    if (cut := samples_cut_short(sizes, targets)) is not None:
        parts.append(describe_cut_samples(cut, name=name_rows([cut.row])[0]))
    for reason in explain_rejections(
        sizes, rejection, table=table, rule=rule, spec=spec, table_of_frames=table_of_frames
    ):
        names = ", ".join(name_rows(reason.examples)) + (", …" if reason.count > len(reason.examples) else "")
        noun = "row" if reason.count == 1 else "rows"
        parts.append(
            f"{reason.count:,} {noun} rejected: {reason.label} ({reason.why}): {names}\n"
            f"    to keep them: {reason.remedy}"
        )
    return "\n".join(parts)


def _assigned_line(targets: Targets, table: BucketTable) -> str:
    """Return how many rows are assigned to how many buckets, and the area that they keep."""
    kept = has_bucket(targets.bucket_id)
    used = len(np.unique(targets.bucket_id[kept]))
    area = f", kept area {percent(mean(targets.kept_area[kept]))} on average" if kept.any() else ""
    return f"{int(kept.sum()):,} of {len(kept):,} rows assigned to {used:,} of {len(table):,} buckets{area}"


def describe_packed_frames(frames: npt.ArrayLike, table: OpenTable) -> str:
    """Return how many frames samples keep in packs, and how many samples are longer; `frames` are those of all."""
    if table.max_frames is None:
        return "In packs, samples keep all their frames."
    longer = int(np.count_nonzero(np.asarray(frames) > table.max_frames))
    return (
        f"In packs, samples keep at most {table.max_frames:,} frames (--max_frames); {longer:,} of "
        f"{np.size(frames):,} rows have more."
    )
