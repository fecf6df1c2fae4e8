r"""Report what a bucket table does to a data set, and compare padding, bucketing and packing on it.

%(prog)s demo/prepared --batch_size 3 --num_processes 2 --max_tokens 640 --strip_length 16 \
    --json demo/report.json --figures demo/report --html demo/report.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import BucketingError, BucketTable, MediaError, novelai_ladder
from ..buckets import read_cost_model
from ..buckets.assignment import CAPTION_PROBLEM
from ..buckets.ladders import BUCKET_FRAMES
from ..command_line.flags import FlagParser, from_flags, numbers
from ..files import check_folder_writable, check_writable, complete_file
from ..report import (
    AssignedColumns,
    Beside,
    MemoryRow,
    Report,
    ReportConfig,
    SizeColumns,
    bucket_page,
    count_sources,
    describe_sources,
    draw_figures,
    format_report,
    make_report,
    render_page,
)
from ..report.peers import choose_peers, compare_peers, describe_peers
from ..report.peers.outcome import PEERS, PeerReport
from ..report.samples import SampleCrop
from ..report.text import size_label
from ..settings import not_default
from .script_settings import settings_of_scripts

if TYPE_CHECKING:
    from datasets import Dataset

    from ..columns import PreparedDataset
    from ..conditions.rows import RowConditions
    from ..media.source import MediaSource
    from ..media.thumbnails import Thumbnail

DEVICES = (24, 48, 80)
"""Memory of GPUs, in GiB, in which the planned memory fits or does not."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="Folder that hf_bucketing prepare wrote.")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--table", type=Path, help="Table to try instead: a file that BucketTable.to_json wrote.")
    tables.add_argument("--buckets", help='Sizes to try instead, as diffusers\' "height,width;height,width".')
    tables.add_argument("--novelai", action="store_true", help="Try NovelAI's 19 image buckets instead.")
    parser.add_argument(
        "--bucket_frames", type=numbers, default=list(BUCKET_FRAMES), help="Numbers of frames for --buckets."
    )
    parser.add_settings(ReportConfig, skip=["cost_model"])
    parser.add_argument(
        "--cost_model", help="Cost of tokens as a run measured it: its cost_model.json, instead of --width."
    )
    parser.add_argument(
        "--condition", help="Conditions of training: the frames that they append are counted (default: none)."
    )
    parser.add_argument(
        "--compare",
        help="Other trainers that the rows are compared with, separated by commas, or all: "
        f"{', '.join(PEERS)}; musubi-tuner=FILE and diffusion-pipe=FILE read the settings of their TOML.",
    )
    parser.add_argument("--json", type=Path, help="JSON file for the report.")
    parser.add_argument("--figures", type=Path, help="Folder for the figures.")
    parser.add_argument("--html", type=Path, help="HTML file for the report as a page that holds everything itself.")
    parser.add_argument(
        "--pretrained_model_name_or_path",
        help="Pipeline whose memory --html shows for the most expensive step (default: none).",
    )
    # The table of a file is the one that the data set was prepared with.
    names = {"dataset": ("dataset_dir",), "table": (), "buckets": (), "bucket_frames": ()}
    parser.add_config("report_buckets", others=settings_of_scripts, names=names)
    return parser


def choose_table(args: argparse.Namespace, prepared: PreparedDataset) -> BucketTable:
    if args.novelai:
        return novelai_ladder()
    if args.buckets is not None:
        return BucketTable.parse(args.buckets, frames=args.bucket_frames)
    if args.table is None:
        return prepared.table
    if not args.table.is_file():
        raise BucketingError(f"{args.table} is not a file; write a table there with BucketTable.to_json.")
    return BucketTable.from_json(args.table.read_text())


def read_sizes(dataset: Dataset) -> SizeColumns:
    """Return the size columns; a missing size is unreadable, and without a num_frames column all rows are images."""
    from ..columns import column_array

    names = [name for name in ("num_frames", "height", "width") if name in dataset.column_names]
    columns = dataset.select_columns(names).with_format("numpy")[:]
    sizes = {name: np.nan_to_num(column.astype(np.float64), nan=-1) for name, column in columns.items()}
    fps = np.nan_to_num(column_array(dataset, "fps").astype(np.float64)) if "fps" in dataset.column_names else None
    return SizeColumns(sizes.get("num_frames", np.ones(len(dataset))), sizes["height"], sizes["width"], fps)


def read_pictures(
    prepared: PreparedDataset,
    crops: Sequence[SampleCrop],
    draw: Callable[[MediaSource, SampleCrop, float, float], Thumbnail],
) -> tuple[dict[int, tuple[str, int, int]], dict[int, str]]:
    """Draw pictures of rows of their file, sample, frame rate and beginning; return them, and the faults of files."""
    from ..columns.apply import undecoded
    from ..media.rows import CLIP_START

    pictures: dict[int, tuple[str, int, int]] = {}
    faults: dict[int, str] = {}
    columns = [name for name in (prepared.column, "fps", CLIP_START) if name in prepared.dataset.column_names]
    rows = undecoded(prepared.dataset.select_columns(columns).select([crop.row for crop in crops]), [prepared.column])
    for crop, row in zip(crops, rows, strict=True):
        try:
            source = prepared.files.source(row[prepared.column], name=f"row {crop.row}")
            small = draw(source, crop, row.get("fps") or 0.0, row.get(CLIP_START) or 0.0)
            pictures[crop.row] = (small.uri, small.width, small.height)
        except MediaError as error:
            faults[crop.row] = str(error)
    return pictures, faults


def draw_middle(source: MediaSource, crop: SampleCrop, fps: float, start: float) -> Thumbnail:
    """Return the frame in the middle of a sample."""
    from ..media.thumbnails import thumbnail

    return thumbnail(source, second=start + (crop.size.frames // 2 / fps if fps else 0.0))


def draw_sample(source: MediaSource, crop: SampleCrop, fps: float, start: float) -> Thumbnail:
    """Return a sample cut to its bucket, from its first frame on."""
    from ..media.sample import load_sample
    from ..media.thumbnails import animated
    from ..media.views import View

    pixels, _ = load_sample(source, View(size=crop.target, fps=fps, offset=start))
    frames = [*((pixels + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()]
    return animated(frames, fps=fps, most_frames=8, max_side=160)


def read_captions(prepared: PreparedDataset, rows: list[int]) -> dict[int, str]:
    """Return the captions of rows, the first of several."""
    from ..loaders.captions import texts_of

    if (column := prepared.caption_column) is None:
        return {}
    captions = prepared.dataset.select_columns([column]).with_format(None).select(rows)
    return {row: texts_of(caption, column)[0] for row, caption in zip(rows, captions, strict=True)}


def read_problems(prepared: PreparedDataset, rows: list[int]) -> dict[int, str]:
    """Return what is wrong with the captions of rows, of those that are rejected for it."""
    if CAPTION_PROBLEM not in prepared.dataset.column_names:
        return {}
    problems = prepared.dataset.select_columns([CAPTION_PROBLEM]).with_format(None).select(rows)[CAPTION_PROBLEM]
    return {row: problem for row, problem in zip(rows, problems, strict=True) if problem}


def plan_of_memory(
    model: str | None,
    report: Report,
    conditions: RowConditions,
    *,
    condition: str | None,
) -> tuple[str, list[MemoryRow]]:
    """Plan the memory of a step of the most expensive bucket, if a pipeline is named, with most references and audio.

    Audio is longest at the lowest frame rate.
    """
    buckets = report.buckets.used
    if model is None or not buckets:
        return "", []
    from ..planner.memory import plan_memory, verdict_on
    from ..planner.settings import PlanConfig, as_reference_sizes
    from ..settings import changed

    largest, samples = max(buckets, key=lambda bucket: bucket.cost), report.config.batch_size
    reference_sizes = conditions.references.most(largest.size, spec=report.spec)
    base = PlanConfig.from_flat(
        sample_size=[*largest.size],
        reference_sizes=as_reference_sizes(reference_sizes),
        audio_fps=None if conditions.audio is None else conditions.audio.slowest,
        train_batch_size=samples,
        condition=condition,
        mixed_precision="bf16",
        cached="all",
    )
    settings = {
        "all weights": changed(base, gradient_checkpointing=True),
        "LoRA 16": changed(base, gradient_checkpointing=True, lora_rank=16),
        "LoRA 16, int8": changed(base, gradient_checkpointing=True, lora_rank=16, quantize_base="int8"),
    }
    plans = {name: plan_memory(model, config) for name, config in settings.items()}
    references = f", and references of {', '.join(map(size_label, reference_sizes))}" if reference_sizes else ""
    said = (
        f"{model} on one GPU, {samples} × {size_label(largest.size)} ({samples * largest.num_tokens:,} tokens"
        f"{references}), in bf16 with gradient checkpointing, latents and texts cached."
    )
    rows = []
    for name, plan in plans.items():
        fits = {f"in {memory} GiB": verdict_on(plan.total, memory * 2**30) for memory in DEVICES}
        rows.append(MemoryRow(settings=name, parts=asdict(plan.peak), fits=fits))
    return said, rows


def write_page(
    args: argparse.Namespace,
    prepared: PreparedDataset,
    report: Report,
    conditions: RowConditions,
    **contents: Any,
) -> None:
    crops, random = report.worst_crops, report.random_samples
    rejected = [row for reason in report.rejected for row in reason.examples]
    rows = [*(sample.row for sample in (*crops, *random)), *rejected]
    thumbnails, faults = read_pictures(prepared, crops, draw_middle)
    samples, more_faults = read_pictures(prepared, random, draw_sample)
    model, memory = plan_of_memory(args.pretrained_model_name_or_path, report, conditions, condition=args.condition)
    page = bucket_page(
        report,
        Beside(
            name=args.dataset,
            files=dict(zip(rows, prepared.file_names(rows), strict=True)),
            thumbnails=thumbnails,
            samples=samples,
            captions=read_captions(prepared, [sample.row for sample in random]),
            faults=faults | more_faults,
            problems=read_problems(prepared, rejected),
            model=model,
            memory=memory,
            **contents,
        ),
    )
    with complete_file(args.html) as partial:
        partial.write_text(render_page(page), encoding="utf-8")
    print(f"Page: {args.html}")


def main(args: argparse.Namespace) -> None:
    from ..columns import PreparedDataset, column_array
    from ..conditions.names import KEYFRAMES
    from ..conditions.shares import appended_by
    from ..configuration.prepared import check_same_settings
    from ..models.registry import recipe_of

    check_writable(args.json, args.html)
    check_folder_writable(args.figures)
    prepared = PreparedDataset.load(args.dataset)
    check_same_settings(args.config, args.dataset, settings=prepared.settings)
    table = choose_table(args, prepared)
    chosen = {} if args.compare is None else choose_peers(args.compare, table=table, spec=prepared.spec)
    measured = None if args.cost_model is None else read_cost_model(args.cost_model)
    config = from_flags(ReportConfig, args, cost_model=measured)
    sizes = read_sizes(prepared.dataset)
    assigned, has_buckets = None, "bucket_id" in prepared.dataset.column_names
    if table is prepared.table and has_buckets and not not_default(config, "max_aspect_error", "max_upscale"):
        assigned = AssignedColumns(*(column_array(prepared.dataset, name) for name in ("bucket_id", "rejection")))
    max_frames = prepared.open_table.max_frames
    model = args.pretrained_model_name_or_path
    keyframes = None if model is None or args.condition is None else recipe_of(model).condition(KEYFRAMES)
    frames = appended_by(args.condition, keyframes)
    conditions = prepared.row_conditions().appending(frames)
    report = make_report(
        sizes,
        table,
        spec=prepared.spec,
        config=config,
        assigned=assigned,
        max_frames=max_frames,
        conditions=conditions,
        weights=prepared.weights,
    )
    origin = "are assigned anew" if assigned is None else "have the buckets that they were prepared with"
    print(f"Rows {origin}.")
    print(format_report(report))
    values, counts = report.to_dict(), []
    peers: tuple[PeerReport, ...] = ()
    if prepared.sources:
        counts = count_sources(**prepared.source_columns())
        print("\nSources, as they were prepared\n" + describe_sources(counts))
        values["sources"] = [asdict(count) for count in counts]
    if chosen:
        peers = compare_peers(sizes, report, chosen, weights=prepared.weights)
        print("\nWhat other trainers would do with these rows\n" + describe_peers(peers))
        values["peers"] = [asdict(peer) for peer in peers]
    if args.json:
        with complete_file(args.json) as partial:
            partial.write_text(json.dumps(values, indent=2) + "\n")
        print(f"Report: {args.json}")
    if args.figures:
        print("Figures:", *draw_figures(report, args.figures))
    if args.html:
        write_page(args, prepared, report, conditions, assignment=f"Rows {origin}.", sources=counts, peers=peers)
