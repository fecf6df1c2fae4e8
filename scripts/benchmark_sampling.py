r"""Measure epoch plans against the plain ways, as ratios of one run.

python scripts/benchmark_sampling.py --output scripts/benchmark_results/sampling.json

lhotse is not a dependency of this package; `pip install lhotse` into the environment of the benchmark, or its line is
left out. `--scale_rows 10000000 100000000` takes about 8 GB.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_mapping import median_seconds, memory_in_mb

from hf_bucketing import LatentSpec
from hf_bucketing.cost import CostModel
from hf_bucketing.errors import exit_with_message
from hf_bucketing.sampling import (
    BucketPlanConfig,
    EpochPlan,
    LengthPlanConfig,
    PackPlanConfig,
    plan_buckets,
    plan_lengths,
    plan_packs,
)

BUCKETS, BATCH_SIZE = 19, 8
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel.for_transformer(1536)


def in_fresh_process(function: Callable[..., Any], **options: Any) -> Any:
    """Return what a function returns in a process that did nothing before."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, options, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _send(function: Callable[..., Any], options: dict[str, Any], connection: Connection) -> None:
    connection.send(function(**options))


def timed_with_memory(function: Callable[[], Any], warm_up: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor seconds of a call and the MB by which it raises the peak memory of this process."""
    warm_up()  # what imports and a first call take is not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
    before, start = memory_in_mb("VmRSS"), time.process_time()
    function()
    return time.process_time() - start, memory_in_mb("VmHWM") - before


def bucket_column(rows: int) -> np.ndarray:
    """Buckets as uneven as those of real data: the k-th has 1 / k of the first one's rows."""
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
        left: Share of the epoch that is still to come.
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
    from hf_bucketing import novelai_ladder
    from hf_bucketing.loading import BucketBatchSampler

    column = bucket_column(rows)
    plan, plan_spread = median_seconds(lambda: plan_of_buckets(column), runs=runs)
    _, memory = in_fresh_process(bucket_plan_cost, rows=rows, num_processes=1)
    sampler = BucketBatchSampler(column, table=novelai_ladder(), batch_size=BATCH_SIZE, num_processes=1)
    sampler.plan()
    first, _ = median_seconds(lambda: next(iter(sampler)), runs=runs)
    iterate, _ = median_seconds(lambda: sum(map(len, sampler)), runs=runs)
    draw = seconds_per_draw(column, draws)
    batches = sampler.plan().num_batches
    return {
        "bucket_rows": rows,
        "bucket_plan_s": plan,
        "bucket_plan_spread_s": plan_spread,
        "bucket_plan_extra_memory_mb": memory,
        "bucket_first_batch_ms": first * 1e3,
        "bucket_iteration_samples_per_s": rows / iterate,
        "bucket_batches_per_s_with_plan": batches / (plan + iterate),
        "draw_by_draw_batches_per_s": 1 / draw,
        "bucket_times_faster_than_draw_by_draw": batches / (plan + iterate) * draw,
    }


def lengths_of(items: int) -> np.ndarray:
    """Log-normal durations from 1 to 30 s, of median 6 s."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(6), 0.8, items * 2))
    return drawn[(drawn >= 1) & (drawn <= 30)][:items]


def plan_of_lengths(lengths: np.ndarray, **options: Any) -> EpochPlan:
    config = LengthPlanConfig(capacity=60, num_buckets=30, **options)
    return plan_lengths(lengths, config, epoch=0, num_processes=1)


def length_plan_cost(items: int) -> tuple[float, float]:
    lengths = lengths_of(items)
    return timed_with_memory(lambda: plan_of_lengths(lengths), lambda: plan_of_lengths(lengths[:1000]))


def padding_of(batches: list[np.ndarray]) -> float:
    padded = sum(len(batch) * batch.max() for batch in batches)
    return 1 - sum(batch.sum() for batch in batches) / padded


def measure_lengths(items: int, lhotse_items: int, runs: int) -> dict[str, object]:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = lengths_of(items)
    seconds, _ = median_seconds(lambda: plan_of_lengths(lengths), runs=runs)
    _, memory = in_fresh_process(length_plan_cost, items=items)
    plan = plan_of_lengths(lengths)
    figures: dict[str, object] = {
        "length_items": items,
        "length_padding": plan.summary(num_tokens=lengths)["padding"],
        "length_items_per_s": items / seconds,
        "length_extra_memory_mb": memory,
        "length_fill_of_capacity": float(lengths.sum() / (60 * plan.num_batches)),
    }
    for strategy in ("random", "sorted"):
        other = plan_of_lengths(lengths, strategy=strategy)
        figures[f"length_padding_{strategy}"] = other.summary(num_tokens=lengths)["padding"]
    size = round(items / plan.num_batches)
    start = time.perf_counter()
    order = np.array(list(LengthGroupedSampler(size, lengths=lengths.tolist())))
    figures["transformers_items_per_s"] = items / (time.perf_counter() - start)
    batches = [lengths[order[at : at + size]] for at in range(0, items, size)]
    figures["transformers_batch_size"] = size
    figures["transformers_padding"] = float(padding_of(batches))
    figures["transformers_largest_batch_s"] = float(max(len(batch) * batch.max() for batch in batches))
    figures["length_times_faster_than_transformers"] = items / seconds / float(figures["transformers_items_per_s"])  # type: ignore[arg-type]
    if importlib.util.find_spec("lhotse") is None:
        print("lhotse is not installed; its figures are left out (pip install lhotse).", file=sys.stderr)
        return figures
    return {**figures, **measure_lhotse(lengths[:lhotse_items])}


def measure_lhotse(lengths: np.ndarray) -> dict[str, object]:
    import lhotse
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = CutSet.from_cuts(
        MonoCut(id=str(number), start=0, duration=float(length), channel=0) for number, length in enumerate(lengths)
    )
    start = time.perf_counter()
    sampler = DynamicBucketingSampler(cuts, max_duration=60, num_buckets=30, shuffle=True, drop_last=False)
    batches = [np.array([cut.duration for cut in batch]) for batch in sampler]
    seconds = time.perf_counter() - start
    ours, _ = median_seconds(lambda: list(map(len, plan_of_lengths(lengths).batches())), runs=3)
    return {
        "lhotse": lhotse.__version__,
        "lhotse_items": len(lengths),
        "lhotse_items_per_s": len(lengths) / seconds,
        "lhotse_padding": float(padding_of(batches)),
        "lhotse_fill_of_capacity": float(lengths.sum() / (60 * len(batches))),
        "length_times_faster_than_lhotse": seconds / ours,
    }


def token_mix(samples: int, capacity: int) -> np.ndarray:
    """Tokens of samples of 240p to 720p, aspect ratios 9:16 to 16:9, 30 % images and clips of 1 to 81 frames."""
    rng = np.random.default_rng(0)
    short = rng.integers(240, 721, 2 * samples)
    long = short * np.exp(rng.uniform(0, np.log(16 / 9), 2 * samples))
    frames = np.where(rng.random(2 * samples) < 0.3, 1, rng.integers(1, 82, 2 * samples))
    step = WAN.multiples[0]
    tokens = ((frames - 1) // WAN.temporal_stride + 1) * -(-short // step) * np.ceil(long / step).astype(np.int64)
    return tokens[tokens <= capacity][:samples]


def efficiency(plan: EpochPlan, tokens: np.ndarray, *, window: int = 1) -> float:
    """Return the mean over the steps (or windows of steps) of mean ÷ largest cost of the processes."""
    costs = COST.pack_cost(tokens[plan.indices], plan.offsets).reshape(-1, plan.num_processes)
    costs = costs[: len(costs) // window * window].reshape(-1, window, plan.num_processes).sum(axis=1)
    return float((costs.mean(axis=1) / costs.max(axis=1)).mean())


def measure_packs(samples: int) -> dict[str, float]:
    figures: dict[str, float] = {"pack_samples": samples}
    for capacity, name in ((32_768, "32k"), (65_536, "64k")):
        tokens = token_mix(samples, capacity)
        for strategy in ("sequential", "first_fit", "best_fit_decreasing"):
            config = PackPlanConfig(capacity=capacity, strategy=strategy)
            start = time.perf_counter()
            plan = plan_packs(tokens, config, epoch=0, num_processes=1)
            figures[f"pack_{name}_{strategy}_s"] = time.perf_counter() - start
            figures[f"pack_{name}_{strategy}_fill"] = float(tokens.sum() / (capacity * plan.num_batches))
        largest = float(COST.cost(tokens).max())
        ways: dict[str, dict[str, Any]] = {
            "random": {},
            "like_costs": {"balance": "cost"},
            "windows_of_8": {"balance": "cost", "accumulation_steps": 8},
            "filled_to_cost": {"max_cost": largest, "capacity": 4 * capacity},
        }
        for processes in (8, 64):
            for way, options in ways.items():
                config = PackPlanConfig(**{"capacity": capacity, "cost_model": COST, **options})
                plan = plan_packs(tokens, config, epoch=0, num_processes=processes)
                window = options.get("accumulation_steps", 1)
                figures[f"pack_{name}_efficiency_{processes}_{way}"] = efficiency(plan, tokens, window=window)
    return figures


def measure_scale(rows: list[int], processes: list[int]) -> dict[str, object]:
    """Measure plans of rising size, and tell by the largest two what 10 times the largest takes."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows in 19 buckets (default: 5.3 M).")
    parser.add_argument("--items", type=int, default=1_000_000, help="Lengths, and samples to pack (default: 1 M).")
    parser.add_argument("--lhotse_items", type=int, default=200_000, help="Lengths for lhotse (default: 200 k).")
    parser.add_argument("--draws", type=int, default=300, help="Draws of the plain sampler at each of five points.")
    parser.add_argument("--scale_rows", type=int, nargs="*", default=[], help="Sizes of plans, such as 10000000.")
    parser.add_argument(
        "--scale_processes", type=int, nargs="*", default=[8, 64, 512, 4096], help="At the first size."
    )
    parser.add_argument("--runs", type=int, default=5, help="Runs whose median counts (default: 5).")
    parser.add_argument("--output", type=Path, help="A JSON file for the figures.")
    args = parser.parse_args()
    figures: dict[str, object] = {
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    figures.update(measure_buckets(args.rows, args.runs, args.draws))
    figures.update(measure_lengths(args.items, args.lhotse_items, args.runs))
    figures.update(measure_packs(args.items))
    if args.scale_rows:
        figures.update(measure_scale(sorted(args.scale_rows), args.scale_processes))
    figures["load_at_end"] = os.getloadavg()[0]
    for name, figure in figures.items():
        print(f"{name:46} {figure:.4g}" if isinstance(figure, float) else f"{name:46} {figure}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    exit_with_message(main)
