r"""Compare Open-Sora 2's table of batch sizes with sizes that follow from one limit of tokens.

python scripts/benchmarks/benchmark_open_sora.py --output scripts/benchmarks/results/open_sora.json \
    --figure docs/figures/open_sora.png

The table is `bucket_config` of hpcaitech/Open-Sora, configs/diffusion/train/stage1.py (commit c4f981b): batch sizes
that its authors searched on H200 GPUs for 11 B weights, with the seconds per step that they note for some. A clip has
512 tokens of text beside its own; the width of the model, for the cost, is 3072. Tokens alone are counted here.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from published_data_sets import DATA_SETS
from yardsticks import VIDEO_MODEL, draw_bars, figure_at, finish, measure_plan, model_cost, yardstick_parser

from hf_bucketing import BucketBatchSampler, BucketTable, PackBatchSampler, Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script

TEXT_TOKENS, MAX_TOKENS, PROCESSES = 512, 33_800, 8
COST = model_cost(3072)


class Published(NamedTuple):
    """Published batch size of square clips of `first` to `last` frames, and seconds per step at the last if noted."""

    side: int
    first: int
    last: int
    batch_size: int
    seconds: float | None = None


PUBLISHED = (
    Published(256, 1, 1, 45, 6.22),
    Published(256, 5, 33, 12, 7.02),
    Published(256, 37, 65, 6, 6.79),
    Published(256, 69, 97, 4, 6.84),
    Published(256, 101, 129, 3, 7.48),
    Published(768, 1, 1, 13),
    Published(1024, 1, 1, 7),
)
TABLE = BucketTable(sizes=tuple(Size(frames, 256, 256) for frames in range(5, 130, 4)))


def tokens_of(row: Published) -> int:
    """Return the tokens of a clip of the most frames of a row, with its text."""
    return VIDEO_MODEL.num_tokens(Size(row.last, row.side, row.side)) + TEXT_TOKENS


def batch_table() -> list[dict[str, Any]]:
    return [
        {
            "size": f"{row.side}×{row.side}",
            "frames": str(row.last) if row.first == row.last else f"{row.first}–{row.last}",
            "tokens, longest": tokens_of(row),
            "published": row.batch_size,
            "by one limit": MAX_TOKENS // tokens_of(row),
            "by one limit, shortest": MAX_TOKENS // tokens_of(row._replace(last=row.first)),
            "tokens, published batch": row.batch_size * tokens_of(row),
            "published s per step": row.seconds,
        }
        for row in PUBLISHED
    ]


def agreeing_limits(rows: tuple[Published, ...]) -> tuple[int, int]:
    """Return the smallest and the largest limit of tokens that gives all these batch sizes."""
    return (
        max(row.batch_size * tokens_of(row) for row in rows),
        min((row.batch_size + 1) * tokens_of(row) for row in rows) - 1,
    )


def mean_fill(batch_size_of: Callable[[Size], int]) -> float:
    """Return the mean share of the limit that a batch fills, over the lengths of the table."""
    tokens = [VIDEO_MODEL.num_tokens(size) + TEXT_TOKENS for size in TABLE.sizes]
    filled = [batch_size_of(size) * count / MAX_TOKENS for size, count in zip(TABLE.sizes, tokens, strict=True)]
    return sum(filled) / len(filled)


def published_size(size: Size) -> int:
    return next(row.batch_size for row in PUBLISHED if row.first <= size.frames <= row.last)


def size_by_limit(size: Size) -> int:
    return MAX_TOKENS // (VIDEO_MODEL.num_tokens(size) + TEXT_TOKENS)


def measure_fill(name: str, frames: np.ndarray) -> list[dict[str, Any]]:
    """Measure epochs of clips of 256×256 pixels and 5 frames or more, longer ones cut to 129."""
    sides = np.full(len(frames), 256)
    ids = TABLE.assign(frames, sides, sides).bucket_id
    tokens = TABLE.num_tokens(ids, spec=VIDEO_MODEL)
    published = {bucket: published_size(size) for bucket, size in enumerate(TABLE.sizes)}
    limit: dict[str, Any] = {"max_tokens": MAX_TOKENS, "text_tokens": TEXT_TOKENS, "num_processes": PROCESSES}
    samplers = {
        "their batch sizes": BucketBatchSampler(ids, table=TABLE, batch_size=published, num_processes=PROCESSES),
        "one limit of tokens": BucketBatchSampler(ids, table=TABLE, spec=VIDEO_MODEL, **limit),
        "packs": PackBatchSampler(tokens, strip_length=1, **limit),
        "packs by cost": PackBatchSampler(tokens, strip_length=1, **limit, balance="cost", cost_model=COST),
    }
    whole = tokens + TEXT_TOKENS
    rows = []
    for way, sampler in samplers.items():
        measured = measure_plan(sampler.plan(), whole, COST.cost(whole), max_tokens=MAX_TOKENS)
        del measured["real ÷ computed"]  # the clips of a bucket are of one length
        rows.append({"clips": name, "batches": way, **measured})
    return rows


def durations(samples: int) -> dict[str, np.ndarray]:
    """Draw frames of clips: 5 to 129 evenly, and durations of Panda-70M at 24 frames per second."""
    _, panda, _, _ = DATA_SETS["Panda-70M"].draw(samples, fps=24)
    return {
        "5 to 129 frames, evenly": np.random.default_rng(0).choice(np.arange(5, 130, 4), samples),
        "Panda-70M at 24 fps": np.clip(panda, 5, 129),
    }


def make_parser() -> FlagParser:
    return yardstick_parser(__doc__, samples=200_000)


def main(args: argparse.Namespace) -> None:
    fill = [row for name, frames in durations(args.samples).items() for row in measure_fill(name, frames)]
    agreeing = tuple(row for row in PUBLISHED if MAX_TOKENS // tokens_of(row) == row.batch_size)
    low, high = agreeing_limits(agreeing)
    figures = {
        "samples": args.samples,
        "max_tokens": MAX_TOKENS,
        "rows_published": len(PUBLISHED),
        "rows_agreeing": len(agreeing),
        "agreeing_limit_from": low,
        "agreeing_limit_to": high,
        "mean_fill_published": mean_fill(published_size),
        "mean_fill_by_limit": mean_fill(size_by_limit),
        "table": batch_table(),
        "fill": fill,
    }
    with figure_at(args.figure, rows=1, height=4.2) as axes:
        for axis in axes:
            names = list(dict.fromkeys(row["clips"] for row in fill))
            ways = list(dict.fromkeys(row["batches"] for row in fill))[:3]
            series = {way: [row["fill"] for row in fill if row["batches"] == way] for way in ways}
            draw_bars(axis, names, series, title="Share of the token limit that is filled", text="{:.0%}".format)
    finish(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
