r"""Report what a bucket table does to a data set, and compare padding, bucketing and packing on it.

python scripts/report_buckets.py demo/prepared --batch_size 3 --num_processes 2 --max_tokens 640 --strip_length 16 \
    --json demo/report.json --figures demo/report
"""

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from datasets import Dataset

from hf_bucketing import BucketingError, BucketTable, novelai_ladder
from hf_bucketing.buckets import read_cost_model
from hf_bucketing.columns import PreparedDataset, column_array
from hf_bucketing.command_line.flags import FlagParser, from_flags, numbers
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import check_folder_writable, check_writable, complete_file
from hf_bucketing.report import (
    AssignedColumns,
    ReportConfig,
    SizeColumns,
    count_sources,
    describe_sources,
    draw_figures,
    format_report,
    make_report,
)
from hf_bucketing.settings import not_default


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="Folder that scripts/prepare_dataset.py wrote.")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--table", type=Path, help="Table to try instead: a file that BucketTable.to_json wrote.")
    tables.add_argument("--buckets", help='Sizes to try instead, as diffusers\' "height,width;height,width".')
    tables.add_argument("--novelai", action="store_true", help="Try NovelAI's 19 image buckets instead.")
    parser.add_argument(
        "--bucket_frames", type=numbers, default=[1, 17, 49, 81], help="Numbers of frames for --buckets."
    )
    parser.add_settings(ReportConfig, skip=["metric", "cost_model"])
    parser.add_argument(
        "--cost_model", help="Cost of tokens as a run measured it: its cost_model.json, instead of --width."
    )
    parser.add_argument("--json", type=Path, help="JSON file for the report.")
    parser.add_argument("--figures", type=Path, help="Folder for the figures.")
    # The table of a file is the one that the data set was prepared with.
    names = {"dataset": ("dataset_dir",), "table": (), "buckets": (), "bucket_frames": ()}
    parser.add_config("report_buckets", others=other_scripts, names=names)
    return parser


def other_scripts() -> Mapping[str, Collection[str]]:
    from hf_bucketing.training.script_settings import settings_of_scripts

    return settings_of_scripts()


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
    names = [name for name in ("num_frames", "height", "width") if name in dataset.column_names]
    columns = dataset.select_columns(names).with_format("numpy")[:]
    sizes = {name: np.nan_to_num(column.astype(np.float64), nan=-1) for name, column in columns.items()}
    return SizeColumns(sizes.get("num_frames", np.ones(len(dataset))), sizes["height"], sizes["width"])


def main(args: argparse.Namespace) -> None:
    check_writable(args.json)
    check_folder_writable(args.figures)
    prepared = PreparedDataset.load(args.dataset)
    table = choose_table(args, prepared)
    measured = None if args.cost_model is None else read_cost_model(args.cost_model)
    config = from_flags(ReportConfig, args, cost_model=measured)
    sizes = read_sizes(prepared.dataset)
    assigned, has_buckets = None, "bucket_id" in prepared.dataset.column_names
    if table is prepared.table and has_buckets and not not_default(config, "max_aspect_error", "max_upscale"):
        assigned = AssignedColumns(*(column_array(prepared.dataset, name) for name in ("bucket_id", "rejection")))
    report = make_report(sizes, table, spec=prepared.spec, config=config, assigned=assigned)
    print("Rows are assigned anew." if assigned is None else "Rows have the buckets that they were prepared with.")
    print(format_report(report))
    values = report.to_dict()
    if prepared.sources is not None:
        counts = count_sources(**prepared.source_columns())
        print("\nSources, as they were prepared\n" + describe_sources(counts))
        values["sources"] = [asdict(one) for one in counts]
    if args.json:
        with complete_file(args.json) as partial:
            partial.write_text(json.dumps(values, indent=2) + "\n")
        print(f"Report: {args.json}")
    if args.figures:
        print("Figures:", *draw_figures(report, args.figures))


if __name__ == "__main__":
    run_script(main, make_parser)
