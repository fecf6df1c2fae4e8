"""A report about a table, its data and the ways of batching as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..buckets.sizes import Size
from .charts import Chart, bar_chart, histogram_chart
from .compare import Report, StrategyReport
from .crops import WorstCrop
from .figures import MAX_BARS
from .measure import BucketUse
from .page import Block, Charts, Facts, Gallery, Page, Paragraphs, Picture, Section, Table
from .sources import SourceUse, source_cells
from .text import describe_cut_samples, own_sizes, percent, short_number, size_label

_NAMED = ("bucket", "id", "width ÷ height")
"""Columns that name a bucket, whose cells are those of `_named`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Planned memory of a training step with some settings: bytes by kind, at the highest moment."""

    settings: str
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a page shows beside the numbers of a report.

    Attributes:
        name (`str`): Name of the data set.
        assignment (`str`): Sentence about where the rows' buckets come from.
        files (mapping of `int` to `str`): Files of rows that are shown, by row.
        thumbnails (mapping of `int` to `(URI, width, height)`): Frames of the worst crops, by row.
        faults (mapping of `int` to `str`): Why a frame of the worst crops could not be read, by row.
        sources (sequence of [`SourceUse`]): Sources, if there are several.
        model (`str`): Pipeline whose memory is planned, and the step that is planned for.
        memory (sequence of [`MemoryRow`]): Its memory under several settings.
    """

    name: str
    assignment: str
    files: Mapping[int, str]
    thumbnails: Mapping[int, tuple[str, int, int]] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)
    sources: Sequence[SourceUse] = ()
    model: str = ""
    memory: Sequence[MemoryRow] = ()


def bucket_page(report: Report, beside: Beside) -> Page:
    """Lay out a report as a page."""
    config, spec = report.config, report.spec
    sections = [
        Section(name="overview", title="Overview", blocks=_overview(report, beside)),
        Section(name="data", title="The data", blocks=[_histograms(report)]),
        Section(name="sources", title="Sources", blocks=[_sources(beside.sources)] if beside.sources else []),
        Section(name="buckets", title="Buckets", blocks=_buckets(report)),
        Section(name="crops", title="Worst crops", blocks=_crops(report.worst_crops, beside)),
        Section(name="rejections", title="Rejections", blocks=_rejections(report, beside)),
        Section(name="batching", title="Padding, bucketing, packing", blocks=_strategies(report)),
        Section(name="plan", title="Plan and memory", blocks=_plan(report, beside)),
    ]
    strides = f"{spec.temporal_stride} in time, {spec.spatial_stride} in space, patch {'×'.join(map(str, spec.patch))}"
    processes = "1 process" if config.num_processes == 1 else f"{config.num_processes} processes"
    subtitle = (
        f"{beside.name}: what its buckets make of the data, planned for {processes} with "
        f"batches of {config.batch_size}. Strides of the model: {strides}. {beside.assignment}"
    )
    return Page(title="Buckets and batches", subtitle=subtitle, sections=sections)


def _overview(report: Report, beside: Beside) -> list[Block]:
    buckets = report.buckets
    by_name = {strategy.name: strategy for strategy in report.strategies}
    facts = [
        ("samples", f"{buckets.num_samples:,}"),
        ("with a bucket", f"{buckets.num_samples - buckets.rejected:,}"),
        ("rejected", f"{buckets.rejected:,}"),
        ("buckets in use", f"{len(buckets.used):,} of {len(buckets.buckets):,}"),
        ("area kept, mean", percent(buckets.kept_area)),
        ("samples enlarged", f"{buckets.enlarged:,}"),
        ("useful work, bucketing", percent(by_name["bucketing"].efficiency)),
        ("useful work, packing", percent(by_name["packing"].efficiency)),
    ]
    blocks: list[Block] = [Facts(facts=facts)]
    short_batches = sum(bucket.short_batches for bucket in buckets.used)
    batches = sum(bucket.batches for bucket in buckets.used)
    if not buckets.used:
        blocks.append(
            Paragraphs(texts=["No sample has a bucket: nothing can be trained with this table."], warning=True)
        )
    elif short_batches > batches / 4:
        blocks.append(
            Paragraphs(
                texts=[
                    f"{short_batches:,} of {batches:,} batches are not full: there are few samples per bucket. Fewer "
                    "buckets (a larger --aspect_step while preparing), smaller batches or packing fill them better."
                ],
                warning=True,
            )
        )
    return blocks


def _histograms(report: Report) -> Charts:
    def counts(name: str) -> str:
        return f"Histogram of {name} of the samples; the numbers are in the file of --json."

    charts = [
        (
            "Sizes",
            histogram_chart(
                report.sizes, alt=counts("sizes"), x_label="√(width × height) in pixels, log scale", y_label="samples"
            ),
            "Side of a square of the same area as the frame, before any resize.",
        ),
        (
            "Aspect ratios",
            histogram_chart(
                report.aspects, alt=counts("aspect ratios"), x_label="width ÷ height, log scale", y_label="samples"
            ),
            "1 is square, above 1 is landscape.",
        ),
        (
            "Tokens",
            histogram_chart(
                report.tokens,
                alt=counts("tokens"),
                x_label="tokens per sample, log scale",
                y_label="samples",
                colours=(2, 3),
            ),
            "What the model computes per sample: cut to its bucket, or whole as in packs.",
        ),
    ]
    if report.durations is not None:
        chart = histogram_chart(
            report.durations, alt=counts("durations"), x_label="seconds, log scale", y_label="videos"
        )
        charts.insert(2, ("Durations", chart, "Videos only, before frames are cut off."))
    return Charts(charts=charts)


def _sources(sources: Sequence[SourceUse]) -> Table:
    return Table(
        title="What each source adds to an epoch",
        head=("source", "rows", "rejected", "buckets", "samples per epoch", "share of samples", "share of tokens"),
        rows=source_cells(sources),
        note="Samples per epoch count the weights and repeats that the rows were prepared with.",
    )


def _buckets(report: Report) -> list[Block]:
    used = report.buckets.used
    blocks: list[Block] = []
    if used:
        blocks += [_bucket_chart(used[:MAX_BARS], report), *_bucket_tables(used, report)]
        if (cut := report.buckets.cut_short) is not None:
            blocks.append(Paragraphs(texts=[describe_cut_samples(cut, name=f"row {cut.row}")], warning=True))
    else:
        blocks.append(Paragraphs(texts=["No bucket holds a sample."]))
    empty = [bucket for bucket in report.buckets.buckets if not bucket.num_samples]
    if empty:
        rows = [(*_named(bucket), f"{bucket.num_tokens:,}") for bucket in empty]
        head = (*_NAMED, "tokens")
        blocks.append(Table(title=f"{len(empty):,} buckets without a sample", head=head, rows=rows, folded=True))
    return blocks


def _bucket_chart(shown: Sequence[BucketUse], report: Report) -> Charts:
    bars = []
    for bucket in shown:
        full = (bucket.batches - bucket.short_batches) * report.config.batch_size
        in_short = bucket.num_samples - full - bucket.mixed_samples - bucket.dropped
        parts = (full, in_short, bucket.mixed_samples, bucket.dropped)
        bars.append((size_label(bucket.size), tuple(map(float, parts)), f"{bucket.num_samples:,}"))
    chart = bar_chart(
        bars,
        alt=f"Samples of the {len(shown)} fullest buckets, by the kind of batch that they are in.",
        x_label="samples",
        parts=("in full batches", "in short batches", "in mixed steps", "dropped in this epoch"),
    )
    title = "Samples by bucket and kind of batch"
    if len(shown) < len(report.buckets.used):
        title += f": the {len(shown)} fullest of {len(report.buckets.used)}"
    return Charts(charts=[(title, chart, "Samples in short batches and mixed steps fill less of a step.")])


def _bucket_tables(used: Sequence[BucketUse], report: Report) -> list[Block]:
    units = report.config.units
    head = (
        *(*_NAMED, "samples", "area kept", "frames kept", "scale", "enlarged", "tokens"),
        *(units.sample, "batches", "short", "mixed", "dropped"),
    )
    rows = [
        (
            *_named(bucket),
            f"{bucket.num_samples:,}",
            percent(bucket.kept_area),
            percent(bucket.kept_frames),
            f"{bucket.scale:.3f}",
            f"{bucket.enlarged:,}",
            f"{bucket.num_tokens:,}",
            short_number(bucket.cost * units.sample_factor),
            f"{bucket.batches:,}",
            f"{bucket.short_batches:,}",
            f"{bucket.mixed_samples:,}",
            f"{bucket.dropped:,}",
        )
        for bucket in used
    ]
    note = (
        f"A bucket is named frames×height×width, or height×width for images. Scale is the mean factor of the sides; "
        f"tokens and {units.sample} ({units.counts}) are those of one sample. Batches are those of all processes, "
        f"short ones hold fewer than {report.config.batch_size} samples; mixed and dropped count samples."
    )
    blocks: list[Block] = [
        Table(title="Buckets in use, the fullest first", head=head, rows=rows[:MAX_BARS], note=note)
    ]
    if len(rows) > MAX_BARS:
        blocks.append(Table(title=f"All {len(rows):,} buckets in use", head=head, rows=rows, folded=True))
    return blocks


def _named(bucket: BucketUse) -> tuple[str, str, str]:
    return size_label(bucket.size), f"{bucket.bucket_id}", f"{bucket.size.aspect_ratio:.3f}"


def _crops(crops: Sequence[WorstCrop], beside: Beside) -> list[Block]:
    if not crops:
        return []
    blocks: list[Block] = [
        Paragraphs(
            texts=[
                "Frames from the middle of samples, of the buckets that cut most from one of theirs. The bright part "
                "is kept, here in the centre; with random crops, training moves it along the side that is cut."
            ]
        )
    ]
    pictures: dict[int, list[Picture]] = {}
    for crop in crops:
        if crop.row in beside.thumbnails:
            uri, width, height = beside.thumbnails[crop.row]
            frames = (
                f", {crop.target.frames} of {crop.size.frames} frames" if crop.size.frames > crop.target.frames else ""
            )
            name = beside.files[crop.row]
            picture = Picture(
                source=uri,
                width=width,
                height=height,
                alt=f"Frame of {name} with the part marked that its bucket keeps.",
                name=name,
                lines=(f"{size_label(crop.size)}, keeps {percent(crop.kept_area)}{frames}",),
                box=crop.box(),
            )
            pictures.setdefault(crop.bucket_id, []).append(picture)
    targets = {crop.bucket_id: crop.target for crop in crops}
    blocks += [
        Gallery(title=f"Bucket {bucket}: {size_label(targets[bucket])}", pictures=own)
        for bucket, own in pictures.items()
    ]
    if beside.faults:
        texts = [f"{beside.files[row]} could not be shown: {fault}" for row, fault in beside.faults.items()]
        blocks.append(Paragraphs(texts=texts, warning=True))
    return blocks


def _rejections(report: Report, beside: Beside) -> list[Block]:
    if not report.rejected:
        return []
    rows = []
    for reason in report.rejected:
        each = zip(reason.examples, reason.sizes, strict=True)
        examples = [f"{beside.files[row]} ({_size_or_none(size)})" for row, size in each]
        named = "; ".join(examples) + ("; …" if reason.count > len(examples) else "")
        rows.append((reason.label, f"{reason.count:,}", reason.why, named, reason.remedy))
    return [
        Table(
            title="Rejected rows by reason",
            head=("reason", "rows", "what it means", "examples", "to keep them"),
            rows=rows,
            texts=(2, 3, 4),
            note="Flags are those of scripts/prepare_dataset.py. Rejected rows are never drawn.",
        )
    ]


def _size_or_none(size: tuple[int, int, int]) -> str:
    return size_label(Size(*size)) if min(size) > 0 else "no size"


def _strategies(report: Report) -> list[Block]:
    strategies, config = report.strategies, report.config

    def panel(
        title: str, label: str, values: Sequence[float], texts: Sequence[str], note: str
    ) -> tuple[str, Chart, str]:
        bars = [
            (strategy.name, (value,), text) for strategy, value, text in zip(strategies, values, texts, strict=True)
        ]
        said = ", ".join(f"{name} {text}" for name, _, text in bars)
        return title, bar_chart(bars, alt=f"{title}: {said}", x_label=label, colours=(1, 0, 2)), note

    def shares(title: str, label: str, name: str, note: str) -> tuple[str, Chart, str]:
        values = [getattr(strategy, name) for strategy in strategies]
        return panel(title, label, [100 * value for value in values], [*map(percent, values)], note)

    costs = [strategy.epoch_cost * config.units.epoch_factor for strategy in strategies]
    charts = [
        shares("Real ÷ computed tokens", "% of computed tokens", "token_use", "The rest is padding."),
        shares("Step-time balance", "% of the slowest process", "step_balance", "The rest is waiting for it."),
        shares("Useful work", "% of all processes' time", "efficiency", "Neither padding nor waiting."),
        shares("Area cropped, mean", "% of the frame", "cropped_area", "Cut off by cover-resize and crop."),
        panel(
            "Cost of an epoch",
            config.units.epoch,
            costs,
            [*map(short_number, costs)],
            f"Sum over steps of the slowest process, {config.units.counts}.",
        ),
        panel(
            "Samples kept",
            "samples",
            [strategy.kept for strategy in strategies],
            [f"{strategy.kept:,}" for strategy in strategies],
            "Of one epoch.",
        ),
    ]  # fmt: skip
    max_tokens = next(strategy.max_tokens for strategy in strategies if strategy.max_tokens is not None)
    how = (
        f"Padding draws {config.batch_size} samples of any sizes and pads each to the largest; bucketing draws "
        f"{config.batch_size} of one bucket; packing joins samples up to {max_tokens:,} tokens. Padding and packing "
        f"take samples {own_sizes(report)}, bucketing at those of its buckets: an epoch costs less where it crops "
        "more. All numbers come from the plan of a real epoch."
    )
    return [Paragraphs(texts=[how]), Charts(charts=charts), _comparison(strategies)]


def _comparison(strategies: Sequence[StrategyReport]) -> Table:
    return Table(
        title="The same in numbers",
        head=(
            "way",
            "kept",
            "dropped",
            "steps",
            "mixed steps",
            "tokens per sample",
            "real ÷ computed",
            "area cropped",
            "frames cut off",
            "balance",
            "useful work",
        ),
        rows=[
            (
                strategy.name,
                f"{strategy.kept:,}",
                ", ".join(f"{count:,} {reason}" for reason, count in strategy.dropped.items()) or "0",
                f"{strategy.num_steps:,}",
                f"{strategy.mixed_steps:,}",
                short_number(strategy.tokens_per_sample),
                percent(strategy.token_use),
                percent(strategy.cropped_area),
                percent(strategy.cropped_frames),
                percent(strategy.step_balance),
                percent(strategy.efficiency),
            )
            for strategy in strategies
        ],
        texts=(2,),
        note="Padding and packing drop only what cannot be read or fills no step.",
    )


def _plan(report: Report, beside: Beside) -> list[Block]:
    by_name = {strategy.name: strategy for strategy in report.strategies}
    facts = [
        fact
        for name in ("bucketing", "packing")
        for fact in (
            (f"steps of an epoch, {name}", f"{by_name[name].num_steps:,}"),
            (f"bytes of that plan, {name}", f"{by_name[name].plan_bytes:,}"),
        )
    ]
    blocks: list[Block] = [
        Paragraphs(
            texts=["The plan of an epoch is a few arrays of numbers, which every process holds in CPU memory."]
        ),
        Facts(facts=facts),
    ]
    if not beside.memory:
        asked = "Name a pipeline by --pretrained_model_name_or_path to see the memory of the most expensive step here."
        return [*blocks, Paragraphs(texts=[asked])]
    return [*blocks, *_memory(beside)]


def _memory(beside: Beside) -> list[Block]:
    kinds = [name for name in beside.memory[0].parts if any(row.parts[name] for row in beside.memory)]
    totals = [_gib(sum(row.parts.values())) for row in beside.memory]
    bars = [
        (row.settings, [row.parts[name] / 2**30 for name in kinds], f"{total} GiB")
        for row, total in zip(beside.memory, totals, strict=True)
    ]
    names = [name.replace("_", " ") for name in kinds]
    chart = bar_chart(bars, alt="Planned memory by kind under several settings.", x_label="GiB", parts=names)
    rows = [
        (row.settings, *(_gib(row.parts[name]) for name in kinds), total)
        for row, total in zip(beside.memory, totals, strict=True)
    ]
    return [
        Charts(charts=[("Memory of the most expensive step", chart, beside.model)]),
        Table(
            title="GiB by kind at the highest moment of that step",
            head=("settings", *names, "total"),
            rows=rows,
            note="scripts/plan_memory.py adds one saving option after another, until a step fits a GPU.",
        ),
    ]


def _gib(count: float) -> str:
    gib = count / 2**30
    return f"{gib:.1f}" if gib >= 1 or not count else f"{gib:.{min(4, 1 - math.floor(math.log10(gib)))}f}"
