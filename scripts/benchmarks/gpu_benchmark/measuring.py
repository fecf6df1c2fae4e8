"""How parts of scripts/benchmarks/benchmark_gpu.py are measured: cases that may fail, seconds and memory."""

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmark_tools import seconds_of

from hf_bucketing.errors import PackingError
from hf_bucketing.packing.attention.kernels import KERNELS

from .scale import Scale

BACKENDS = ("auto", "segments", *(f"varlen:{name}" for name in KERNELS))
Figures = dict[str, Any]
Cases = Iterator[tuple[str, Callable[[], Figures]]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the benchmark.

    Attributes:
        scale: Sizes that are measured.
        runs: Runs, of which the median counts.
        seconds: Seconds of a part after which it begins no further case.
        folder: Where logs are kept.
    """

    scale: Scale
    runs: int
    seconds: float
    folder: Path

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.scale.on_gpu:
            torch.cuda.synchronize()

    def once(self, function: Callable[[], object]) -> float:
        """Return the seconds of one call."""
        self.synchronize()
        start = time.perf_counter()
        function()
        self.synchronize()
        return time.perf_counter() - start

    def medians(self, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of functions, run in turns after one warm-up each."""
        timed = seconds_of(*functions.values(), runs=self.runs, synchronize=self.synchronize)
        return {name: seconds.median for name, seconds in zip(functions, timed, strict=True)}

    @contextmanager
    def peak_memory(self, into: Figures) -> Iterator[None]:
        """Add the peak of allocated memory inside a `with` block to some figures; nothing without a GPU."""
        if self.scale.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        if self.scale.on_gpu:
            into["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


def measure(cases: Callable[[], Cases], *, seconds: float, keep: Callable[[Figures], None]) -> Figures:
    """Measure the cases of a part, and keep what there is after each.

    Args:
        cases: Returns names and functions, of which each returns figures.
        seconds: Seconds after which no further case begins.
        keep: Writes the figures.
    """
    start, figures = time.perf_counter(), Figures()

    def measure_all() -> Figures:
        for name, function in cases():
            late = time.perf_counter() - start > seconds
            figures[name] = {"not_run": f"{seconds:g} seconds were over"} if late else attempt(function)
            keep(figures)
        return {}

    figures |= attempt(measure_all)  # also what the part needs before its first case may fail
    keep(figures)
    return figures


def attempt(function: Callable[[], Figures]) -> Figures:
    """Return what a function measures, or why it could not: one case that fails must not lose the others."""
    try:
        return function()
    except torch.OutOfMemoryError as error:
        refused = {"out_of_memory": str(error).splitlines()[0]}
    except PackingError as error:  # of a backend that this device has no kernel for
        refused = {"not_run": str(error)}
    except Exception as error:
        traceback.print_exc()
        refused = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    free()  # after the `except` block, whose traceback keeps tensors
    return refused


def failures(figures: Figures, *path: str) -> list[str]:
    """Return the paths of cases that failed, without those that this device cannot run."""
    nested = [(name, value) for name, value in figures.items() if isinstance(value, dict)]
    here = [" / ".join(path)] if "failed" in figures else []
    return here + [line for name, value in nested for line in failures(value, *path, name)]


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def relative(values: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the norm of the errors ÷ the norm of the exact values, over several tensors."""
    errors = sum(float((value.float() - right).square().sum()) for value, right in zip(values, exact, strict=True))
    return math.sqrt(errors / sum(float(right.square().sum()) for right in exact))
