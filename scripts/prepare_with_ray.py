r"""Read the sizes of the media in a folder of parquet files on a Ray cluster, file by file, and assign buckets.

python scripts/prepare_with_ray.py --input_dir rows --output_dir rows_with_columns --media_dir demo/media \
    --pretrained_model_name_or_path demo/tiny-wan --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25

Each file of the output folder appears when it is complete. The same command again does what is missing, and what has
changed. `hf_bucketing prepare --dataset rows_with_columns --overwrite` then takes the sizes from the columns.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_bucketing import AssignmentRule
from hf_bucketing.columns.settings import TableConfig
from hf_bucketing.command_line.flags import FlagParser, from_flags
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import BucketingError, FlagError, MediaError
from hf_bucketing.files import check_folder_writable
from hf_bucketing.media.remote import ALLOWED_PATHS, is_url

if TYPE_CHECKING:
    from hf_bucketing.columns.parquet import FileResult, ParquetColumns


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--input_dir", required=True, help="Folder of parquet files, which all workers reach.")
    parser.add_argument("--output_dir", required=True, help="Folder to write, which all workers reach.")
    parser.add_argument("--media_column", default="file_name", help="Column of paths, bytes, or both.")
    parser.add_argument("--media_dir", help="Folder or URL that relative paths start from (default: --input_dir).")
    parser.add_argument(
        "--pretrained_model_name_or_path",
        required=True,
        help="Pipeline to prepare for, on the hub or in a folder; only its configuration is read.",
    )
    parser.add_argument("--target_fps", type=float, default=16.0, help="Frame rate to train at.")
    parser.add_argument(
        "--on_error",
        choices=["raise", "reject"],
        default="raise",
        help="Treatment of unreadable media: raise ends the script, and reject gives them sizes of -1, by which "
        "hf_bucketing prepare --on_error reject rejects their rows.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace the columns that the files already have.")
    parser.add_argument("--address", help="Ray cluster to join, such as auto (default: start one on this machine).")
    parser.add_argument(
        "--num_workers", type=int, help="Workers of a cluster on this machine (default: as many as it has cores)."
    )
    parser.add_settings(TableConfig, skip=["each_budget", "num_buckets"])
    parser.add_settings(AssignmentRule)
    return parser


def main(args: argparse.Namespace) -> None:
    from hf_bucketing.columns import BucketColumns, MediaMetadata
    from hf_bucketing.columns.parquet import ParquetColumns, remove_partial
    from hf_bucketing.models.registry import recipe_of

    if args.address is not None and args.num_workers is not None:
        raise FlagError("Omit --num_workers: the cluster at --address has its own.")
    check_folder_writable(args.output_dir)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    spec = recipe.read_spec(args.pretrained_model_name_or_path)
    table = (
        from_flags(TableConfig, args).of_images(recipe.family.images_only).make(spec, native_sizes=recipe.native_sizes)
    )
    columns = ParquetColumns(
        source=os.path.abspath(args.input_dir),  # workers have other current folders
        target=os.path.abspath(args.output_dir),
        metadata=MediaMetadata(
            args.media_column,
            target_fps=args.target_fps,
            root=args.media_dir if is_url(args.media_dir or "") else os.path.abspath(args.media_dir or args.input_dir),
            on_error=args.on_error,
        ),
        buckets=BucketColumns(table, spec, rule=from_flags(AssignmentRule, args)),
        overwrite=args.overwrite,
    )
    names, pending = columns.names(), columns.pending()
    print(f"{len(names)} files: {len(names) - len(pending)} are done, {len(pending)} are missing or have changed")
    remove_partial(Path(args.output_dir))
    rows = unreadable = 0
    for number, result in enumerate(work(columns, pending, args), start=1):
        if result.error:
            raise MediaError(f"{result.error} {number - 1} files are done; the same command continues.")
        rows, unreadable = rows + result.rows, unreadable + result.unreadable
        print(f"{number} of {len(pending)}: {result.name}, {result.rows:,} rows, {result.unreadable:,} unreadable")
    print(f"Wrote {rows:,} rows to {args.output_dir}, {unreadable:,} of them with unreadable media")
    print(f"Their media lie elsewhere: set {ALLOWED_PATHS}={columns.metadata.root} to prepare and train from them")


def work(columns: "ParquetColumns", pending: list[str], args: argparse.Namespace) -> "Iterator[FileResult]":
    """Yield the result of each file when its task ends."""
    if not pending:
        return
    from hf_bucketing.columns.parquet import FileResult

    try:
        import ray
    except ImportError as error:
        raise BucketingError('Ray is not installed; run pip install "hf_bucketing[ray]".') from error
    if args.address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=args.num_workers, include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=args.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    files = ray.data.from_items([{"name": name} for name in pending], override_num_blocks=len(pending))
    try:
        for row in files.map_batches(columns, batch_size=1).iter_rows():
            yield FileResult(**row)
    except ray.exceptions.RayError as error:
        raise BucketingError(f"Ray failed: {error}. The same command does the files that are missing.") from error
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run_script(main, make_parser)
