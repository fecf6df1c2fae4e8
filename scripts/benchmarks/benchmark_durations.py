r"""Compare one fixed size, padding, buckets and packs on clips as long and as large as those of published data sets.

python scripts/benchmarks/benchmark_durations.py --output scripts/benchmarks/results/durations.json \
    --figure docs/figures/durations.png

`DATA_SETS` in published_data_sets.py names what is documented of each data set and what is assumed. Durations
are drawn from distributions with the documented mean, and no file is read. All ways train at 16 frames per second, at
most 480×832 pixels a frame and 65,536 tokens per process; clips are cut to 161 frames (10 s), and the fixed size has
81 or 161.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
from published_data_sets import DATA_SETS
from yardsticks import VIDEO_MODEL, draw_bars, figure_at, finish, measure_plan, model_cost, yardstick_parser

from hf_bucketing import (
    AssignmentRule,
    BucketBatchSampler,
    BucketTable,
    LengthBatchSampler,
    PackBatchSampler,
    Size,
    token_ladder,
)
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.loaders.planned import PlannedBatchSampler
from hf_bucketing.report.measure import Sizes, Targets, bucket_targets, packed_targets

FPS, HEIGHT, WIDTH, MOST_FRAMES = 16, 480, 832, 161
MAX_TOKENS, PROCESSES, STRIP_LENGTH = 65_536, 8, 64
COST = model_cost(1536)
FRAMES = range(17, MOST_FRAMES + 1, 16)
FIXED = {"one size, 5 s": 81, "one size, 10 s": 161}
MIRADATA_SAMPLE = {5: 65.3, 25: 101.6, 50: 120.0, 95: 120.0}
"""Percentiles of the seconds of 100 clips: mira-space/MiraData (ae9a727), assets/miradata_v0_100_samples.csv."""


def bucket_table() -> BucketTable:
    """Return the frames of two tiers, 480×832 and a quarter of its area, at each number of frames."""
    tokens = [VIDEO_MODEL.num_tokens(Size(1, *shape)) for shape in ((HEIGHT, WIDTH), (HEIGHT // 2, WIDTH // 2))]
    ladder = token_ladder(VIDEO_MODEL, tokens, sizes=[(HEIGHT, WIDTH)], max_aspect_ratio=2.5)
    return BucketTable(
        sizes=tuple(size._replace(frames=count) for count in FRAMES for size in ladder.sizes),
        tiers=ladder.tiers * len(FRAMES),
    )


class Way(NamedTuple):
    """A way of batching: its sampler, and the target of each clip."""

    sampler: PlannedBatchSampler
    targets: Targets


def ways_of(sizes: Sizes) -> dict[str, Way]:
    limit: dict[str, Any] = {"max_tokens": MAX_TOKENS, "num_processes": PROCESSES}
    whole = sizes._replace(frames=np.minimum(sizes.frames, MOST_FRAMES))
    own = packed_targets(whole, spec=VIDEO_MODEL, max_area=HEIGHT * WIDTH)
    packs: dict[str, Any] = {"strip_length": STRIP_LENGTH, "cost_model": COST, "balance": "cost"}

    def bucketed(table: BucketTable) -> Way:
        targets = bucket_targets(sizes, table, spec=VIDEO_MODEL, rule=AssignmentRule())
        reasons = {"rejection": targets.rejection}
        sampler = BucketBatchSampler(targets.bucket_id, table=table, spec=VIDEO_MODEL, **limit, **reasons)
        return Way(sampler, targets)

    return {
        **{name: bucketed(BucketTable(sizes=(Size(count, HEIGHT, WIDTH),))) for name, count in FIXED.items()},
        "padding": Way(LengthBatchSampler(own.num_tokens, strategy="random", **limit), own),
        "buckets": bucketed(bucket_table()),
        "packs": Way(PackBatchSampler(own.num_tokens, **limit, **packs), own),
    }


def measure_way(way: Way, seconds: np.ndarray, *, padded: bool) -> dict[str, Any]:
    plan, targets = way.sampler.plan(), way.targets
    kept = np.unique(plan.indices)
    trained = np.minimum(targets.sizes.frames[kept] / FPS, seconds[kept])
    tokens = targets.num_tokens
    measured = measure_plan(plan, tokens, COST.cost(tokens), max_tokens=MAX_TOKENS, padded=padded)
    return {
        "lost clips": 1 - len(kept) / len(seconds),
        "kept seconds": float(trained.sum() / seconds.sum()),
        "kept area": float(targets.kept_area[kept].mean()),
        **{name: measured[name] for name in ("real ÷ computed", "fill", "largest ÷ mean cost")},
    }


def fitted_row(name: str, seconds: np.ndarray) -> dict[str, Any]:
    """Return what is documented of a data set beside what was drawn."""
    data = DATA_SETS[name]
    return {
        "data set": name,
        "clips": data.clips,
        "mean s, documented": data.mean_seconds,
        "mean s, drawn": float(seconds.mean()),
        "median s, drawn": float(np.median(seconds)),
        "up to 10 s, drawn": float((seconds <= 10).mean()),
    }


def make_parser() -> FlagParser:
    return yardstick_parser(__doc__, samples=20_000, unit="Clips of each data set")


def main(args: argparse.Namespace) -> None:
    fitted, rows = [], []
    for name, data in DATA_SETS.items():
        seconds, *columns = data.draw(args.samples, fps=FPS)
        fitted.append(fitted_row(name, seconds))
        for way, batches in ways_of(Sizes(*columns)).items():
            rows.append({"data set": name, "batches": way, **measure_way(batches, seconds, padded=way == "padding")})
    mira, *_ = DATA_SETS["MiraData"].draw(args.samples, fps=FPS)
    quantiles = [
        {"percentile": share, "published sample": seconds, "drawn": float(np.percentile(mira, share))}
        for share, seconds in MIRADATA_SAMPLE.items()
    ]
    with figure_at(args.figure, rows=2, height=13) as axes:
        for axis, key, title in zip(
            axes,
            ("kept seconds", "fill"),
            ("Seconds of the clips that are trained", "Real tokens ÷ limit of tokens"),
            strict=False,
        ):
            ways = list(dict.fromkeys(row["batches"] for row in rows))
            series = {way: [row[key] for row in rows if row["batches"] == way] for way in ways}
            draw_bars(axis, list(DATA_SETS), series, title=title, text="{:.0%}".format)
    counts = {"samples": args.samples, "max_tokens": MAX_TOKENS}
    sources = [
        {"data set": name, "documented": data.source, "assumed": data.assumed} for name, data in DATA_SETS.items()
    ]
    finish({**counts, "sources": sources, "fitted": fitted, "miradata_seconds": quantiles, "rows": rows}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
