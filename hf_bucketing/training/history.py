"""Logs of a run as JSON lines: losses by the main process, the samples seen by each process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
from ..errors import BucketingError


class JsonLines:
    """A log file of one JSON object per line, flushed line by line.

    Args:
        path (`Path`): Where it lies.
        keep (`int`): Lines of an earlier run to keep, from the start; later ones are removed.

    Raises:
        BucketingError: If there are fewer lines than `keep`.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines()[:keep] if keep and path.exists() else []
        if len(lines) < keep:
            raise BucketingError(f"{path} has {len(lines)} lines, but the checkpoint was made after {keep}.")
        path.write_text("".join(f"{line}\n" for line in lines))
        self._file = path.open("a")
        self.lines = len(lines)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RunLog:
    """What one process writes of a run, below `output_dir/logs`.

    Args:
        output_dir (`Path`): Of the run.
        process_index (`int`): Process 0 writes plans and losses; each writes the samples that it saw.
        num_processes (`int`): Logs of more processes are those of an earlier part of the run.
        keep (mapping, *optional*): What [`state_dict`][RunLog.state_dict] gave when the run was saved.
    """

    def __init__(
        self, output_dir: Path, *, process_index: int, num_processes: int, keep: Mapping[str, int] | None = None
    ) -> None:
        keep = keep or {"samples": 0, "plans": 0, "losses": 0}
        self._batches = keep["samples"]
        path = _path(output_dir, "samples", process_index)
        self._files = {"samples": JsonLines(path, keep=_lines_before(path, self._batches))}
        if process_index == 0:
            for name in ("plans", "losses"):
                self._files[name] = JsonLines(_path(output_dir, name), keep=keep[name])
            for path in _sample_logs(output_dir)[num_processes:]:
                JsonLines(path, keep=_lines_before(path, self._batches)).close()

    def write_plan(self, epoch: int, summary: Mapping[str, Any]) -> None:
        """Log the counts of an epoch's plan, in process 0."""
        self._write("plans", {"epoch": epoch, **summary})

    def write_samples(
        self, *, epoch: int, step: int, bucket_id: int | None, index: list[int], loss: list[float]
    ) -> None:
        """Log the samples of one batch and their losses; `batch` counts those of the whole run."""
        entry = {"batch": self._batches, "epoch": epoch, "step": step, "bucket_id": bucket_id, "index": index}
        self._write("samples", {**entry, "loss": [round(value, 6) for value in loss]})
        self._batches += 1

    def write_loss(self, global_step: int, entry: Mapping[str, Any]) -> None:
        """Log an optimizer step, in process 0."""
        self._write("losses", {"global_step": global_step, **entry})

    def state_dict(self) -> dict[str, int]:
        """Return the batches that each process has logged, and the lines of the other logs."""
        return {**{name: file.lines for name, file in self._files.items()}, "samples": self._batches}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, entry: Mapping[str, Any]) -> None:
        if name in self._files:
            self._files[name].write(entry)


def losses_of(output_dir: Path) -> list[float]:
    """Return the loss of each optimizer step of a run.

    Raises:
        BucketingError: If the run left no log.
    """
    return [line["train_loss"] for line in _read(_path(output_dir, "losses"))]


class StepLog(NamedTuple):
    """What a run logged of each optimizer step.

    Attributes:
        loss (`float64`, shape `(n,)`): Mean over the samples of the step.
        samples (`int64`, shape `(n,)`): Samples of all processes in the step.
        seconds (`float64`, shape `(n,)`): From the step before to the end of this one.
    """

    loss: FloatArray
    samples: IntArray
    seconds: FloatArray


def steps_of(output_dir: Path) -> StepLog:
    """Return what a run logged of its optimizer steps.

    Raises:
        BucketingError: If the run left no log, or one of an earlier release that does not hold times.
    """
    path = _path(output_dir, "losses")
    lines = _read(path)
    if not lines or any("samples" not in line or "seconds" not in line for line in lines):
        raise BucketingError(f"{path} holds no samples and seconds of each step; train again to draw its losses.")
    return StepLog(
        np.array([line["train_loss"] for line in lines], np.float64),
        np.array([line["samples"] for line in lines], np.int64),
        np.array([line["seconds"] for line in lines], np.float64),
    )


def plans_of(output_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the counts of each epoch's plan, as [`EpochPlan.summary`][hf_bucketing.plans.EpochPlan] gives them.

    Raises:
        BucketingError: If the run left no log.
    """
    return {line["epoch"]: line for line in _read(_path(output_dir, "plans"))}


class SampleCount(NamedTuple):
    """What all processes together saw in one epoch.

    Attributes:
        seen (`int`): Different samples.
        repeated (`int`): Samples seen again.
        steps (`tuple[int, ...]`): Steps of each process.
        buckets (`bool`): Whether the batches had buckets.
        mixed_steps (`int`): Steps in which the processes held different buckets.
    """

    epoch: int
    seen: int
    repeated: int
    steps: tuple[int, ...]
    buckets: bool
    mixed_steps: int


def sample_lines(output_dir: Path) -> list[dict[str, Any]]:
    """Return the log of every batch of all processes of a run.

    Raises:
        BucketingError: If the run left no log.
    """
    return [line for path in _sample_logs(output_dir) or [_path(output_dir, "samples")] for line in _read(path)]


def count_samples(output_dir: Path) -> list[SampleCount]:
    """Count samples over all processes of a run, epoch by epoch.

    Raises:
        BucketingError: If the run left no log.
    """
    logs = [_read(path) for path in _sample_logs(output_dir) or [_path(output_dir, "samples")]]
    counts = []
    for epoch in sorted({line["epoch"] for log in logs for line in log}):
        by_process = [[line for line in log if line["epoch"] == epoch] for log in logs]
        seen = Counter(index for lines in by_process for line in lines for index in line["index"])
        steps = tuple(map(len, by_process))
        buckets = all(line["bucket_id"] is not None for lines in by_process for line in lines)
        mixed = sum(len({line["bucket_id"] for line in together}) > 1 for together in zip(*by_process, strict=False))
        counts.append(SampleCount(epoch, len(seen), seen.total() - len(seen), steps, buckets, mixed))
    return counts


def _path(output_dir: Path, name: str, process_index: int = 0) -> Path:
    return output_dir / "logs" / (f"{name}-{process_index}.jsonl" if name == "samples" else f"{name}.jsonl")


def _sample_logs(output_dir: Path) -> list[Path]:
    """Return the logs of samples that there are, by process."""
    found = _path(output_dir, "samples").parent.glob("samples-*.jsonl")
    return sorted(found, key=lambda path: int(path.stem.partition("-")[2]))


def _lines_before(path: Path, batch: int) -> int:
    """Return how many lines of a log of samples stand before a batch of the run."""
    return sum(line["batch"] < batch for line in _read(path)) if path.is_file() else 0


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise BucketingError(f"{path} does not exist; is this the output_dir of a training run?")
    return [json.loads(line) for line in path.read_text().splitlines()]
