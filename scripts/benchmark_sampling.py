r"""Compare epoch plans with straightforward samplers, as ratios of one run.

python scripts/benchmark_sampling.py --output scripts/benchmark_results/sampling.json

`--scale_rows 10000000 100000000` takes about 8 GB.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from benchmark_tools import benchmark_parser, in_fresh_process, machine, report, seconds_of, timed_with_memory

from hf_bucketing import LatentSpec
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs

BUCKETS, BATCH_SIZE = 19, 8
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel.for_transformer(1536)


def bucket_column(rows: int) -> np.ndarray:
    """Draw bucket ids as uneven as those of real data: bucket k has 1 / k of the rows of the first."""
    shares = 1 / np.arange(1, BUCKETS + 1)
    rng = np.random.default_rng(0)
    bounds = np.cumsum(shares / shares.sum())
    column = np.empty(rows, np.int32)
    for start in range(0, rows, 2**22):
        part = column[start : start + 2**22]
        part[:] = np.searchsorted(bounds[:-1], rng.random(len(part)))
    return column


def plan_of_buckets(column: np.ndarray, num_processes: int = 1) -> EpochPlan:
    config = BucketPlanConfig(batch_size=BATCH_SIZE)
    return plan_buckets(column, config, epoch=0, num_processes=num_processes)


def bucket_plan_cost(rows: int, num_processes: int) -> tuple[float, float]:
    column = bucket_column(rows)
    return timed_with_memory(lambda: plan_of_buckets(column, num_processes), lambda: plan_of_buckets(column[:50_000]))


def draw_by_draw(column: np.ndarray, left: float) -> Iterator[list[int]]:
    """Draw batches as the seed describes: a list of rows per bucket, a weighted draw, a slice off the front.

    Args:
        column: Bucket of each row.
        left: Share of the epoch that remains.
    """
    rng = np.random.default_rng(0)
    lists = {}
    for bucket in range(BUCKETS):
        rows = rng.permutation(np.flatnonzero(column == bucket))
        lists[bucket] = rows[: int(len(rows) * left) // BATCH_SIZE * BATCH_SIZE].tolist()
    while any(lists.values()):
        weights = np.array([len(rows) for rows in lists.values()], np.float64)
        bucket = int(rng.choice(BUCKETS, p=weights / weights.sum()))
        batch, lists[bucket] = lists[bucket][:BATCH_SIZE], lists[bucket][BATCH_SIZE:]
        yield batch


def seconds_per_draw(column: np.ndarray, draws: int) -> float:
    """Return the mean over the epoch; lists are longest, and slices slowest, at its start."""
    times = []
    for left in (1.0, 0.75, 0.5, 0.25, 0.02):
        batches = draw_by_draw(column, left)
        next(batches)
        start = time.perf_counter()
        for _ in range(draws):
            next(batches)
        times.append((time.perf_counter() - start) / draws)
    return float(np.trapezoid(times[::-1], [0.02, 0.25, 0.5, 0.75, 1.0]) / 0.98)


def measure_buckets(rows: int, runs: int, draws: int) -> dict[str, float]:
    from datasets import Dataset

    from hf_bucketing import novelai_ladder
    from hf_bucketing.loaders import BucketBatchSampler

    def make_sampler() -> BucketBatchSampler:
        return BucketBatchSampler(dataset["bucket_id"], table=table, batch_size=BATCH_SIZE, num_processes=1)

    column = bucket_column(rows)
    (planned,) = seconds_of(lambda: plan_of_buckets(column), runs=runs)
    _, memory = in_fresh_process(bucket_plan_cost, rows=rows, num_processes=1)
    dataset, table = Dataset.from_dict({"bucket_id": column}), novelai_ladder()
    (made,) = seconds_of(make_sampler, runs=runs)
    sampler = make_sampler()
    sampler.plan()
    first, iterated = seconds_of(lambda: next(iter(sampler)), lambda: sum(map(len, sampler)), runs=runs)
    draw = seconds_per_draw(column, draws)
    batches_per_s = sampler.plan().num_batches / (planned.median + iterated.median)
    return {
        "bucket_rows": rows,
        "bucket_sampler_from_column_s": made.median,
        "bucket_plan_s": planned.median,
        "bucket_plan_spread_s": planned.spread,
        "bucket_plan_extra_memory_mb": memory,
        "bucket_first_batch_ms": first.median * 1e3,
        "bucket_iteration_samples_per_s": rows / iterated.median,
        "bucket_batches_per_s_with_plan": batches_per_s,
        "draw_by_draw_batches_per_s": 1 / draw,
        "bucket_times_faster_than_draw_by_draw": batches_per_s * draw,
    }


def token_mix(samples: int, max_tokens: int) -> np.ndarray:
    """Draw tokens of samples from 240p to 720p and 9:16 to 16:9, 30 % images and clips of 1 to 81 frames."""
    rng = np.random.default_rng(0)
    short = rng.integers(240, 721, 2 * samples)
    long = short * np.exp(rng.uniform(0, np.log(16 / 9), 2 * samples))
    frames = np.where(rng.random(2 * samples) < 0.3, 1, rng.integers(1, 82, 2 * samples))
    step = WAN.multiples[0]
    tokens = ((frames - 1) // WAN.temporal_stride + 1) * -(-short // step) * np.ceil(long / step).astype(np.int64)
    return tokens[tokens <= max_tokens][:samples]


def efficiency(plan: EpochPlan, tokens: np.ndarray, *, window: int = 1) -> float:
    """Return the mean over the steps (or windows of steps) of mean ÷ largest cost of the processes."""
    costs = COST.pack_cost(tokens[plan.indices], plan.offsets).reshape(-1, plan.num_processes)
    costs = costs[: len(costs) // window * window].reshape(-1, window, plan.num_processes).sum(axis=1)
    return float((costs.mean(axis=1) / costs.max(axis=1)).mean())


def measure_packs(samples: int) -> dict[str, float]:
    figures: dict[str, float] = {"pack_samples": samples}
    for max_tokens, name in ((32_768, "32k"), (65_536, "64k")):
        tokens = token_mix(samples, max_tokens)
        for strategy in ("sequential", "first_fit", "best_fit_decreasing"):
            config = PackPlanConfig(max_tokens=max_tokens, strategy=strategy)
            start = time.perf_counter()
            plan = plan_packs(tokens, config, epoch=0, num_processes=1)
            figures[f"pack_{name}_{strategy}_s"] = time.perf_counter() - start
            figures[f"pack_{name}_{strategy}_fill"] = float(tokens.sum() / (max_tokens * plan.num_batches))
        largest = float(COST.cost(tokens).max())
        ways: dict[str, dict[str, Any]] = {
            "random": {},
            "like_costs": {"balance": "cost"},
            "windows_of_8": {"balance": "cost", "accumulation_steps": 8},
            "filled_to_cost": {"max_cost": largest, "max_tokens": 4 * max_tokens},
        }
        for processes in (8, 64):
            for way, options in ways.items():
                config = PackPlanConfig(**{"max_tokens": max_tokens, "cost_model": COST, **options})
                plan = plan_packs(tokens, config, epoch=0, num_processes=processes)
                window = options.get("accumulation_steps", 1)
                figures[f"pack_{name}_efficiency_{processes}_{way}"] = efficiency(plan, tokens, window=window)
    return figures


def measure_streams(rows: int) -> dict[str, float]:
    """Group a stream of random sizes into batches of a table, beside reading the stream alone; in CPU seconds."""
    from datasets import Dataset

    from hf_bucketing import token_ladder
    from hf_bucketing.streaming import BucketGrouping, StreamingBucketBatcher

    rng = np.random.default_rng(0)
    sizes = {"num_frames": rng.integers(1, 120, rows), "height": rng.integers(200, 1200, rows)}
    stream = Dataset.from_dict({**sizes, "width": rng.integers(200, 1200, rows)}).to_iterable_dataset()
    table = token_ladder(WAN, [8190, 32760], frames=[1, 17, 49, 81])
    batches = StreamingBucketBatcher(stream, BucketGrouping(table=table, batch_size=BATCH_SIZE), collate_fn=as_it_is)
    start = time.process_time()
    alone = sum(1 for _ in stream)
    read = time.process_time()
    sent = sum(batch.size for batch in itertools.takewhile(lambda batch: not batch.ended, batches))
    grouped = time.process_time()
    return {
        "stream_rows": alone,
        "stream_rows_in_batches": sent,
        "stream_buckets": len(table),
        "stream_reading_us_per_row": (read - start) / rows * 1e6,
        "stream_reading_and_grouping_us_per_row": (grouped - read) / rows * 1e6,
    }


def as_it_is(rows: Any) -> dict[str, Any]:
    return {"rows": rows}


def measure_scale(rows: list[int], processes: list[int]) -> dict[str, object]:
    """Measure plans of growing size, and extrapolate from the largest two to 10 times the largest."""
    measured = {}
    for number in rows:
        seconds, megabytes = in_fresh_process(bucket_plan_cost, rows=number, num_processes=8)
        measured[number] = {
            "plan_cpu_s": seconds,
            "extra_memory_mb": megabytes,
            "bytes_per_row": megabytes * 2**20 / number,
        }
    by_processes = {}
    for number in processes:
        seconds, megabytes = in_fresh_process(bucket_plan_cost, rows=rows[0], num_processes=number)
        by_processes[number] = {"plan_cpu_s": seconds, "extra_memory_mb": megabytes}
    figures: dict[str, object] = {"scale_rows": measured, f"scale_processes_at_{rows[0]}_rows": by_processes}
    if len(rows) > 1:
        low, high = rows[-2:]
        exponent = np.log(measured[high]["plan_cpu_s"] / measured[low]["plan_cpu_s"]) / np.log(high / low)
        slope = (measured[high]["extra_memory_mb"] - measured[low]["extra_memory_mb"]) / (high - low)
        figures["scale_law"] = (
            f"seconds ~ rows^{exponent:.2f}, {slope * 2**20:.0f} bytes per row (fitted to {low:,} and {high:,} rows)"
        )
        figures["scale_extrapolated"] = {
            str(10 * high): {
                "plan_cpu_s": float(measured[high]["plan_cpu_s"] * 10**exponent),
                "extra_memory_mb": measured[high]["extra_memory_mb"] + slope * 9 * high,
            }
        }
    return figures


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows in 19 buckets.")
    parser.add_argument("--samples", type=int, default=1_000_000, help="Samples to pack.")
    parser.add_argument(
        "--draws", type=int, default=300, help="Draws of the straightforward sampler at each of five points."
    )
    parser.add_argument("--scale_rows", type=int, nargs="*", default=[], help="Sizes of plans, such as 10000000.")
    parser.add_argument(
        "--scale_processes",
        type=int,
        nargs="*",
        default=[8, 64, 512, 4096],
        help="Processes, for plans of the first size.",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("numpy")
    figures.update(measure_buckets(args.rows, args.runs, args.draws))
    figures.update(measure_packs(args.samples))
    figures.update(measure_streams(args.samples))
    if args.scale_rows:
        figures.update(measure_scale(sorted(args.scale_rows), args.scale_processes))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
