r"""Read the sizes of a data set's images and videos, assign buckets, and save all that training needs.

python scripts/prepare_dataset.py --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan \
    --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25 --output_dir demo/prepared
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hf_bucketing import AssignmentRule, BucketTable, LatentSpec, open_table, token_ladder
from hf_bucketing.columns import (
    BucketColumns,
    MediaMetadata,
    PreparedDataset,
    add_sizes,
    check_captions,
    column_array,
    load_source,
    map_columns,
)
from hf_bucketing.command_line.flags import FlagParser, from_flags, numbers
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import ColumnError, FlagError
from hf_bucketing.files import check_folder_writable
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.report import describe_assignment

SIZES = ("num_frames", "height", "width")


def heights_and_widths(text: str) -> list[tuple[int, int]]:
    return [] if text == "none" else [size[1:] for size in BucketTable.parse(text).sizes]


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Bucket table.

    Args:
        bucket_tokens (`list` of `int`, *optional*): Token budgets per sample, such as 8190,18480 (no default: give
            this, `buckets` or `table`).
        buckets (`str`, *optional*): Buckets in diffusers' form "height,width;height,width", in place of
            `bucket_tokens` (default: none).
        table (`Path`, *optional*): File that BucketTable.to_json wrote, in place of `bucket_tokens` (default: none).
        bucket_frames (`list` of `int`): Numbers of frames that buckets have.
        bucket_sizes (list of pairs, *optional*): Sizes in pixels that token buckets always contain, such as
            480,832;720,1280, or none (default: the model's own).
        aspect_step (`float`): Distance between aspect ratios of token buckets; 0.08 is 8 %, and a larger distance
            makes fewer buckets.
        max_aspect_ratio (`float`): Largest ratio of the longer to the shorter side of token buckets.
        image_sizes (`"own"` or `"video"`): Whether images are trained at buckets of one frame, or packed at their own
            size, or both at the sizes of videos.
    """

    bucket_tokens: list[int] | None = field(default=None, metadata={"parse": numbers, "argument": "tokens"})
    buckets: str | None = None
    table: Path | None = None
    bucket_frames: list[int] = field(
        default_factory=lambda: [1, 17, 49, 81], metadata={"parse": numbers, "argument": "frames"}
    )
    bucket_sizes: list[tuple[int, int]] | None = field(default=None, metadata={"parse": heights_and_widths})
    aspect_step: float = 0.08
    max_aspect_ratio: float = 2.5
    image_sizes: Literal["own", "video"] = "own"

    def __post_init__(self) -> None:
        if sum(option is not None for option in (self.bucket_tokens, self.buckets, self.table)) != 1:
            raise FlagError("Give one of --bucket_tokens, --buckets and --table.")


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument(
        "--dataset",
        required=True,
        help="Data to prepare: a csv, tsv, json, jsonl or parquet file; a folder with such a file named metadata, or "
        "with a .txt caption beside each image and video; or a data set on the hub.",
    )
    parser.add_argument("--dataset_config_name", help="Configuration of a hub data set.")
    parser.add_argument("--split", default="train", help="Split, such as train or train[:100].")
    parser.add_argument("--media_column", help="Image or video column (default: found by its name).")
    parser.add_argument("--caption_column", help="Text column (default: found by its name).")
    parser.add_argument(
        "--read_headers", action="store_true", help="Read all sizes from the files, also where columns hold them."
    )
    parser.add_argument(
        "--pretrained_model_name_or_path",
        required=True,
        help="Pipeline to prepare for, on the hub or in a folder; only its configuration is read.",
    )
    parser.add_argument("--target_fps", type=float, default=16.0, help="Frame rate to train at.")
    parser.add_argument("--max_frames", type=int, help="Number of frames that packed samples are cut to.")
    parser.add_argument(
        "--on_error",
        choices=["raise", "reject", "empty"],
        default="raise",
        help="Treatment of unreadable files and missing captions: raise ends the script, reject rejects their rows, "
        "and empty gives an empty caption where one is missing and ends the script at an unreadable file.",
    )
    parser.add_argument("--num_proc", type=int, help="Processes that read file headers (default: this one).")
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace bucket columns, such as aspect_ratio, that the data set has."
    )
    parser.add_argument("--output_dir", required=True, help="Folder to write.")
    parser.add_settings(TableConfig)
    parser.add_settings(AssignmentRule, skip=["metric"])
    return parser


def make_table(config: TableConfig, spec: LatentSpec, native_sizes: Sequence[tuple[int, int]]) -> BucketTable:
    if config.buckets is not None:
        table = BucketTable.parse(config.buckets, frames=config.bucket_frames)
    elif config.table is not None:
        table = BucketTable.from_json(config.table.read_text())
    else:
        table = token_ladder(
            spec,
            config.bucket_tokens or [],
            frames=config.bucket_frames,
            sizes=native_sizes if config.bucket_sizes is None else config.bucket_sizes,
            max_aspect_ratio=config.max_aspect_ratio,
            aspect_step=config.aspect_step,
        )
    return table.images_at_video_sizes() if config.image_sizes == "video" else table


def main(args: argparse.Namespace) -> None:
    tables = from_flags(TableConfig, args)
    check_folder_writable(args.output_dir)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    spec = recipe.read_spec(args.pretrained_model_name_or_path)
    table, packed = make_table(tables, spec, recipe.native_sizes), open_table(spec, max_frames=args.max_frames)
    rule = from_flags(AssignmentRule, args)
    loaded = load_source(
        args.dataset,
        split=args.split,
        config_name=args.dataset_config_name,
        media_column=args.media_column,
        caption_column=args.caption_column,
    )
    print(loaded.describe())
    if loaded.caption_column is None:
        raise ColumnError(
            "No caption column was found; name one as `caption_column`, or write captions beside the files."
        )
    captions = check_captions(
        loaded.dataset, loaded.caption_column, on_error=args.on_error, media_column=loaded.column
    )
    on_error = "reject" if args.on_error == "reject" else "raise"
    metadata = MediaMetadata(loaded.column, target_fps=args.target_fps, root=loaded.root, on_error=on_error)
    sized = add_sizes(captions.dataset, metadata, read_headers=args.read_headers, num_proc=args.num_proc)
    dataset = captions.mark(sized.dataset)
    print(*filter(None, [captions.summary, sized.origin]), sep="\n")
    dataset = map_columns(
        dataset, BucketColumns(table, spec, rule=rule), num_proc=args.num_proc, overwrite=args.overwrite
    )
    if args.image_sizes == "video":
        sizes = (column_array(dataset, name) for name in SIZES)
        packed = packed.images_at_video_sizes(*sizes, rule=rule)
    prepared = PreparedDataset(
        dataset=dataset,
        table=table,
        open_table=packed,
        column=loaded.column,
        caption_column=loaded.caption_column,
        root=loaded.root,
    )
    prepared.save(args.output_dir)
    columns = {name: column_array(dataset, name) for name in (*SIZES, "bucket_id", "rejection")}
    print(describe_assignment(columns, table=table, spec=spec, rule=rule, name_rows=prepared.file_names))
    print(f"Saved to {args.output_dir}")


if __name__ == "__main__":
    run_script(main, make_parser)
