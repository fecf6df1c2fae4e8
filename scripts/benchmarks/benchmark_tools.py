"""Shared parts of the benchmarks: medians of runs in turns, memory of a fresh process, the file of figures."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.files import complete_file


class Seconds(NamedTuple):
    """Median of the seconds of several runs, and the largest minus the smallest."""

    median: float
    spread: float


def seconds_of(
    *functions: Callable[[], object],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
) -> list[Seconds]:
    """Time functions in turns, so that all see the same load, after one warm-up run each."""
    times: list[list[float]] = [[] for _ in functions]
    for run in range(runs + 1):
        for function, taken in zip(functions, times, strict=True):
            synchronize()
            start = clock()
            function()
            synchronize()
            if run:
                taken.append(clock() - start)
    return [Seconds(statistics.median(taken), max(taken) - min(taken)) for taken in times]


def in_fresh_process(function: Callable[..., Any], **options: Any) -> Any:
    """Return the result of a function that runs in a new process."""
    return in_fresh_processes(function, 1, **options)[0]


def in_fresh_processes(function: Callable[..., Any], num_processes: int, /, **options: Any) -> list[Any]:
    """Return the results of a function that runs in new processes, which accelerate takes for those of one launch."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    launch = {
        "WORLD_SIZE": num_processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    receivers, processes = [], []
    for rank in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        environment = {name: str(value) for name, value in {**launch, "RANK": rank, "LOCAL_RANK": rank}.items()}
        arguments = (function, options, environment if num_processes > 1 else {}, sender)
        processes.append(context.Process(target=_send, args=arguments))
        processes[-1].start()
        sender.close()
        receivers.append(receiver)
    try:
        return [receiver.recv() for receiver in receivers]
    finally:
        for process in processes:
            process.join()


def _send(
    function: Callable[..., Any], options: dict[str, Any], environment: dict[str, str], connection: Connection
) -> None:
    os.environ |= environment
    connection.send(function(**options))


def timed_with_memory(function: Callable[[], Any], warm_up: Callable[[], Any]) -> tuple[float, float]:
    """Return the processor seconds of a call and the MB by which it raises the peak memory of this process."""
    warm_up()  # imports and the first call are not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
    before, start = memory_in_mb("VmRSS"), time.process_time()
    function()
    return time.process_time() - start, memory_in_mb("VmHWM") - before


def memory_in_mb(name: str) -> float:
    """Return a figure of /proc/self/status, such as VmRSS, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class RowNumbers(torch.utils.data.Dataset[int]):
    """A data set whose samples are their own row numbers, so that a loader spends its time on sampling."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row

    def __getitems__(self, rows: list[int]) -> list[int]:
        return rows


def seconds_of_epoch(make_loader: Callable[[], Iterable[Any]], *, runs: int) -> dict[str, float]:
    """Time loaders from their making to the end of an epoch; return the medians of the runs in seconds.

    Returns:
        `dict`: `to first batch`, from the column on, and `to the end of the epoch`, which holds the former.
    """
    times = []
    for run in range(runs + 1):
        start = time.perf_counter()
        batches = iter(make_loader())
        next(batches)
        first = time.perf_counter() - start
        for _ in batches:
            pass
        if run:
            times.append((first, time.perf_counter() - start))
    first, end = (statistics.median(column) for column in zip(*times, strict=True))
    return {"to first batch": first, "to the end of the epoch": end}


def padding_of(batches: Sequence[np.ndarray], lengths: np.ndarray) -> float:
    """Return the share of padding if each batch of row numbers is padded to its longest row."""
    rows, starts, sizes = _flat(batches)
    return 1 - float(lengths[rows].sum() / (np.maximum.reduceat(lengths[rows], starts) * sizes).sum())


def largest_batch(batches: Sequence[np.ndarray], lengths: np.ndarray) -> float:
    """Return the largest padded batch: its number of rows × the longest of them."""
    rows, starts, sizes = _flat(batches)
    return float((np.maximum.reduceat(lengths[rows], starts) * sizes).max())


def companions(epoch: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return among how many rows those of its batch are drawn, for a mean row, from batches of two epochs.

    If the others of a batch of b rows are drawn evenly from n rows, then two rows that share a batch share one of the
    other epoch with probability (b − 1) / n; n follows from how many do.
    """
    (rows, _, sizes), (other_rows, _, other_sizes) = _flat(epoch), _flat(other)
    batch_of = np.empty(int(other_rows.max()) + 1, np.int64)
    batch_of[other_rows] = np.repeat(np.arange(len(other_sizes)), other_sizes)
    together = np.repeat(np.arange(len(sizes)), sizes) * len(other_sizes) + batch_of[rows]
    again = np.unique(together, return_counts=True)[1]
    pairs = float((again * (again - 1) / 2).sum())
    chances = float((np.repeat(sizes - 1, sizes) / 2 * (other_sizes[batch_of[rows]] - 1)).sum())
    return chances / pairs if pairs else float("nan")


def _flat(batches: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = np.array([len(batch) for batch in batches])
    return np.concatenate(batches), np.cumsum(sizes) - sizes, sizes


def benchmark_parser(description: str | None) -> FlagParser:
    """Return a parser of the flags that all benchmarks have."""
    parser = FlagParser(description)
    parser.add_argument("--runs", type=int, default=5, help="Runs, of which the median is reported.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    return parser


def machine(*packages: str) -> dict[str, object]:
    """Return the machine, its load and the versions of packages."""
    return {
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def accelerator_and_versions(*packages: str) -> dict[str, object]:
    """Return the GPU, if there is one, the machine, and the versions of packages that are installed."""
    installed = {str(package.metadata["Name"]).replace("-", "_") for package in importlib.metadata.distributions()}
    described = {"device": "cpu", **machine(*(name for name in packages if name in installed))}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": properties.name,
            "device_memory_gib": properties.total_memory / 2**30,
            "device_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return described


def measure_parts(
    measures: Mapping[str, Callable[[], Mapping[str, object]]],
    parts: Sequence[str],
    described: dict[str, object],
    output: Path | None,
) -> None:
    """Measure parts of a benchmark and report their figures; those of parts that are not measured stay in the file.

    Args:
        measures (mapping of `str` to callables): What measures each part, and returns its figures.
        parts (sequence of `str`): Parts that are measured.
        described (`dict`): The machine and versions of packages, which a file that stays has already.
        output (`Path`, *optional*): JSON file of the figures.
    """
    figures: dict[str, object] = {}
    for part in parts:
        figures.update(measures[part]())
    if set(parts) < set(measures) and output and output.is_file():
        print(json.dumps(figures, indent=2, ensure_ascii=False))
        write_figures({**json.loads(output.read_text()), **figures}, output)
    else:
        report({**described, **figures}, output)


def write_figures(figures: Mapping[str, object], output: Path | None) -> None:
    """Write figures to a JSON file, if a path is given; an earlier file stays until the new one is complete."""
    if output:
        with complete_file(output) as partial:
            partial.write_text(json.dumps(figures, indent=2) + "\n")


def report(figures: dict[str, object], output: Path | None) -> None:
    """Print the figures, and write them to a JSON file if a path is given."""
    figures["load_at_end"] = os.getloadavg()[0]
    for name, figure in figures.items():
        print(f"{name:52} {figure:.4g}" if isinstance(figure, float) else f"{name:52} {figure}")
    write_figures(figures, output)
