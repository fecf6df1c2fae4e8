r"""Compare bucket tables of as many buckets: a token ladder, k-means on logarithms of aspect ratios, and a chosen one.

python scripts/benchmarks/benchmark_tables.py --output scripts/benchmarks/results/tables.json

Sizes are drawn from `DATA_SETS` in published_data_sets.py at 16 frames per second, and from the log-normal mix of
`hf_bucketing report ladders`; no file is read. Budgets and numbers of frames are those of docs/choosing-a-table.md.
k-means (the best of ten starts) gets the numbers of frames and budgets of each sample and as many buckets in each as
the chosen table; its centres become the sizes nearest in ratio, of those that the chosen table chooses from.

Kept area counts samples that fill any of these sizes, with nothing for those that a table gives no bucket.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from published_data_sets import DATA_SETS
from yardsticks import VIDEO_MODEL, finish

from hf_bucketing import BucketTable, fitted_ladder, token_ladder
from hf_bucketing.buckets.kept import kept_area
from hf_bucketing.buckets.ladders import all_ladder_sizes
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.report.compare import ladder_mix
from hf_bucketing.report.measure import Sizes

FPS, TOKENS, FRAMES = 16, [8190, 32760], [1, 17, 49, 81]
LIMITS: dict[str, Any] = {"frames": FRAMES, "sizes": (), "max_aspect_ratio": 2.5}
MIX = "log-normal mix"
STEPS = {"0.08": 0.08, "common ratios": math.inf}
PER_BUDGET = (1, 2)
STARTS, ROUNDS = 10, 100


def kept(table: BucketTable, samples: Sizes) -> float:
    """Return the mean of kept areas in per cent; samples without a bucket keep nothing."""
    ids = table.assign(*samples).bucket_id
    _, heights, widths = np.array(table.sizes, np.int64)[np.maximum(ids, 0)].T
    return 100 * float(
        (kept_area(samples.heights, samples.widths, target_heights=heights, target_widths=widths) * (ids >= 0)).mean()
    )


def centres(values: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """Return the centres of Lloyd's k-means, started by k-means++, of the start with the least squared distances."""
    best, least = values[:1], math.inf
    distinct, counts = np.unique(values, return_counts=True)
    number = min(number, len(distinct))
    for _ in range(STARTS):
        chosen = [rng.choice(distinct, p=counts / counts.sum())]
        while len(chosen) < number:
            weights = counts * np.min((distinct[:, None] - np.array(chosen)) ** 2, axis=1)
            chosen.append(rng.choice(distinct, p=weights / weights.sum()))
        means = np.sort(chosen)
        for _ in range(ROUNDS):
            nearest = np.searchsorted((means[:-1] + means[1:]) / 2, distinct)
            sums = np.bincount(nearest, counts * distinct, minlength=number)
            totals = np.bincount(nearest, counts, minlength=number)
            moved = np.where(totals, sums / np.maximum(totals, 1), means)
            if np.array_equal(moved, means):
                break
            means = moved
        distance = float((counts * (distinct - means[nearest]) ** 2).sum())
        if distance < least:
            best, least = means, distance
    return best


def k_means(every: BucketTable, samples: Sizes, chosen: BucketTable) -> BucketTable:
    """Return the table of k-means, with as many buckets as the chosen one in each number of frames and budget."""
    rng = np.random.default_rng(0)
    keys = np.array([(size.frames, tier) for size, tier in zip(every.sizes, every.tiers, strict=True)])
    ratios = np.log([size.aspect_ratio for size in every.sizes])
    ids = every.assign(*samples).bucket_id
    positions: set[int] = set()
    groups = [(size.frames, tier) for size, tier in zip(chosen.sizes, chosen.tiers, strict=True)]
    for group in dict.fromkeys(groups):
        members = np.flatnonzero((keys == group).all(axis=1))
        rows = np.isin(ids, members)
        means = centres(np.log(samples.widths[rows] / samples.heights[rows]), groups.count(group), rng)
        positions |= {int(members[np.abs(ratios[members] - mean).argmin()]) for mean in means}
    ordered = sorted(positions)
    return BucketTable(sizes=tuple(every.sizes[i] for i in ordered), tiers=tuple(every.tiers[i] for i in ordered))


def row_of(name: str, samples: Sizes, every: BucketTable, number: int) -> dict[str, Any]:
    """Return what a chosen table of so many buckets and that of k-means keep."""
    chosen = fitted_ladder(VIDEO_MODEL, TOKENS, samples, num_buckets=number, **LIMITS)
    return {
        "data set": name,
        "buckets": number,
        "k-means, %": kept(k_means(every, samples, chosen), samples),
        "chosen, %": kept(chosen, samples),
    }


def data_sets(count: int) -> Iterator[tuple[str, Sizes]]:
    """Iterate over the names and samples of data sets."""
    for name, data in DATA_SETS.items():
        yield name, Sizes(*data.draw(count, fps=FPS)[1:])
    yield MIX, ladder_mix(FRAMES, math.log(LIMITS["max_aspect_ratio"]), num_samples=count)


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--samples", type=int, default=100_000, help="Samples of each data set that are drawn.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    return parser


def measure(name: str, drawn: Sizes, every: BucketTable) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of tables with one and two buckets per budget, and of tables with as many as ladders use."""
    ids = every.assign(*drawn).bucket_id
    samples = drawn.select(np.flatnonzero(ids >= 0))
    budgets = len({(every.sizes[i].frames, every.tiers[i]) for i in np.unique(ids[ids >= 0]).tolist()})
    few = [row_of(name, samples, every, budgets * each) for each in PER_BUDGET]
    beside = {}
    for step, distance in STEPS.items():
        ladder = token_ladder(VIDEO_MODEL, TOKENS, aspect_step=distance, **LIMITS)
        of_ladder = ladder.assign(*samples).bucket_id
        used = len(np.unique(of_ladder[of_ladder >= 0]))
        row = row_of(name, samples, every, used)
        beside.setdefault(used, {**row, "ladder, %": kept(ladder, samples), "aspect_step": step})
    return few, [*beside.values()]


def main(args: argparse.Namespace) -> None:
    every, _ = all_ladder_sizes(VIDEO_MODEL, TOKENS, **LIMITS, tolerance=0.1, own_budgets=True)
    few: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for name, drawn in data_sets(args.samples):
        of_few, of_beside = measure(name, drawn, every)
        few, beside = few + of_few, beside + of_beside
    gains = [row["chosen, %"] - row["k-means, %"] for row in (*few, *beside)]
    figures = {"samples": args.samples, "few_buckets": few, "beside_ladders": beside}
    spread = {"mean_gain": float(np.mean(gains)), "least_gain": min(gains), "largest_gain": max(gains)}
    finish({**figures, **spread}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
