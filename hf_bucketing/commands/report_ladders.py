r"""Print the kept area of token ladders of different steps, that of all reports, and how many buckets they take.

With --num_buckets, tables of so many buckets that are chosen from the samples stand beside them. The last line tells
what NovelAI's buckets keep.

%(prog)s --bucket_tokens 8190,32760 --bucket_frames 1,17,49,81 \
    --bucket_sizes "480,832;720,1280"
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import AssignmentRule, BucketTable, LatentSpec, fitted_ladder, novelai_ladder, token_ladder
from ..buckets.ladders import BUCKET_FRAMES
from ..command_line.flags import FlagParser, numbers
from ..files import check_writable, complete_file
from ..report import count_kept, measure_ladder
from ..report.compare import LadderReport, ladder_mix
from ..report.markdown import markdown_table


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--bucket_tokens", type=numbers, default=[8190, 32760], help="Token budgets per sample.")
    parser.add_argument(
        "--bucket_frames", type=numbers, default=list(BUCKET_FRAMES), help="Numbers of frames of buckets."
    )
    parser.add_argument("--bucket_sizes", default="480,832;720,1280", help="Sizes that the ladder contains, or none.")
    parser.add_argument("--max_aspect_ratio", type=float, default=2.5, help="Largest aspect ratio.")
    parser.add_argument(
        "--aspect_steps",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.04, 0.08, 0.16, float("inf")],
        help="Steps between aspect ratios to compare; inf keeps only the common ratios.",
    )
    parser.add_argument(
        "--num_buckets",
        type=numbers,
        default=[],
        help="Numbers of buckets of tables that are chosen from the samples (default: none).",
    )
    parser.add_argument("--strides", type=numbers, default=[4, 8], help="Temporal and spatial stride of the VAE.")
    parser.add_argument("--patch", type=numbers, default=[1, 2, 2], help="Patch of the transformer.")
    parser.add_argument("--samples", type=int, default=100_000, help="Samples to measure on.")
    parser.add_argument("--json", type=Path, help="JSON file for the numbers, as the documentation shows them.")
    return parser


def row_of(sizes: Sequence[tuple[int, int]], step: str, report: LadderReport) -> dict[str, Any]:
    """Return a ladder as a row of the documentation's table, shares in per cent."""
    return {
        "own sizes": ", ".join(f"{height}×{width}" for height, width in sizes) or "none",
        "aspect_step": step,
        "buckets": report.num_buckets,
        "common ratios, %": 100 * report.common,
        "worst ratio, %": 100 * report.worst,
        "mix, %": 100 * report.mix,
        "too small, %": 100 * report.too_small,
        "short batches, %": 100 * report.short_batches,
    }


def tables_of(
    args: argparse.Namespace, spec: LatentSpec, sizes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, BucketTable]]:
    """Iterate over the tables to compare, with own sizes of the model, each with its step of aspect ratios."""
    limits: dict[str, Any] = {"frames": args.bucket_frames, "sizes": sizes, "max_aspect_ratio": args.max_aspect_ratio}
    for step in args.aspect_steps:
        yield f"{step:g}", token_ladder(spec, args.bucket_tokens, aspect_step=step, **limits)
    if args.num_buckets:
        mix = ladder_mix(args.bucket_frames, math.log(args.max_aspect_ratio), num_samples=args.samples)
    for number in args.num_buckets:
        yield "chosen", fitted_ladder(spec, args.bucket_tokens, mix, num_buckets=number, **limits)


def main(args: argparse.Namespace) -> None:
    check_writable(args.json)
    temporal, spatial = args.strides
    spec = LatentSpec(temporal_stride=temporal, spatial_stride=spatial, patch=tuple(args.patch))
    table_sizes = (
        [] if args.bucket_sizes == "none" else [size[1:] for size in BucketTable.parse(args.bucket_sizes).sizes]
    )
    rows = []
    for sizes in [table_sizes, []] if table_sizes else [table_sizes]:
        for step, table in tables_of(args, spec, sizes):
            report = measure_ladder(table, spec, max_aspect_ratio=args.max_aspect_ratio, num_samples=args.samples)
            rows.append(row_of(sizes, step, report))
    print(markdown_table(rows, ".1f"))
    rules = [AssignmentRule(), AssignmentRule.novelai()]
    ours, novelai = count_kept(novelai_ladder(), rules, num_samples=args.samples)
    print(
        f"\nOf {args.samples:,} images of the mix, novelai_ladder() keeps {ours:,} under the default rule (nothing is "
        f"enlarged) and {novelai:,} under AssignmentRule.novelai()."
    )
    if args.json is not None:
        kept = {"samples": args.samples, "novelai_kept_by_default": ours, "novelai_kept_by_its_rule": novelai}
        with complete_file(args.json) as partial:
            partial.write_text(json.dumps({"rows": rows, **kept}, indent=2) + "\n")
