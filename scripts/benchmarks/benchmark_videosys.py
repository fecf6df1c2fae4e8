r"""Compare padding, bucketing and packing on the data that VideoSys measures its data-centric parallelism (DCP) with.

python scripts/benchmarks/benchmark_videosys.py --output scripts/benchmarks/results/videosys.json \
    --figure docs/figures/videosys.png

Source: NUS-HPC-AI-Lab/VideoSys (commit 4cce477). `examples/training/open_sora/configs/benchmarks/baseline.yaml` has
2,000 videos, 50 times as many images, and the batch sizes; `videosys/training/datasets/open_sora/datasets.py` spreads
them by Zipf's law with exponent 3 and offset 5 over the pairs of resolution and frames, ordered by frames × lines.
17 frames become 5 latent frames, 16×16 pixels a token. A process is a group of GPUs that share a sample. The cost is
counted twice: by tokens alone, near to VideoSys' model with attention within frames and along time, and for attention
over the whole sample at the same width of 1152. Nothing is timed; the published factor of up to 2.1 is of GPUs.
"""

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
from yardsticks import draw_bars, figure_at, finish, measure_plan, model_cost, yardstick_parser

from hf_bucketing import BucketBatchSampler, BucketTable, CostModel, LengthBatchSampler, PackBatchSampler, Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import EpochPlan, LengthPlanConfig, PackPlanConfig

PROCESSES, IMAGES_PER_VIDEO, EXPONENT, OFFSET = 8, 50, 3, 5
LIMITS = (108_000, 216_000, 432_000)
BY_TOKENS, FULL_ATTENTION = CostModel(linear=1, quadratic=0), model_cost(1152)
WIDTHS = {144: 256, 240: 426, 360: 640, 480: 854, 720: 1280}
FRAMES = (1, 51, 102, 204, 408)
BATCH_SIZES = {
    144: (345, 48, 25, 12, 6),
    240: (128, 16, 8, 4, 2),
    360: (64, 7, 4, 2, 1),
    480: (32, 4, 2, 1, 1),
    720: (14, 1, 1, 1, 1),
}
KINDS = [(height, frames) for height in WIDTHS for frames in FRAMES]


def token_grid(height: int, frames: int) -> Size:
    """Return latent frames, rows and columns of tokens."""
    return Size(max(frames * 5 // 17, 1), -(-height // 16), -(-(WIDTHS[height] // 8) // 2))


TABLE = BucketTable(sizes=tuple(token_grid(*kind) for kind in KINDS))
TOKENS = np.array([size.pixels for size in TABLE.sizes])
PUBLISHED = {bucket: BATCH_SIZES[height][FRAMES.index(frames)] for bucket, (height, frames) in enumerate(KINDS)}


def bucket_column(videos: int) -> np.ndarray:
    """Return the bucket of each video and image, as many of each as VideoSys draws."""
    ids = []
    for count, images in ((IMAGES_PER_VIDEO * videos, True), (videos, False)):
        kinds = [kind for kind in KINDS if (kind[1] == 1) == images]
        kinds.sort(key=lambda kind: kind[0] * kind[1])
        shares = 1.0 / np.arange(OFFSET + 1, OFFSET + 1 + len(kinds)) ** EXPONENT
        counts = np.round(count * shares / shares.sum()).astype(np.int64)
        counts[0] += count - counts.sum()
        ids.append(np.repeat([KINDS.index(kind) for kind in kinds], counts))
    return np.concatenate(ids)


def dealt(plan: EpochPlan) -> EpochPlan:
    """Return the plan of one process with its batches dealt to several in turn, those that remain dropped."""
    batches = plan.num_batches // PROCESSES * PROCESSES
    last = plan.offsets[batches]
    return replace(
        plan,
        indices=plan.indices[:last],
        offsets=plan.offsets[: batches + 1],
        bucket_ids=plan.bucket_ids[:batches],
        num_processes=PROCESSES,
    )


def row_of(way: str, max_tokens: int, plan: EpochPlan, tokens: np.ndarray, *, padded: bool = False) -> dict[str, Any]:
    by_tokens, full = (
        measure_plan(plan, tokens, cost.cost(tokens), max_tokens=max_tokens, padded=padded)
        for cost in (BY_TOKENS, FULL_ATTENTION)
    )
    imbalance = by_tokens.pop("largest ÷ mean cost")
    return {
        "batches": way,
        "limit": max_tokens,
        **by_tokens,
        "largest ÷ mean, by tokens": imbalance,
        "largest ÷ mean, full attention": full["largest ÷ mean cost"],
    }


def published_rows(ids: np.ndarray, tokens: np.ndarray) -> list[dict[str, Any]]:
    """Measure their batch sizes, at the smallest limit; only the fill depends on it."""
    one, all_alike = (
        BucketBatchSampler(ids, table=TABLE, batch_size=PUBLISHED, num_processes=count).plan()
        for count in (1, PROCESSES)
    )
    return [
        row_of("their sizes, dealt in turn", LIMITS[0], dealt(one), tokens),
        row_of("their sizes, one bucket a step", LIMITS[0], all_alike, tokens),
    ]


def rows_at(max_tokens: int, ids: np.ndarray, tokens: np.ndarray) -> list[dict[str, Any]]:
    """Measure all ways at one limit; a larger sample is a batch by itself."""
    sizes = {bucket: max(max_tokens // int(count), 1) for bucket, count in enumerate(TOKENS)}
    limit: dict[str, Any] = {"max_tokens": max_tokens, "oversize": "own_batch"}
    padded = LengthPlanConfig(strategy="random", **limit)
    packs = PackPlanConfig(strip_length=1, **limit)
    balanced = replace(packs, cost_model=FULL_ATTENTION, balance="cost")
    samplers = {
        "padding": LengthBatchSampler(tokens, config=padded, num_processes=PROCESSES),
        "buckets by the limit": BucketBatchSampler(ids, table=TABLE, batch_size=sizes, num_processes=PROCESSES),
        "packs": PackBatchSampler(tokens, config=packs, num_processes=PROCESSES),
        "packs, like costs meet": PackBatchSampler(tokens, config=balanced, num_processes=PROCESSES),
    }
    return [
        row_of(way, max_tokens, sampler.plan(), tokens, padded=way == "padding") for way, sampler in samplers.items()
    ]


def make_parser() -> FlagParser:
    return yardstick_parser(__doc__, samples=2000, unit=f"Videos, and {IMAGES_PER_VIDEO} times as many images,")


def main(args: argparse.Namespace) -> None:
    ids = bucket_column(args.samples)
    tokens = TOKENS[ids]
    rows = published_rows(ids, tokens)
    for max_tokens in LIMITS:
        rows += rows_at(max_tokens, ids, tokens)
    figures = {
        "samples": len(ids),
        "processes": PROCESSES,
        "tokens_of_a_video_from": int(min(TOKENS[bucket] for bucket, kind in enumerate(KINDS) if kind[1] > 1)),
        "tokens_of_a_video_to": int(TOKENS.max()),
        "share_of_tokens_in_images": float(tokens[: IMAGES_PER_VIDEO * args.samples].sum() / tokens.sum()),
        "rows": rows,
    }
    titles = {
        "fill": "Share of the limits that real tokens take",
        "largest ÷ mean, full attention": "Largest ÷ mean cost (1: no process waits)",
    }
    with figure_at(args.figure, rows=2, height=11) as axes:
        for axis, (key, title) in zip(axes, titles.items(), strict=False):
            ways = list(dict.fromkeys(row["batches"] for row in rows))
            values = {(row["batches"], row["limit"]): row[key] for row in rows}
            series = {f"{limit:,} tokens": [values.get((way, limit)) for way in ways] for limit in LIMITS}
            draw_bars(axis, ways, series, title=title, text="{:.2f}".format)
    finish(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
