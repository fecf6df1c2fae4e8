r"""Time bucketed epochs as users run them, and count what packs, streams and plans of many rows cost.

python scripts/benchmarks/benchmark_sampling.py --output scripts/benchmarks/results/sampling.json

Epochs are timed from the columns of a `Dataset` to their end, through `accelerator.prepare(DataLoader(…))` in one and
in two processes. `--novelai_path bucketmanager.py` adds the file of that name of NovelAI's repository
novelai-aspect-ratio-bucketing. `--scale_rows 10000000 100000000` takes about 8 GB.
"""

import argparse
import importlib.util
import itertools
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from benchmark_tools import (
    RowNumbers,
    benchmark_parser,
    in_fresh_process,
    in_fresh_processes,
    machine,
    measure_parts,
    seconds_of,
    seconds_of_epoch,
    timed_with_memory,
)
from torch.utils.data import DataLoader

from hf_bucketing import AssignmentRule, BucketBatchSampler, BucketColumns, LatentSpec, map_columns, novelai_ladder
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import BucketPlanConfig, EpochPlan, PackPlanConfig, plan_buckets, plan_packs

BUCKETS, BATCH_SIZE = 19, 8
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel.for_transformer(1536)
SHUFFLE = "torch: shuffle=True, batches of any sizes"
LOOP = "a loop as NovelAI describes it, written here"
NOVELAI = "NovelAI: bucketmanager.py"
OURS = "BucketBatchSampler"
PARTS = ["epochs", "buckets", "weights", "packs", "streams", "scale"]
"""What is measured, one after the other."""


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


def image_sizes(rows: int) -> dict[str, np.ndarray]:
    """Draw widths and heights of images of log-normal aspect ratios and areas."""
    rng = np.random.default_rng(0)
    ratio, side = np.exp(rng.normal(0, 0.35, rows)), np.exp(rng.normal(np.log(1000), 0.3, rows))
    return {"width": (side * np.sqrt(ratio)).astype(int), "height": (side / np.sqrt(ratio)).astype(int)}


class DrawByDraw:
    """Draw batches as the README of NovelAI's repository describes: lists, a weighted draw, a slice off the front.

    Each process takes its share of the shuffled rows; what fills no batch of a bucket makes mixed batches.

    Args:
        sizes: Columns `width` and `height`.
        rank: Process, of `num_processes`.
        num_processes: Processes, which all draw alone.
    """

    def __init__(self, sizes: dict[str, np.ndarray], *, rank: int, num_processes: int) -> None:
        self.rng, self.rank, self.num_processes = np.random.default_rng(0), rank, num_processes
        aspects = np.array([size.width / size.height for size in novelai_ladder().sizes])
        ratios = (sizes["width"] / sizes["height"]).tolist()
        self.buckets = np.array([np.abs(aspects - ratio).argmin() for ratio in ratios])

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.rng.permutation(len(self.buckets))
        rows = rows[: len(rows) // (BATCH_SIZE * self.num_processes) * BATCH_SIZE * self.num_processes]
        rows = rows[self.rank :: self.num_processes]
        lists = {int(bucket): rows[self.buckets[rows] == bucket].tolist() for bucket in np.unique(self.buckets[rows])}
        mixed: list[int] = []
        for bucket, bucket_rows in lists.items():
            full = len(bucket_rows) // BATCH_SIZE * BATCH_SIZE
            lists[bucket], mixed = bucket_rows[:full], mixed + bucket_rows[full:]
        lists[-1] = mixed
        while lists := {bucket: bucket_rows for bucket, bucket_rows in lists.items() if bucket_rows}:
            weights = np.array([len(bucket_rows) for bucket_rows in lists.values()], np.float64)
            bucket = int(self.rng.choice(list(lists), p=weights / weights.sum()))
            batch, lists[bucket] = lists[bucket][:BATCH_SIZE], lists[bucket][BATCH_SIZE:]
            yield batch


class NovelAIBatches:
    """Batches of one process by NovelAI's own `BucketManager`, from a file that the user has.

    Args:
        path: The file bucketmanager.py.
        sizes: Columns `width` and `height`.
        rank: Process, of `num_processes`.
        num_processes: Processes.
    """

    def __init__(self, path: Path, sizes: dict[str, np.ndarray], *, rank: int, num_processes: int) -> None:
        described = importlib.util.spec_from_file_location("bucketmanager", path)
        assert described is not None, "a file of Python"
        assert described.loader is not None, "a file of Python"
        module = importlib.util.module_from_spec(described)
        described.loader.exec_module(module)
        pairs = zip(sizes["width"].tolist(), sizes["height"].tolist(), strict=True)
        with tempfile.NamedTemporaryFile(suffix=".pkl") as file:
            file.write(pickle.dumps(dict(enumerate(pairs))))
            file.flush()
            self.manager = module.BucketManager(file.name, bsz=BATCH_SIZE, world_size=num_processes, global_rank=rank)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows for rows, _ in self.manager.generator())


def bucketed_loader(sampler: str, dataset: datasets.Dataset, accelerator: Accelerator, novelai: Path | None) -> Any:
    """Return a loader of batches of 8 as a user makes it, from the columns `width` and `height` of a data set."""
    rows, options = RowNumbers(len(dataset)), {"collate_fn": torch.tensor}
    if sampler == SHUFFLE:
        return accelerator.prepare(DataLoader(rows, BATCH_SIZE, shuffle=True, **options))
    if sampler == OURS:
        table = novelai_ladder()
        columns = BucketColumns(table, WAN, rule=AssignmentRule.novelai())
        batches = BucketBatchSampler(map_columns(dataset, columns)["bucket_id"], table=table, batch_size=BATCH_SIZE)
        return accelerator.prepare(DataLoader(rows, batch_sampler=batches, **options))
    sizes = {name: dataset.with_format("numpy")[name][:] for name in ("width", "height")}
    share = {"rank": accelerator.process_index, "num_processes": accelerator.num_processes}
    own: Iterable[list[int]] = DrawByDraw(sizes, **share)
    if sampler == NOVELAI:
        assert novelai is not None, "main checks it"
        own = NovelAIBatches(novelai, sizes, **share)
    # These share the rows among processes by themselves, so their loaders are not prepared.
    return DataLoader(rows, batch_sampler=own, **options)  # type: ignore[arg-type]


def bucketed_epochs(samplers: list[str], rows: int, runs: int, novelai: Path | None) -> list[dict[str, float]]:
    """Time an epoch of each sampler, from sizes on, in this process of the launch."""
    datasets.disable_progress_bars()
    datasets.disable_caching()
    accelerator = Accelerator(cpu=True)
    dataset = datasets.Dataset.from_dict(image_sizes(rows))
    times = []
    for sampler in samplers:
        torch.manual_seed(0)
        make = partial(bucketed_loader, sampler, dataset, accelerator, novelai)
        times.append(seconds_of_epoch(make, runs=runs))
    return times


def measure_epochs(rows: int, processes: list[int], runs: int, novelai: Path | None) -> list[dict[str, object]]:
    """Time epochs of every sampler; of several processes, the slowest counts."""
    samplers = [SHUFFLE, LOOP, *([NOVELAI] if novelai else []), OURS]
    options = {"samplers": samplers, "rows": rows, "runs": runs, "novelai": novelai}
    table: list[dict[str, object]] = []
    for number in processes:
        by_process = in_fresh_processes(bucketed_epochs, number, **options)
        for sampler, times in zip(samplers, zip(*by_process, strict=True), strict=True):
            seconds = {name: max(measured[name] for measured in times) for name in times[0]}
            table.append({"sampler": sampler, "processes": number, "rows": rows, **seconds})
    return table


def measure_buckets(rows: int, runs: int) -> dict[str, float]:
    """Measure one large plan, and its epoch without a loader."""

    def make_sampler() -> BucketBatchSampler:
        return BucketBatchSampler(dataset["bucket_id"], table=table, batch_size=BATCH_SIZE, num_processes=1)

    column = bucket_column(rows)
    (planned,) = seconds_of(lambda: plan_of_buckets(column), runs=runs)
    _, memory = in_fresh_process(bucket_plan_cost, rows=rows, num_processes=1)
    dataset, table = datasets.Dataset.from_dict({"bucket_id": column}), novelai_ladder()
    (made,) = seconds_of(make_sampler, runs=runs)
    sampler = make_sampler()
    sampler.plan()
    (iterated,) = seconds_of(lambda: sum(map(len, sampler)), runs=runs)
    return {
        "bucket_rows": rows,
        "bucket_sampler_from_column_s": made.median,
        "bucket_plan_s": planned.median,
        "bucket_plan_spread_s": planned.spread,
        "bucket_plan_extra_memory_mb": memory,
        "bucket_iteration_without_loader_s": iterated.median,
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


def measure_packs(samples: int) -> dict[str, object]:
    """Measure the fill of packs by strategy, and how evenly processes are loaded by the way packs are dealt."""
    fills, loads = [], []
    for max_tokens in (32_768, 65_536):
        tokens = token_mix(samples, max_tokens)
        for strategy in ("sequential", "first_fit", "best_fit_decreasing"):
            config = PackPlanConfig(max_tokens=max_tokens, strip_length=1, strategy=strategy)
            start = time.perf_counter()
            plan = plan_packs(tokens, config, epoch=0, num_processes=1)
            fill = float(tokens.sum() / (max_tokens * plan.num_batches))
            seconds = time.perf_counter() - start
            fills.append({"tokens per pack": max_tokens, "strategy": strategy, "fill": fill, "seconds": seconds})
        largest = float(COST.cost(tokens).max())
        ways: dict[str, dict[str, Any]] = {
            "packs in random order": {},
            'balance="cost"': {"balance": "cost"},
            'balance="cost", accumulation_steps=8': {"balance": "cost", "accumulation_steps": 8},
            "max_cost of the largest sample": {"max_cost": largest, "max_tokens": 4 * max_tokens},
        }
        for way, options in ways.items():
            config = PackPlanConfig(**{"max_tokens": max_tokens, "strip_length": 1, "cost_model": COST, **options})
            window = options.get("accumulation_steps", 1)
            even = {
                f"{processes} processes": efficiency(
                    plan_packs(tokens, config, epoch=0, num_processes=processes), tokens, window=window
                )
                for processes in (8, 64)
            }
            loads.append({"tokens per pack": max_tokens, "how": way, **even})
    return {"pack_samples": samples, "fill_of_packs": fills, "mean_over_largest_cost_of_packs": loads}


def measure_streams(rows: int) -> dict[str, float]:
    """Group a stream of random sizes into batches of a table, beside reading the stream alone; in CPU seconds."""
    from hf_bucketing import token_ladder
    from hf_bucketing.streaming import BucketGrouping, StreamingBucketBatcher

    rng = np.random.default_rng(0)
    sizes = {"num_frames": rng.integers(1, 120, rows), "height": rng.integers(200, 1200, rows)}
    stream = datasets.Dataset.from_dict({**sizes, "width": rng.integers(200, 1200, rows)}).to_iterable_dataset()
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


def weights_of(rows: int) -> np.ndarray:
    """Draw weights by which a third of the rows occurs twice and the others every other epoch: as many samples."""
    return np.where(np.random.default_rng(1).random(rows) < 1 / 3, 2.0, 0.5)


def plan_cost(rows: int, way: str, weighted: bool) -> tuple[float, float]:
    """Return the processor seconds and the MB of a plan, in this process, with or without weights."""
    weights = weights_of(rows) if weighted else None
    if way == "buckets":
        plan, column, config = plan_buckets, bucket_column(rows), BucketPlanConfig(batch_size=BATCH_SIZE)
    else:
        plan, column, config = plan_packs, token_mix(rows, 32_768), PackPlanConfig(max_tokens=32_768)

    def make(count: int) -> EpochPlan:
        some = None if weights is None else weights[:count]
        return plan(column[:count], config, epoch=0, num_processes=1, weights=some)

    return timed_with_memory(lambda: make(rows), lambda: make(50_000))


def shuffles_cost(rows: int) -> tuple[float, float]:
    """Return what the shuffles of a weighted plan alone cost: of rows with a fraction, of all rows, of occurrences."""
    fractions, rng = weights_of(rows) % 1 != 0, np.random.default_rng(0)
    orders = [np.arange(count, dtype=np.int32) for count in (np.count_nonzero(fractions), rows, rows)]

    def shuffle() -> None:
        for order in orders:
            rng.shuffle(order)

    return timed_with_memory(shuffle, lambda: rng.shuffle(np.arange(50_000)))


def measure_weights(rows: int, runs: int) -> dict[str, object]:
    """Measure plans whose rows occur more or less often than once beside plain ones, by turns; the least counts."""
    table = []
    for way in ("buckets", "packs"):
        costs = [
            [
                *(in_fresh_process(plan_cost, rows=rows, way=way, weighted=weighted) for weighted in (False, True)),
                in_fresh_process(shuffles_cost, rows=rows),
            ]
            for _ in range(runs)
        ]
        (plain, plain_mb), (weighted, weighted_mb), (shuffles, _) = np.array(costs).min(axis=0).tolist()
        table.append({
            "plan of": way, "rows": rows, "plain s": plain, "weighted s": weighted, "ratio": weighted / plain,
            "its shuffles s": shuffles, "plain MB": plain_mb, "weighted MB": weighted_mb,
        })  # fmt: skip
    return {"weighted_plans": table}


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
    parser.add_argument("--rows", type=int, default=5_300_000, help="Rows of one plan, in 19 buckets.")
    parser.add_argument("--epoch_rows", type=int, default=1_000_000, help="Rows of epochs beside other samplers.")
    parser.add_argument("--epoch_runs", type=int, default=3, help="Runs of these, of which the median is reported.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="Processes of the timed launches.")
    parser.add_argument("--novelai_path", type=Path, help="NovelAI's bucketmanager.py, to be timed beside.")
    parser.add_argument("--samples", type=int, default=1_000_000, help="Samples to pack.")
    parser.add_argument("--scale_rows", type=int, nargs="*", default=[], help="Sizes of plans, such as 10000000.")
    parser.add_argument(
        "--scale_processes",
        type=int,
        nargs="*",
        default=[8, 64, 512, 4096],
        help="Processes, for plans of the first size.",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="What is measured; other figures of the file stay."
    )
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("numpy", "torch", "accelerate", "datasets")
    measures: dict[str, Callable[[], Mapping[str, object]]] = {
        "epochs": lambda: {
            "epochs_of_buckets": measure_epochs(args.epoch_rows, args.processes, args.epoch_runs, args.novelai_path)
        },
        "buckets": lambda: measure_buckets(args.rows, args.runs),
        "weights": lambda: measure_weights(args.rows, args.epoch_runs),
        "packs": lambda: measure_packs(args.samples),
        "streams": lambda: measure_streams(args.samples),
        "scale": lambda: measure_scale(sorted(args.scale_rows), args.scale_processes) if args.scale_rows else {},
    }
    measure_parts(measures, args.parts, figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
