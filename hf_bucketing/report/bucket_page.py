"""A report about a table, its data and the ways of batching as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..buckets.sizes import Size
from .charts import bar_chart
from .compare import Report
from .figures import MAX_BARS, data_charts, occupancy, strategies
from .page import Block, Charts, Facts, Gallery, Page, Paragraphs, Picture, Section, Table, Verdict
from .peers import PeerReport
from .peers.outcome import READING, peer_cells, peer_notes
from .samples import SampleCrop
from .sources import SourceUse, source_cells
from .text import (
    NO_BUCKET,
    bucket_cells,
    bucket_note,
    describe_condition_costs,
    describe_cut_samples,
    describe_strategies,
    percent,
    short_number,
    size_label,
    strategy_cells,
)
from .verdict import FIGURES_HEAD, RULE, choose_way


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Planned memory of a training step with some settings: bytes by kind, at the highest moment.

    `fits` says of devices, by the title of a column such as "in 24 GiB", whether they have as much.
    """

    settings: str
    parts: Mapping[str, int]
    fits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a page shows beside the numbers of a report.

    Attributes:
        name (`str`): Name of the data set.
        assignment (`str`): Sentence about where the rows' buckets come from.
        files (mapping of `int` to `str`): Files of rows that are shown, by row.
        thumbnails (mapping of `int` to `(URI, width, height)`): Frames of the worst crops, by row.
        samples (mapping of `int` to `(URI, width, height)`): The random samples, cut to their buckets, by row.
        captions (mapping of `int` to `str`): Captions of the random samples, by row.
        faults (mapping of `int` to `str`): Why a sample that is shown could not be read, by row.
        problems (mapping of `int` to `str`): What is wrong with the captions of rejected rows that are named, by row.
        sources (sequence of [`SourceUse`]): Sources, if there are several.
        peers (sequence of [`PeerReport`]): What other trainers would do, if it is asked.
        model (`str`): Pipeline whose memory is planned, and the step that is planned for.
        memory (sequence of [`MemoryRow`]): Its memory under several settings.
    """

    name: str
    assignment: str
    files: Mapping[int, str]
    thumbnails: Mapping[int, tuple[str, int, int]] = field(default_factory=dict)
    samples: Mapping[int, tuple[str, int, int]] = field(default_factory=dict)
    captions: Mapping[int, str] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    sources: Sequence[SourceUse] = ()
    peers: Sequence[PeerReport] = ()
    model: str = ""
    memory: Sequence[MemoryRow] = ()


def bucket_page(report: Report, beside: Beside) -> Page:
    """Lay out a report as a page."""
    config, spec = report.config, report.spec
    sections = [
        Section(name="overview", title="Overview", blocks=_overview(report, beside)),
        Section(name="data", title="The data", blocks=[Charts(charts=data_charts(report))]),
        Section(name="sources", title="Sources", blocks=[_sources(beside.sources)] if beside.sources else []),
        Section(name="buckets", title="Buckets", blocks=_buckets(report)),
        Section(name="samples", title="Samples as the model sees them", blocks=_samples(report, beside)),
        Section(name="crops", title="Worst crops", blocks=_crops(report.worst_crops, beside)),
        Section(name="rejections", title="Rejections", blocks=_rejections(report, beside)),
        Section(name="batching", title="Padding, bucketing, packing", blocks=_strategies(report)),
        Section(name="peers", title="Other trainers", blocks=_peers(beside.peers)),
        Section(name="plan", title="Plan and memory", blocks=_plan(report, beside)),
    ]
    strides = f"{spec.temporal_stride} in time, {spec.spatial_stride} in space, patch {'×'.join(map(str, spec.patch))}"
    subtitle = (
        f"{beside.name}: what its buckets make of the data, planned for {config.processes} with "
        f"batches of {config.batch_size}. Strides of the model: {strides}. {beside.assignment}"
    )
    return Page(title="Buckets and batches", subtitle=subtitle, sections=sections, head=_head(report))


def _head(report: Report) -> list[Block]:
    """Return what stands above all sections: the verdict, and the figures behind it."""
    verdict = choose_way(report)
    title = "Buckets and packs in figures"
    figures = [Table(title=title, head=FIGURES_HEAD, rows=verdict.figures, note=RULE)] if verdict.figures else []
    return [Verdict(text=str(verdict)), *figures]


def _overview(report: Report, beside: Beside) -> list[Block]:
    buckets = report.buckets
    facts = [
        ("samples", f"{buckets.num_samples:,}"),
        ("samples per epoch", f"{buckets.samples_per_epoch:,}"),
        ("with a bucket", f"{buckets.num_samples - buckets.rejected:,}"),
        ("rejected", f"{buckets.rejected:,}"),
        ("buckets in use", f"{len(buckets.used):,} of {len(buckets.buckets):,}"),
        ("kept area, mean", percent(buckets.kept_area)),
        ("samples enlarged", f"{buckets.enlarged:,}"),
    ]
    blocks: list[Block] = [Facts(facts=facts)]
    short_batches = sum(bucket.short_batches for bucket in buckets.used)
    batches = sum(bucket.batches for bucket in buckets.used)
    if not buckets.used:
        blocks.append(Paragraphs(texts=[NO_BUCKET], warning=True))
    elif short_batches > batches / 4:
        said = (
            f"{short_batches:,} of {batches:,} batches are not full: there are few samples per bucket. Fewer buckets "
            "(a larger --aspect_step while preparing) or smaller batches fill them better."
        )
        blocks.append(Paragraphs(texts=[said], warning=True))
    return blocks


def _sources(sources: Sequence[SourceUse]) -> Table:
    head, *rows = source_cells(sources)
    note = "Samples per epoch count the weights and repeats that the rows were prepared with."
    return Table(title="What each source adds to an epoch", head=head, rows=rows, note=note)


def _buckets(report: Report) -> list[Block]:
    used, config = report.buckets.used, report.config
    blocks: list[Block] = []
    if used:
        head, *rows = bucket_cells(used, config.units)
        title, note = "Buckets in use, the fullest first", bucket_note(config)
        blocks.append(Charts(charts=[occupancy(report)]))
        blocks.append(Table(title=title, head=head, rows=rows[:MAX_BARS], note=note))
        if len(rows) > MAX_BARS:
            blocks.append(Table(title=f"All {len(rows):,} buckets in use", head=head, rows=rows, folded=True))
        blocks += [Paragraphs(texts=[text]) for text in describe_condition_costs(report)]
        if (cut := report.buckets.cut_short) is not None:
            blocks.append(Paragraphs(texts=[describe_cut_samples(cut, name=f"row {cut.row}")], warning=True))
    else:
        blocks.append(Paragraphs(texts=["No bucket holds a sample."]))
    empty = [bucket for bucket in report.buckets.buckets if not bucket.num_samples]
    if empty:
        columns = ("bucket", "id", "width ÷ height", "tokens")
        titles, *lines = bucket_cells(empty, config.units)
        rows = [tuple(line[titles.index(name)] for name in columns) for line in lines]
        blocks.append(Table(title=f"{len(empty):,} buckets without a sample", head=columns, rows=rows, folded=True))
    return blocks


def _samples(report: Report, beside: Beside) -> list[Block]:
    """Show samples that were drawn at random, as [`Beside`] has them."""
    pictures = [
        _picture(sample, beside.samples[sample.row], beside)
        for sample in report.random_samples
        if sample.row in beside.samples
    ]
    if not pictures:
        return []
    how = (
        f"{len(pictures):,} of the samples that have a bucket, drawn at random (--seed), with their captions, resized "
        "and cut as bucketing takes them: here in the centre and from the first frame on; with random crops, training "
        "moves both."
    )
    return [Paragraphs(texts=[how]), Gallery(title="", pictures=pictures), *_faults(report.random_samples, beside)]


def _crops(crops: Sequence[SampleCrop], beside: Beside) -> list[Block]:
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
            picture = _picture(crop, beside.thumbnails[crop.row], beside, box=crop.box())
            pictures.setdefault(crop.bucket_id, []).append(picture)
    targets = {crop.bucket_id: crop.target for crop in crops}
    blocks += [
        Gallery(title=f"Bucket {bucket}: {size_label(targets[bucket])}", pictures=pictures_of_bucket)
        for bucket, pictures_of_bucket in pictures.items()
    ]
    return [*blocks, *_faults(crops, beside)]


def _picture(
    crop: SampleCrop,
    thumbnail: tuple[str, int, int],
    beside: Beside,
    *,
    box: tuple[float, float, float, float] | None = None,
) -> Picture:
    """Return a sample's picture with what is kept of it: with a `box`, of the whole frame, else cut to its bucket."""
    uri, width, height = thumbnail
    name, caption = beside.files[crop.row], beside.captions.get(crop.row, "")
    frames = f", {crop.target.frames} of {crop.size.frames} frames" if crop.size.frames > 1 else ""
    size = size_label(crop.size) if box else f"{size_label(crop.size)} → {size_label(crop.target)}"
    return Picture(
        source=uri,
        width=width,
        height=height,
        alt=f"Frame of {name} with the part marked that its bucket keeps." if box else f"{name} as the model sees it.",
        name=name,
        lines=(*([f"“{caption}”"] if caption and not box else []), f"{size}, keeps {percent(crop.kept_area)}{frames}"),
        box=box,
    )


def _faults(crops: Sequence[SampleCrop], beside: Beside) -> list[Block]:
    """Name the files of samples that could not be read."""
    faults = {crop.row: beside.faults[crop.row] for crop in crops if crop.row in beside.faults}
    texts = [f"{beside.files[row]} could not be shown: {fault}" for row, fault in faults.items()]
    return [Paragraphs(texts=texts, warning=True)] if texts else []


def _rejections(report: Report, beside: Beside) -> list[Block]:
    if not report.rejected:
        return []
    rows = []
    for reason in report.rejected:
        pairs = zip(reason.examples, reason.sizes, strict=True)
        examples = [f"{beside.files[row]} ({beside.problems.get(row) or _size_or_none(size)})" for row, size in pairs]
        named = "; ".join(examples) + ("; …" if reason.count > len(examples) else "")
        rows.append((reason.label, f"{reason.count:,}", reason.why, named, reason.remedy))
    return [
        Table(
            title="Rejected rows by reason",
            head=("reason", "rows", "what it means", "examples", "to keep them"),
            rows=rows,
            texts=(2, 3, 4),
            note="Flags are those of hf_bucketing prepare. Rejected rows are never drawn.",
        )
    ]


def _size_or_none(size: tuple[int, int, int]) -> str:
    return size_label(Size(*size)) if min(size) > 0 else "no size"


def _strategies(report: Report) -> list[Block]:
    head, *rows = zip(*strategy_cells(report), strict=True)
    table = Table(
        title="The same in numbers",
        head=head,
        rows=rows,
        note="Padding and packing drop only what cannot be read or fills no step.",
    )
    return [Paragraphs(texts=describe_strategies(report)), Charts(charts=strategies(report)), table]


def _peers(peers: Sequence[PeerReport]) -> list[Block]:
    if not peers:
        return []
    head, *rows = peer_cells(peers)
    rules = [(peer.name, peer.rule) for peer in peers if peer.rule]
    return [
        Table(title="What other trainers would do with these rows", head=head, rows=rows, note=READING),
        Paragraphs(texts=peer_notes(peers)),
        Table(title="Rules and their settings", head=("trainer", "rule"), rows=rules, texts=(1,), folded=True),
    ]


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
    totals = [short_number(sum(row.parts.values()) / 2**30) for row in beside.memory]
    bars = [
        (row.settings, [row.parts[name] / 2**30 for name in kinds], f"{total} GiB")
        for row, total in zip(beside.memory, totals, strict=True)
    ]
    names = [name.replace("_", " ") for name in kinds]
    chart = bar_chart(bars, title="Memory of the most expensive step", x_label="GiB", note=beside.model, parts=names)
    rows = [
        (row.settings, *(short_number(row.parts[name] / 2**30) for name in kinds), total, *row.fits.values())
        for row, total in zip(beside.memory, totals, strict=True)
    ]
    return [
        Charts(charts=[chart]),
        Table(
            title="GiB by kind at the highest moment of that step",
            head=("settings", *names, "total", *beside.memory[0].fits),
            rows=rows,
            texts=range(len(names) + 2, len(rows[0])),
            note="hf_bucketing plan adds one saving option after another, until a step fits a GPU.",
        ),
    ]
