r"""Read the sizes of a data set's images and videos, assign buckets, and save all that training needs.

python scripts/prepare_dataset.py --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan \
    --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25 --output_dir demo/prepared
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

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
from hf_bucketing.command_line.flags import FlagParser, numbers
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import ColumnError, FlagError
from hf_bucketing.files import check_folder_writable
from hf_bucketing.models.recipes import recipe_of
from hf_bucketing.report import describe_assignment

SIZES = ("num_frames", "height", "width")


def heights_and_widths(text: str) -> list[tuple[int, int]]:
    return [] if text == "none" else [size[1:] for size in BucketTable.parse(text).sizes]


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument(
        "--dataset",
        required=True,
        help="A csv, tsv, json, jsonl or parquet file; a folder with such a file named metadata, or with a .txt "
        "caption beside each image and video; or a data set on the hub.",
    )
    parser.add_argument("--dataset_config_name", help="Configuration of a hub data set.")
    parser.add_argument("--split", default="train", help='Such as "train" or "train[:100]" (default: train).')
    parser.add_argument("--media_column", help="Image or video column (default: found by its name).")
    parser.add_argument("--caption_column", help="Text column (default: found by its name).")
    parser.add_argument("--read_headers", action="store_true", help="Read all sizes, also where columns hold them.")
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="Its configuration counts the tokens.")
    parser.add_argument("--target_fps", type=float, default=16.0, help="Frame rate to train at.")
    parser.add_argument(
        "--bucket_tokens",
        type=numbers,
        argument="tokens",
        help="Token budgets per sample, such as 8190,18480.",
    )
    parser.add_argument("--buckets", help='Instead: diffusers\' "height,width;height,width".')
    parser.add_argument("--table", type=Path, help="Instead: a file that BucketTable.to_json wrote.")
    parser.add_argument(
        "--bucket_frames",
        type=numbers,
        argument="frames",
        default=[1, 17, 49, 81],
        help="Frames of buckets.",
    )
    parser.add_argument(
        "--bucket_sizes",
        type=heights_and_widths,
        help="Sizes that token buckets contain in any case, such as 480,832;720,1280, or none (default: the model's).",
    )
    parser.add_argument(
        "--aspect_step",
        type=float,
        default=0.08,
        help="Distance of the aspect ratios of token buckets (0.08: 8 %%); a larger one makes fewer buckets.",
    )
    parser.add_argument("--max_frames", type=int, help="Packed samples are cut to these frames (default: never).")
    parser.add_argument("--max_aspect_ratio", type=float, default=2.5, help="Of token buckets.")
    parser.add_argument("--max_upscale", type=float, default=1.0, help="Largest enlargement.")
    parser.add_argument("--max_aspect_error", type=float, help="|ln(ratio / bucket's ratio)| (default: ln 2).")
    parser.add_argument(
        "--image_sizes",
        choices=["own", "video"],
        default="own",
        help="Images train at one-frame buckets, or packed at their own size; or both at sizes of videos.",
    )
    parser.add_argument(
        "--on_error",
        choices=["raise", "reject", "empty"],
        default="raise",
        help="Unreadable files and missing captions end the script, or their rows are rejected; empty: captions that "
        "are missing become empty ones, and only unreadable files end the script.",
    )
    parser.add_argument("--num_proc", type=int, help="Processes that read file headers (default: this one).")
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace bucket columns, such as aspect_ratio, that the data set has."
    )
    parser.add_argument("--output_dir", required=True, help="Folder to write.")
    return parser


def make_table(args: argparse.Namespace, spec: LatentSpec, native_sizes: Sequence[tuple[int, int]]) -> BucketTable:
    if sum(option is not None for option in (args.bucket_tokens, args.buckets, args.table)) != 1:
        raise FlagError("Give one of --bucket_tokens, --buckets and --table.")
    if args.buckets:
        table = BucketTable.parse(args.buckets, frames=args.bucket_frames)
    elif args.table:
        table = BucketTable.from_json(args.table.read_text())
    else:
        table = token_ladder(
            spec,
            args.bucket_tokens,
            frames=args.bucket_frames,
            sizes=native_sizes if args.bucket_sizes is None else args.bucket_sizes,
            max_aspect_ratio=args.max_aspect_ratio,
            aspect_step=args.aspect_step,
        )
    return table.images_at_video_sizes() if args.image_sizes == "video" else table


def main(args: argparse.Namespace) -> None:
    check_folder_writable(args.output_dir)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    spec = recipe.read_spec(args.pretrained_model_name_or_path)
    table, packed = make_table(args, spec, recipe.native_sizes), open_table(spec, max_frames=args.max_frames)
    rule = AssignmentRule(max_upscale=args.max_upscale, max_aspect_error=args.max_aspect_error)
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
