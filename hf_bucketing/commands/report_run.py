r"""Check training runs by their logs (every sample seen, equal steps, a falling loss); show and draw their losses.

%(prog)s demo/bucket demo/pack --figure demo/loss.png --html demo/run.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..command_line.flags import FlagParser
from ..files import check_writable, complete_file
from .script_settings import settings_of_scripts


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="Output folders of hf_bucketing train.")
    parser.add_argument("--figure", type=Path, help="PNG file to draw the loss curves into.")
    parser.add_argument("--html", type=Path, help="HTML file for the report as a page that holds everything itself.")
    parser.add_argument(
        "--by_bucket", action="store_true", help="Print the mean loss of each bucket, trained on and held out."
    )
    parser.add_argument(
        "--min_fall",
        type=float,
        help="Smallest fall of the loss that passes, as a share; below 0, how far it may rise (default: by half).",
    )
    parser.add_config("report_training", others=settings_of_scripts, names={"runs": ("output_dir",)})
    return parser


def main(args: argparse.Namespace) -> None:
    from ..report import render_page
    from ..report.charts import save_charts
    from ..runs.held_out import describe_held_out
    from ..runs.logs import Logs
    from ..runs.page import run_page
    from ..runs.review import (
        MIN_FALL,
        loss_charts,
        losses_by_bucket,
        review_experts,
        review_run,
        review_sources,
    )

    check_writable(args.figure, args.html)
    min_fall = MIN_FALL if args.min_fall is None else args.min_fall
    if args.html:
        page = render_page(run_page(args.runs, min_fall=min_fall))
        with complete_file(args.html) as partial:
            partial.write_text(page, encoding="utf-8")
        print(f"Page: {args.html}")
    runs = [Logs(folder) for folder in args.runs]
    reviews = [review_run(run, min_fall=min_fall) for run in runs]
    if args.figure:
        save_charts(args.figure, loss_charts(runs), columns=2)
        print(f"Loss curves: {args.figure}")
    for review in reviews:
        print(review)
    for run in runs:
        said = (*describe_held_out(run, by_bucket=args.by_bucket), *review_experts(run), *review_sources(run))
        for line in said:
            print(line)
    for run in runs if args.by_bucket else []:
        for bucket, (count, loss) in losses_by_bucket(run).items():
            print(f"{run.name}: bucket {bucket:4}, {count:6} samples in the second half, mean loss {loss:.4f}")
    if not all(review.passed for review in reviews):
        sys.exit("A check failed; see above.")
