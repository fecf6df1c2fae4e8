"""Shared parts of the benchmarks: medians of runs in turns, memory of a fresh process, the file of figures."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
    warm_up()  # imports and the first call are not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
    before, start = memory_in_mb("VmRSS"), time.process_time()
    function()
    return time.process_time() - start, memory_in_mb("VmHWM") - before


def memory_in_mb(name: str) -> float:
    """Return a figure of /proc/self/status, such as VmRSS, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


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
    installed = {str(found.metadata["Name"]).replace("-", "_") for found in importlib.metadata.distributions()}
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
