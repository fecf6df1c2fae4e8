r"""Read the sizes of a data set's images and videos, assign buckets, and save all that training needs.

python scripts/prepare_dataset.py --dataset demo/media --pretrained_model_name_or_path demo/tiny-wan \
    --target_fps 8 --bucket_tokens 60,110,150 --bucket_frames 1,9,17,25 --output_dir demo/prepared
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from datasets import Dataset

from hf_bucketing import (
    AssignmentRule,
    BucketTable,
    ImageSizes,
    LatentSpec,
    OpenTable,
    Rejection,
    open_table,
    token_ladder,
)
from hf_bucketing.columns import BucketColumns, MediaMetadata, PreparedDataset, load_media_dataset, map_columns
from hf_bucketing.errors import exit_with_message
from hf_bucketing.models.registry import recipe_of


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="Folder with metadata.jsonl, or a data set on the hub.")
    parser.add_argument("--dataset_config_name", help="Configuration of a hub data set.")
    parser.add_argument("--split", default="train", help='Such as "train" or "train[:100]" (default: train).')
    parser.add_argument("--media_column", help="Image or video column (default: file_name, video or image).")
    parser.add_argument("--caption_column", default="caption", help="Text column (default: caption).")
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="Its configuration counts the tokens.")
    parser.add_argument("--target_fps", type=float, default=16.0, help="Frame rate to train at (default: 16).")
    parser.add_argument("--bucket_tokens", type=numbers, help="Token budgets per sample, such as 8190,18480.")
    parser.add_argument("--buckets", help='Instead: diffusers\' "height,width;height,width".')
    parser.add_argument("--table", type=Path, help="Instead: a file that BucketTable.to_json wrote.")
    parser.add_argument("--bucket_frames", type=numbers, default=[1, 17, 49, 81], help="Default: 1,17,49,81.")
    parser.add_argument("--max_frames", type=int, help="Packed samples are cut to these frames (default: never).")
    parser.add_argument("--max_aspect_ratio", type=float, default=2.5, help="Of token buckets (default: 2.5).")
    parser.add_argument("--max_upscale", type=float, default=1.0, help="Largest enlargement (default: 1.0, never).")
    parser.add_argument("--max_aspect_error", type=float, help="|ln(ratio / bucket's ratio)| (default: ln 2).")
    parser.add_argument(
        "--image_sizes",
        choices=["own", "video"],
        default="own",
        help="Images train at one-frame buckets, or packed at their own size; or both at sizes of videos.",
    )
    parser.add_argument("--on_error", choices=["raise", "reject"], default="raise", help="For unreadable files.")
    parser.add_argument("--num_proc", type=int, help="Processes that read file headers.")
    parser.add_argument("--output_dir", required=True, help="Folder to write.")
    return parser.parse_args()


def make_table(args: argparse.Namespace, spec: LatentSpec) -> BucketTable:
    if sum(option is not None for option in (args.bucket_tokens, args.buckets, args.table)) != 1:
        sys.exit("Give one of --bucket_tokens, --buckets and --table.")
    if args.buckets:
        table = BucketTable.parse(args.buckets, frames=args.bucket_frames)
    elif args.table:
        table = BucketTable.from_json(args.table.read_text())
    else:
        ladder = {"frames": args.bucket_frames, "max_aspect_ratio": args.max_aspect_ratio}
        table = token_ladder(spec, args.bucket_tokens, **ladder)
    return table.images_at_video_sizes() if args.image_sizes == "video" else table


def sizes_of_videos(dataset: Dataset, table: OpenTable, rule: AssignmentRule) -> ImageSizes:
    sizes = (dataset[name] for name in ("num_frames", "height", "width"))
    return table.images_at_video_sizes(*sizes, rule=rule).image_sizes


def main() -> None:
    args = parse_args()
    spec = recipe_of(args.pretrained_model_name_or_path).read_spec(args.pretrained_model_name_or_path)
    table, packed = make_table(args, spec), open_table(spec, max_frames=args.max_frames)
    rule = AssignmentRule(max_upscale=args.max_upscale, max_aspect_error=args.max_aspect_error)
    loaded = load_media_dataset(
        args.dataset,
        split=args.split,
        config_name=args.dataset_config_name,
        column=args.media_column,
        caption_column=args.caption_column,
    )
    metadata = MediaMetadata(loaded.column, target_fps=args.target_fps, root=loaded.root, on_error=args.on_error)
    dataset = map_columns(loaded.dataset, metadata, num_proc=args.num_proc)
    dataset = map_columns(dataset, BucketColumns(table, spec, rule=rule), num_proc=args.num_proc)
    PreparedDataset(
        dataset=dataset,
        table=table,
        spec=spec,
        column=loaded.column,
        caption_column=args.caption_column,
        root=loaded.root,
        image_sizes=sizes_of_videos(dataset, packed, rule) if args.image_sizes == "video" else None,
        max_frames=packed.max_frames,
    ).save(args.output_dir)
    for reason, count in sorted(Counter(dataset["rejection"]).items()):
        print(f"{count:8} rows {'assigned to a bucket' if reason == 0 else f'rejected: {Rejection(reason).name}'}")
    print(f"{len(set(dataset['bucket_id']) - {-1}):8} of {len(table)} buckets in use; saved to {args.output_dir}")


if __name__ == "__main__":
    exit_with_message(main)
