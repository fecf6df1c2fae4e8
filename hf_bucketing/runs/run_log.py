"""Logs of a run as JSON lines: plans and losses from the main process, samples from each process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..buckets.cost import CostFit, fit_costs
from ..configuration.run import COST_MODEL
from ..errors import BucketingError
from ..files import complete_file

TABLE = "table.json"
"""File in the folder of logs that holds the buckets of a run, if it has any."""

STATUS = "status.json"
"""File in the folder of logs that says how far a run was to go and how it ended."""

_RARE = ("validation", "resumes", "skipped")
"""Logs of process 0 that begin when there is something to write."""

Status = Literal["running", "finished", "interrupted", "failed"]

_FITTED_STEPS = 5000
"""Most steps that a cost model is fitted to, the last ones."""


class _JsonLines:
    """A log file of one JSON object per line, flushed line by line, which keeps some lines of the run before."""

    def __init__(self, path: Path, *, keep: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a+b")
        self.file.seek(0)
        for lines in range(keep):
            if not self.file.readline().endswith(b"\n"):
                raise BucketingError(f"{path} has {lines} lines, but the checkpoint was made after {keep}.")
        # Nothing is written anew: a process that is killed here leaves all lines that the checkpoint needs.
        self.file.truncate()
        self.lines = keep

    def write(self, entry: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(entry).encode() + b"\n")
        self.file.flush()
        self.lines += 1


class RunLog:
    """Write the logs of one process into `output_dir/logs`.

    Args:
        output_dir (`Path`): Output folder of the run.
        process_index (`int`): Index of this process. Process 0 writes plans and losses; each writes its samples.
        num_processes (`int`): Number of processes. Logs of further ones are from a part of the run before it resumed.
        degree (`int`): Neighbouring processes that take the same samples: only the first of them logs these.
        keep (mapping, *optional*): [`state_dict`][RunLog.state_dict] of the run when its checkpoint was saved.

    Raises:
        BucketingError: If a log has fewer lines than at that checkpoint.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        process_index: int,
        num_processes: int,
        degree: int = 1,
        keep: Mapping[str, int] | None = None,
    ) -> None:
        keep = keep or {}
        self._output_dir, self._main = output_dir, process_index == 0
        self._batches = keep.get("samples", 0)
        self._files: dict[str, _JsonLines] = {}
        if process_index % degree == 0:
            self._files["samples"] = self._samples(log_path(output_dir, "samples", process_index // degree))
        if process_index == 0:
            began = [name for name in _RARE if keep.get(name) or log_path(output_dir, name).is_file()]
            for name in ("plans", "losses", *began):
                self._files[name] = _JsonLines(log_path(output_dir, name), keep=keep.get(name, 0))
            for path in _sample_logs(output_dir)[num_processes // degree :]:
                self._samples(path).file.close()

    def _samples(self, path: Path) -> _JsonLines:
        """Open a log of samples, cut off after the batches of the run so far."""
        lines = _read_lines(path) if path.is_file() else []
        return _JsonLines(path, keep=sum(line["batch"] < self._batches for line in lines))

    def write_plan(self, epoch: int, summary: Mapping[str, Any]) -> None:
        """Log the counts of the plan of an epoch, or of what is left of one, in process 0; `leg` counts plans."""
        if "plans" in self._files:
            self._write("plans", {"leg": self._files["plans"].lines, "epoch": epoch, **summary})

    def write_samples(
        self,
        *,
        epoch: int,
        step: int,
        bucket_id: int | None,
        index: list[int],
        loss: list[float],
        sources: list[int] | None = None,
        planned: list[int] | None = None,
        views: list[int] | None = None,
    ) -> None:
        """Log the samples of one batch and their losses; `batch` in the log counts the batches of the whole run.

        Where there are several, `sources` are those of the planned rows, as positions in `"sources"` of a plan's log.
        `planned` are the rows that the plan holds, where unreadable ones were replaced, and `views` those of their
        cached views that they stand for, where all views are rows.
        """
        entry = {"batch": self._batches, "epoch": epoch, "step": step, "bucket_id": bucket_id, "index": index}
        entry |= {} if sources is None else {"sources": sources}
        entry |= {} if planned in (None, index) else {"planned": planned}
        entry |= {} if views is None else {"views": views}
        self._write("samples", {**entry, "loss": [round(value, 6) for value in loss]})
        self._batches += 1

    def write_step(self, name: str, global_step: int, entry: Mapping[str, Any]) -> None:
        """Log something of an optimizer step, in process 0.

        Args:
            name (`str`): `"losses"` for what the step came to, `"validation"` for a held-out loss after it,
                `"resumes"` if the run was resumed after it, and `"skipped"` if it changed no weights.
            global_step (`int`): Number of the optimizer step.
            entry (mapping): What is logged of it.
        """
        if self._main and name not in self._files:
            self._files[name] = _JsonLines(log_path(self._output_dir, name), keep=0)
        self._write(name, {"global_step": global_step, **entry})

    def state_dict(self) -> dict[str, int]:
        """Return the batches that each process has logged, and the lines of the other logs."""
        return {**{name: log.lines for name, log in self._files.items()}, "samples": self._batches}

    def close(self) -> None:
        """Close the files."""
        for log in self._files.values():
            log.file.close()

    def _write(self, name: str, entry: Mapping[str, Any]) -> None:
        if name in self._files:
            self._files[name].write(entry)


def fit_steps(lines: Iterable[Mapping[str, Any]]) -> CostFit:
    """Fit a cost model to lines of the log of losses, of one or several runs.

    Raises:
        BucketingError: If they tell too little, see [`fit_costs`][hf_bucketing.buckets.fit_costs].
    """
    names = ("busy_seconds", "busy_tokens", "busy_token_pairs", "busy_batches")
    measured = [[line[name] for name in names] for line in lines if names[0] in line]
    seconds, tokens, pairs, batches = np.array(measured, np.float64).reshape(-1, len(names)).T
    return fit_costs(seconds, tokens=tokens, token_pairs=pairs, batches=batches)


def write_cost_model(output_dir: Path) -> str:
    """Fit a cost model to the last steps in the log of a run, if they tell enough; return a message about it.

    Raises:
        BucketingError: If there is no log.
    """
    try:
        fit = fit_steps(read_log(output_dir, "losses", last=_FITTED_STEPS))
    except BucketingError as error:
        return f"No {COST_MODEL} is written yet: {error}"
    with complete_file(output_dir / COST_MODEL) as partial:
        partial.write_text(fit.to_json())
    return f"Measured cost: {fit} ({COST_MODEL})"


def write_status(
    output_dir: Path,
    status: Status,
    *,
    global_step: int,
    max_train_steps: int,
    lines: Mapping[str, int],
    attention: Sequence[str] = (),
) -> None:
    """Say how a run ended, or that it runs, since when, and with its finished and its planned optimizer steps.

    `lines` is the [`state_dict`][RunLog.state_dict] of its log, by which lines that are lost later are missed, and
    `attention` what the backend `"auto"` chose.
    """
    path = output_dir / "logs" / STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_file(path) as partial:
        steps = {"global_step": global_step, "max_train_steps": max_train_steps}
        values: dict[str, Any] = {"status": status, "time": time.time(), **steps, "lines": lines}
        values |= {"attention": attention} if attention else {}
        partial.write_text(json.dumps(values) + "\n")


def read_status(output_dir: Path) -> dict[str, Any] | None:
    """Return what [`write_status`] wrote; None for a run of an earlier release.

    A run that was killed is still `"running"`, with the step at which it was started or resumed.
    """
    path = output_dir / "logs" / STATUS
    status: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return status


def log_path(output_dir: Path, name: str, process_index: int = 0) -> Path:
    """Return the path of a log.

    Args:
        output_dir (`Path`): Output folder of a run.
        name (`str`): `"plans"`, `"losses"`, `"validation"`, `"resumes"`, `"skipped"`, `"unreadable"` or `"samples"`.
        process_index (`int`): Process whose samples are logged.
    """
    return output_dir / "logs" / (f"{name}-{process_index}.jsonl" if name == "samples" else f"{name}.jsonl")


def read_log(output_dir: Path, name: str, *, last: int | None = None) -> list[dict[str, Any]]:
    """Return the entries of a log other than `"samples"`, or the last of them; see [`log_path`].

    Held-out losses, resumes, skipped steps and unreadable samples are none where there is no such file.

    Raises:
        BucketingError: If there is no file of another log.
    """
    path = log_path(output_dir, name)
    return [] if name in (*_RARE, "unreadable") and not path.is_file() else _read_lines(path, last=last)


def read_sample_logs(output_dir: Path) -> list[list[dict[str, Any]]]:
    """Return the entries of the log of samples of each process; none of a process whose log is gone.

    Raises:
        BucketingError: If there is no log of samples.
    """
    paths = {_process_of(path): path for path in _sample_logs(output_dir) or [log_path(output_dir, "samples")]}
    processes = range(count_processes(output_dir))
    return [_read_lines(paths[process]) if process in paths else [] for process in processes]


def count_processes(output_dir: Path) -> int:
    """Return how many processes logged samples, by the names of their logs."""
    return 1 + max(map(_process_of, _sample_logs(output_dir)), default=0)


def _sample_logs(output_dir: Path) -> list[Path]:
    files = log_path(output_dir, "samples").parent.glob("samples-*.jsonl")
    return sorted(files, key=_process_of)


def _process_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _read_lines(path: Path, *, last: int | None = None) -> list[dict[str, Any]]:
    if not path.is_file():
        raise BucketingError(f"{path} does not exist; is this the output_dir of a training run?")
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()  # a run may be writing the last line, or was killed then
    return [json.loads(line) for line in (lines if last is None else lines[-last:])]
