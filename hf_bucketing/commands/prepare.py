r"""Read the sizes of a data set's images and videos, assign buckets, and save all that training needs.

%(prog)s --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan \
    --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25 --output_dir demo/prepared
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..buckets.table import BucketTable
from ..columns.settings import SourceConfig
from ..command_line.config_file import PREPARE, SOURCES
from ..command_line.flags import FlagParser
from ..files import check_folder_writable
from ..report import (
    ReportConfig,
    count_sources,
    describe_assignment,
    describe_packed_frames,
    describe_references,
    describe_sources,
    measure_references,
)
from ..report.text import NO_BUCKET
from .script_settings import settings_of_scripts

if TYPE_CHECKING:
    from ..columns import PreparedDataset
    from ..columns.prepared_stream import PreparedStream

SIZES = ("num_frames", "height", "width")
SHARED_FLAGS = ("pretrained_model_name_or_path", "num_proc", "overwrite", "streaming", "output_dir")


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument(
        "--pretrained_model_name_or_path",
        required=True,
        help="Pipeline to prepare for, on the hub or in a folder; only its configuration is read, and its tokenizer "
        "where captions are long.",
    )
    parser.add_argument("--num_proc", type=int, help="Processes that read file headers (default: this one).")
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace bucket columns, such as aspect_ratio, that the data set has."
    )
    parser.add_argument(
        "--streaming",
        action="store_true",
        help="Check only the first rows of a data set that does not fit on a disk, and describe it as a stream, which "
        "hf_bucketing train --streaming reads while it trains.",
    )
    parser.add_argument("--output_dir", required=True, help="Folder to write.")
    parser.add_settings(SourceConfig, several=["dataset"])
    parser.add_config(PREPARE, others=settings_of_scripts, names={"output_dir": ("dataset_dir",)})
    return parser


def main(args: argparse.Namespace) -> None:
    from ..columns import column_array
    from ..columns.preparation import prepare
    from ..columns.prepared_stream import prepare_stream
    from ..columns.source_lists import settings_of_sources, sources_from
    from ..models.caption_lengths import describe_caption_lengths
    from ..models.index import read_index
    from ..models.registry import recipe_of

    sources = sources_from(vars(args), args.config)
    check_folder_writable(args.output_dir)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    sources = [replace(source, table=source.table.of_images(recipe.family.images_only)) for source in sources]
    spec = recipe.read_spec(args.pretrained_model_name_or_path)

    def table_of_frames(frames: int) -> BucketTable:
        return replace(sources[0].table.ladder, bucket_frames=[frames]).make(spec, native_sizes=recipe.native_sizes)

    audio = recipe.read_audio_rule(args.pretrained_model_name_or_path)
    of_model: dict[str, Any] = {
        "native_sizes": recipe.native_sizes,
        "conditions": recipe.conditions,
        "taken": recipe.reference_rule(read_index(args.pretrained_model_name_or_path).settings),
        "audio": audio,
    }
    shared: dict[str, Any] = {"spec": spec, "rule": sources[0].rule}
    if len(sources) == 1 and sources[0].table.table is None:
        shared["table_of_frames"] = table_of_frames
    if sources[0].table.num_buckets is not None and len({(repr(s.table), s.rule) for s in sources}) == 1:
        ladder = sources[0].table.ladder.make(spec, native_sizes=recipe.native_sizes)
        shared["others"] = {"without --num_buckets": ladder}
    flags = {name: value for name, value in vars(args).items() if name in SHARED_FLAGS}
    settings = {PREPARE: flags, SOURCES: settings_of_sources(sources)}
    if args.streaming:
        stream, columns = prepare_stream(sources, spec=spec, **of_model, say=print)
        replace(stream, settings=settings).save(args.output_dir)
        _describe_stream(stream, columns, shared)
        print(f"Saved the description of the stream to {args.output_dir}")
        return
    prepared = prepare(sources, spec=spec, **of_model, num_proc=args.num_proc, overwrite=args.overwrite)
    replace(prepared, settings=settings).save(args.output_dir)
    columns = {name: column_array(prepared.dataset, name) for name in (*SIZES, "bucket_id", "rejection")}
    _describe_rows(prepared, columns, shared)
    for sentence in describe_caption_lengths(prepared, recipe, args.pretrained_model_name_or_path):
        print(sentence)
    if prepared.sources:
        print(describe_sources(count_sources(**prepared.source_columns())))
    print(f"Saved to {args.output_dir}")
    if not (columns["bucket_id"] >= 0).any():
        print(fill(NO_BUCKET, width=118))


def _describe_stream(stream: PreparedStream, columns: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Say what became of the first rows of a stream."""
    print(f"A sample, the first {stream.sample.rows} rows; the others are assigned while training reads them:")
    names = columns["file"]
    print(
        describe_assignment(columns, table=stream.table, name_rows=lambda rows: [names[row] for row in rows], **shared)
    )
    print(describe_packed_frames(columns["num_frames"], stream.open_table))


def _describe_rows(prepared: PreparedDataset, columns: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Say what became of rows, and which references they have."""
    print(describe_assignment(columns, table=prepared.table, name_rows=prepared.file_names, **shared))
    print(describe_packed_frames(columns["num_frames"], prepared.open_table))
    references = measure_references(
        columns["bucket_id"],
        prepared.row_conditions(),
        table=prepared.table,
        spec=prepared.spec,
        config=ReportConfig(num_processes=1),
    )
    if references is not None:
        print(describe_references(references))
