r"""Encode the latents and captions of a prepared data set once, for training that decodes and encodes nothing.

python scripts/cache_latents.py --dataset_dir demo/prepared --pretrained_model_name_or_path demo/tiny-wan \
    --cache_dir demo/cache --output_dir demo/cached

Also under `accelerate launch`: each process encodes its share. Run again, it encodes only what is missing or changed.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator

from hf_bucketing import BucketingError
from hf_bucketing.caching.job import CacheJob
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import FlagError
from hf_bucketing.files import check_folder_writable
from hf_bucketing.media import ViewRule
from hf_bucketing.models.recipes import recipe_of

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--dataset_dir", required=True, help="Folder that scripts/prepare_dataset.py wrote.")
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="Its VAE and text encoder encode.")
    parser.add_argument("--cache_dir", required=True, help="Folder of the entries; one in use is completed.")
    parser.add_argument("--output_dir", required=True, help="Prepared folder to write, with the keys of the entries.")
    parser.add_argument(
        "--batching", choices=["bucket", "pack"], default="bucket", help="Sizes: of buckets, or of packs."
    )
    parser.add_argument("--batch_size", type=int, default=8, help="Samples that are encoded together.")
    parser.add_argument("--num_threads", type=int, default=2, help="Threads that decode.")
    parser.add_argument("--random_crop", action="store_true", help="Crop and start as training does in epoch 0.")
    parser.add_argument("--frame_picking", choices=["start", "uniform", "random"], help="Which frames of longer ones.")
    parser.add_argument("--flip_probability", type=float, default=0.0, help="Of swapping left and right.")
    parser.add_argument(
        "--video_decoder",
        choices=["pyav", "torchcodec"],
        default="pyav",
        help="What decodes videos.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Of random crops, frames and flips.")
    parser.add_argument("--mixed_precision", choices=list(DTYPES), default="no", help="Of the text encoder.")
    parser.add_argument("--max_sequence_length", type=int, help="Text tokens per caption (default: the pipeline's).")
    parser.add_argument("--on_error", choices=["raise", "reject"], default="raise", help="For unreadable files.")
    return parser


def main(args: argparse.Namespace) -> None:
    if Path(args.output_dir).resolve() in (Path(args.cache_dir).resolve(), *Path(args.cache_dir).resolve().parents):
        raise FlagError("--cache_dir must lie outside --output_dir, which is replaced as a whole.")
    check_folder_writable(args.cache_dir, args.output_dir)
    accelerator = Accelerator()
    prepared = PreparedDataset.load(args.dataset_dir)
    recipe = recipe_of(args.pretrained_model_name_or_path)
    if prepared.spec != recipe.read_spec(args.pretrained_model_name_or_path):
        raise BucketingError(
            f"{args.dataset_dir} was prepared for {prepared.spec}, which is not what "
            f"{args.pretrained_model_name_or_path} has; prepare it again for this model."
        )
    views = ViewRule(
        random_crop=args.random_crop,
        frame_picking=args.frame_picking,
        flip_probability=args.flip_probability,
        video_decoder=args.video_decoder,
    )
    loaded = recipe.load(args.pretrained_model_name_or_path, max_sequence_length=args.max_sequence_length)
    loaded.to(accelerator.device, dtype=DTYPES[args.mixed_precision])
    job = CacheJob(
        recipe=loaded,
        folder=args.cache_dir,
        batching=args.batching,
        views=views,
        seed=args.seed,
        batch_size=args.batch_size,
        num_threads=args.num_threads,
        on_error=args.on_error,
    )
    cached, counts = job.run(prepared)
    if cached is not None:
        cached.save(args.output_dir)
        for name in ("encoded", "found", "unreadable", "rejected"):
            print(f"{counts[name]:8} rows {name}")
        for name in ("encoded", "found"):
            print(f"{counts[f'captions {name}']:8} captions {name}")
        print(f"Saved to {args.output_dir}; entries in {args.cache_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run_script(main, make_parser, interrupted="What was encoded stays in the cache; run the same command again.")
