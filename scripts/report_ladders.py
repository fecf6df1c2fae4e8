r"""Measure what token ladders of different steps keep of samples, and how many buckets they take; print a table.

python scripts/report_ladders.py --bucket_tokens 8190,32760 --bucket_frames 1,17,49,81 \
    --bucket_sizes "480,832;720,1280"
"""

import argparse

from hf_bucketing import BucketTable, LatentSpec
from hf_bucketing.errors import exit_with_message
from hf_bucketing.report import LadderChoice, format_ladders, measure_ladder


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket_tokens", type=numbers, default=[8190, 32760], help="Default: 8190,32760.")
    parser.add_argument("--bucket_frames", type=numbers, default=[1, 17, 49, 81], help="Default: 1,17,49,81.")
    parser.add_argument(
        "--bucket_sizes", default="480,832;720,1280", help="The model's own sizes, or none (default: Wan's)."
    )
    parser.add_argument("--max_aspect_ratio", type=float, default=2.5, help="Default: 2.5.")
    parser.add_argument(
        "--aspect_steps",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.04, 0.08, 0.16, float("inf")],
        help="Steps to compare; inf leaves the common ratios alone (default: 0.04,0.08,0.16,inf).",
    )
    parser.add_argument("--strides", type=numbers, default=[4, 8], help="Of the VAE: temporal,spatial (default: 4,8).")
    parser.add_argument("--patch", type=numbers, default=[1, 2, 2], help="Of the transformer (default: 1,2,2).")
    parser.add_argument("--samples", type=int, default=100_000, help="Of the mix (default: 100000).")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    temporal, spatial = args.strides
    spec = LatentSpec(temporal_stride=temporal, spatial_stride=spatial, patch=tuple(args.patch))
    own = [] if args.bucket_sizes == "none" else [size[1:] for size in BucketTable.parse(args.bucket_sizes).sizes]
    choices = [
        LadderChoice(
            tokens=args.bucket_tokens,
            frames=args.bucket_frames,
            sizes=sizes,
            max_aspect_ratio=args.max_aspect_ratio,
            aspect_step=step,
        )
        for sizes in ([own, []] if own else [own])
        for step in args.aspect_steps
    ]
    print(format_ladders([measure_ladder(choice, spec, num_samples=args.samples) for choice in choices]))


if __name__ == "__main__":
    exit_with_message(main)
