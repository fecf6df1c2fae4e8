r"""Compare batches of like length with those of transformers and lhotse, each made and iterated as its users do.

python scripts/benchmarks/benchmark_lengths.py --output scripts/benchmarks/results/lengths.json

Epochs are timed from a `Dataset` column to their end, through `accelerator.prepare(DataLoader(…))` in one and in two
processes. lhotse is not a dependency of this package: where it is not installed (`pip install lhotse`), its rows are
missing, and `--lhotse` makes that an error.
"""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from benchmark_tools import (
    RowNumbers,
    benchmark_parser,
    companions,
    in_fresh_process,
    in_fresh_processes,
    largest_batch,
    machine,
    padding_of,
    report,
    seconds_of_epoch,
    timed_with_memory,
)
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import DistributedLengthGroupedSampler, LengthGroupedSampler

from hf_bucketing import LengthBatchSampler
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.plans import LengthPlanConfig, plan_lengths

BATCH_SIZE, MAX_TOKENS = 16, 60
SHUFFLE = "torch: shuffle=True"
GROUPED = "transformers: LengthGroupedSampler"
GROUPED_BY_TRAINER = "the same, from the lazy column, as transformers.Trainer passes it"
OURS = "LengthBatchSampler"

Batches = list[np.ndarray]


def uniform_lengths(rows: int) -> np.ndarray:
    """Draw whole lengths from 1 to 512."""
    return np.random.default_rng(0).integers(1, 513, rows)


def durations(rows: int) -> np.ndarray:
    """Draw log-normal durations from 1 to 30 s with a median of 6 s."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(6), 0.8, rows * 2))
    return drawn[(drawn >= 1) & (drawn <= 30)][:rows]


def prepared_loader(sampler: str, column: Any) -> Iterable[Any]:
    """Return a loader of batches of 16 as a user makes it, from the column of a data set."""
    rows, options = RowNumbers(len(column)), {"collate_fn": torch.tensor}
    if sampler == OURS:
        loader = DataLoader(rows, batch_sampler=LengthBatchSampler(column, batch_size=BATCH_SIZE), **options)
    elif sampler == SHUFFLE:
        loader = DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, **options)
    else:
        lengths = column[:] if sampler == GROUPED else column
        loader = DataLoader(rows, BATCH_SIZE, sampler=LengthGroupedSampler(BATCH_SIZE, lengths=lengths), **options)
    return Accelerator(cpu=True).prepare(loader)  # type: ignore[no-any-return]


def prepared_epochs(samplers: dict[str, int], runs: int) -> list[dict[str, float]]:
    """Time an epoch of each sampler over a number of rows, in this process of the launch."""
    times = []
    for sampler, rows in samplers.items():
        torch.manual_seed(0)
        column = Dataset.from_dict({"length": uniform_lengths(rows)})["length"]
        times.append(seconds_of_epoch(partial(prepared_loader, sampler, column), runs=runs))
    return times


def measure_seconds(rows: int, lazy_rows: int, processes: list[int], runs: int) -> list[dict[str, object]]:
    """Time epochs of batches of 16; of several processes, the slowest counts."""
    table: list[dict[str, object]] = []
    for number in processes:
        samplers = {SHUFFLE: rows, GROUPED: rows, OURS: rows}
        if number == 1:
            samplers[GROUPED_BY_TRAINER] = lazy_rows
        by_process = in_fresh_processes(prepared_epochs, number, samplers=samplers, runs=runs)
        for (sampler, own_rows), times in zip(samplers.items(), zip(*by_process, strict=True), strict=True):
            seconds = {name: max(measured[name] for measured in times) for name in times[0]}
            table.append({"sampler": sampler, "processes": number, "rows": own_rows, **seconds})
    return table


def grouped_by_transformers(lengths: np.ndarray, epoch: int) -> Batches:
    """Return batches that accelerate deals in turn to any number of processes."""
    generator = torch.Generator().manual_seed(epoch)
    return _cut(list(LengthGroupedSampler(BATCH_SIZE, lengths=lengths.tolist(), generator=generator)))


def distributed_by_transformers(lengths: np.ndarray, processes: int, epoch: int) -> Batches:
    """Return the batches of all processes, to which transformers deals rows in turn."""
    batches: Batches = []
    for rank in range(processes):
        sampler = DistributedLengthGroupedSampler(
            BATCH_SIZE, num_replicas=processes, rank=rank, lengths=lengths.tolist()
        )
        sampler.set_epoch(epoch)
        batches += _cut(list(sampler))
    return batches


def _cut(rows: list[int]) -> Batches:
    return [np.array(rows[start : start + BATCH_SIZE]) for start in range(0, len(rows), BATCH_SIZE)]


def ours(lengths: np.ndarray, processes: int, epoch: int, **options: Any) -> Batches:
    sampler = LengthBatchSampler(lengths, num_processes=processes, **options)
    return list(sampler.plan(epoch).batches())


def figures_of(batches_of: Callable[[int], Batches], lengths: np.ndarray) -> dict[str, Any]:
    """Return the figures of the batches of an epoch, and the companions of a row over two epochs."""
    first, second = batches_of(0), batches_of(1)
    return {
        "batches": len(first),
        "padding": padding_of(first, lengths),
        "companions": round(companions(first, second)),
    }


def batches_of_16(lengths: np.ndarray, processes: int) -> dict[str, Callable[[int], Batches]]:
    """Return the epochs of samplers by name; of several processes, only those that depend on their number."""
    if processes > 1:
        return {
            "transformers: DistributedLengthGroupedSampler": partial(distributed_by_transformers, lengths, processes),
            OURS: partial(ours, lengths, processes, batch_size=BATCH_SIZE),
        }
    return {
        SHUFFLE: lambda epoch: _cut(np.random.default_rng(epoch).permutation(len(lengths)).tolist()),
        GROUPED: partial(grouped_by_transformers, lengths),
        OURS: partial(ours, lengths, 1, batch_size=BATCH_SIZE),
        f"{OURS}, num_buckets=30": partial(ours, lengths, 1, batch_size=BATCH_SIZE, num_buckets=30),
        f"{OURS}, num_buckets=10": partial(ours, lengths, 1, batch_size=BATCH_SIZE, num_buckets=10),
    }


def batches_by_tokens(lengths: np.ndarray) -> dict[str, Callable[[int], Batches]]:
    """Return the epochs of all samplers of padded batches of at most 60 s, by name."""
    limited = partial(ours, lengths, 1, max_tokens=MAX_TOKENS)
    ways: dict[str, Callable[[int], Batches]] = {
        f"{OURS}, num_buckets=10": partial(limited, num_buckets=10),
        f"{OURS}, num_buckets=30": partial(limited, num_buckets=30),
        OURS: limited,
        f'{OURS}, num_buckets=30, boundaries="quantile"': partial(limited, num_buckets=30, boundaries="quantile"),
        f'{OURS}, strategy="sorted"': partial(limited, strategy="sorted"),
    }
    if importlib.util.find_spec("lhotse"):
        for buckets in (10, 30, 50):
            ways[f"lhotse: DynamicBucketingSampler, num_buckets={buckets}"] = lhotse_batches(lengths, buckets)
    return ways


def measure_padding(rows: int) -> list[dict[str, object]]:
    """Count padding of batches of 16 for uniform lengths and for log-normal ones."""
    return [
        {"lengths": name, "sampler": sampler, "processes": processes, **figures_of(batches_of, lengths)}
        for name, lengths in (("uniform", uniform_lengths(rows)), ("log-normal", durations(rows)))
        for processes in (1, 8)
        for sampler, batches_of in batches_of_16(lengths, processes).items()
    ]


def measure_fill(rows: int) -> list[dict[str, object]]:
    """Count how far padded batches of at most 60 s are filled, and how they are padded."""
    lengths = durations(rows)
    table: list[dict[str, object]] = []
    for sampler, batches_of in batches_by_tokens(lengths).items():
        figures = figures_of(batches_of, lengths)
        fill = float(lengths.sum() / (MAX_TOKENS * figures["batches"]))
        largest = largest_batch(batches_of(0), lengths) / MAX_TOKENS
        table.append({"sampler": sampler, "fill": fill, "largest batch ÷ limit": largest, **figures})
    return table


def lhotse_batches(lengths: np.ndarray, buckets: int) -> Callable[[int], Batches]:
    """Return the epochs of lhotse's sampler over cuts in random order, as its buffer mixes only cuts that are near."""
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    cuts = CutSet.from_cuts(MonoCut(id=str(row), start=0, duration=float(lengths[row]), channel=0) for row in order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for cuts in a file
        sampler = DynamicBucketingSampler(cuts, max_duration=MAX_TOKENS, num_buckets=buckets, shuffle=True)

    def batches_of(epoch: int) -> Batches:
        sampler.set_epoch(epoch)
        return [np.array([int(cut.id) for cut in batch]) for batch in sampler]

    return batches_of


def plan_memory(rows: int) -> float:
    """Return the MB that a plan adds to this process at its peak."""
    lengths = uniform_lengths(rows)

    def plan(column: np.ndarray) -> object:
        return plan_lengths(column, LengthPlanConfig(batch_size=BATCH_SIZE), epoch=0, num_processes=1)

    return timed_with_memory(lambda: plan(lengths), lambda: plan(lengths[:1000]))[1]


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Rows of batches of 16.")
    parser.add_argument(
        "--lazy_rows", type=int, default=100_000, help="Rows that are read one by one from the column."
    )
    parser.add_argument("--duration_rows", type=int, default=200_000, help="Rows of batches of at most 60 s.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="Processes of the timed launches.")
    parser.add_argument("--lhotse", action="store_true", help="Fail if lhotse is not installed.")
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("numpy", "torch", "accelerate", "datasets", "transformers")
    if importlib.util.find_spec("lhotse"):
        figures |= machine("lhotse")
    elif args.lhotse:
        sys.exit("lhotse is not installed: pip install lhotse.")
    figures["plan_bytes_per_row"] = in_fresh_process(plan_memory, rows=args.rows) * 2**20 / args.rows
    figures["seconds"] = measure_seconds(args.rows, args.lazy_rows, args.processes, args.runs)
    figures["batches_of_16"] = measure_padding(args.rows)
    figures["batches_of_60_s"] = measure_fill(args.duration_rows)
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
