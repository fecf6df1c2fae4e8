"""What the benchmarks share: medians of runs in turns, memory of a fresh process, and the file of figures."""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from hf_bucketing.command_line.flags import FlagParser


class Seconds(NamedTuple):
    """Seconds of several runs: their median, and the largest less the smallest."""

    median: float
    spread: float


def seconds_of(
    *functions: Callable[[], object],
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
) -> list[Seconds]:
    """Time functions in turns, so that all meet the same machine, after one run each to warm up."""
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
    before, start = _memory_in_mb("VmRSS"), time.process_time()
    function()
    return time.process_time() - start, _memory_in_mb("VmHWM") - before


def _memory_in_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def benchmark_parser(description: str | None) -> FlagParser:
    """Return a parser of the flags that all benchmarks have."""
    parser = FlagParser(description)
    parser.add_argument("--runs", type=int, default=5, help="Runs whose median counts.")
    parser.add_argument("--output", type=Path, help="A JSON file for the figures.")
    return parser


def machine(*packages: str) -> dict[str, object]:
    """Return what the figures were measured on, and the versions of packages."""
    return {
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def report(figures: dict[str, object], output: Path | None) -> None:
    """Print the figures, and write them to a JSON file if one is named."""
    figures["load_at_end"] = os.getloadavg()[0]
    for name, figure in figures.items():
        print(f"{name:52} {figure:.4g}" if isinstance(figure, float) else f"{name:52} {figure}")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=2) + "\n")
