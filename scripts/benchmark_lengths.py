r"""Compare plans by length with those of transformers and lhotse, as ratios of one run.

python scripts/benchmark_lengths.py --output scripts/benchmark_results/lengths.json

lhotse is not a dependency of this package; without `pip install lhotse` its figures are omitted.
"""

import argparse
import importlib.util
import sys
import time
from typing import Any

import numpy as np
from benchmark_tools import benchmark_parser, in_fresh_process, machine, report, seconds_of, timed_with_memory

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import EpochPlan, LengthPlanConfig, plan_lengths


def lengths_of(items: int) -> np.ndarray:
    """Draw log-normal durations from 1 to 30 s with a median of 6 s."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(6), 0.8, items * 2))
    return drawn[(drawn >= 1) & (drawn <= 30)][:items]


def plan_of_lengths(lengths: np.ndarray, **options: Any) -> EpochPlan:
    config = LengthPlanConfig(max_tokens=60, num_buckets=30, **options)
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
    (ours,) = seconds_of(lambda: plan_of_lengths(lengths), runs=runs)
    _, memory = in_fresh_process(length_plan_cost, items=items)
    plan = plan_of_lengths(lengths)
    figures: dict[str, object] = {
        "length_items": items,
        "length_padding": plan.summary(num_tokens=lengths)["padding"],
        "length_items_per_s": items / ours.median,
        "length_extra_memory_mb": memory,
        "length_fill_of_capacity": float(lengths.sum() / (60 * plan.num_batches)),
    }
    for strategy in ("random", "sorted"):
        other = plan_of_lengths(lengths, strategy=strategy)
        figures[f"length_padding_{strategy}"] = other.summary(num_tokens=lengths)["padding"]
    size = round(items / plan.num_batches)
    start = time.perf_counter()
    order = np.array(list(LengthGroupedSampler(size, lengths=lengths.tolist())))
    transformers = time.perf_counter() - start
    figures["transformers_items_per_s"] = items / transformers
    batches = [lengths[order[at : at + size]] for at in range(0, items, size)]
    figures["transformers_batch_size"] = size
    figures["transformers_padding"] = float(padding_of(batches))
    figures["transformers_largest_batch_s"] = float(max(len(batch) * batch.max() for batch in batches))
    figures["length_times_faster_than_transformers"] = transformers / ours.median
    if importlib.util.find_spec("lhotse") is None:
        print("lhotse is not installed; its figures are omitted (pip install lhotse).", file=sys.stderr)
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
    (ours,) = seconds_of(lambda: list(map(len, plan_of_lengths(lengths).batches())), runs=3)
    return {
        "lhotse": lhotse.__version__,
        "lhotse_items": len(lengths),
        "lhotse_items_per_s": len(lengths) / seconds,
        "lhotse_padding": float(padding_of(batches)),
        "lhotse_fill_of_capacity": float(lengths.sum() / (60 * len(batches))),
        "length_times_faster_than_lhotse": seconds / ours.median,
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--items", type=int, default=1_000_000, help="Number of lengths.")
    parser.add_argument("--lhotse_items", type=int, default=200_000, help="Number of lengths for lhotse.")
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("numpy", "transformers")
    figures.update(measure_lengths(args.items, args.lhotse_items, args.runs))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
