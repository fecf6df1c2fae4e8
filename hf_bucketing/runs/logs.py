"""The logs of a run, each of which is read once, in an order that suits a run that still trains."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..adapters.settings import SETTINGS
from ..buckets.arrays import FloatArray, IntArray
from ..buckets.sizes import Size
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .run_log import TABLE, count_processes, log_path, read_log, read_sample_logs, read_status

Line = dict[str, Any]


class StepLog(NamedTuple):
    """Logged values of each optimizer step.

    Attributes:
        loss (`float64`, shape `(n,)`): Mean loss over the samples of the step.
        samples (`int64`, shape `(n,)`): Samples of all processes in the step.
        seconds (`float64`, shape `(n,)`): Time since the end of the step before.
    """

    loss: FloatArray
    samples: IntArray
    seconds: FloatArray


class Logs:
    """Logs of a run, as [`RunLog`][hf_bucketing.runs.run_log.RunLog] writes them.

    Losses are read at once and the other logs when they are first needed, so that those of a run that still trains
    are at least as far.

    Args:
        folder (`Path`): Output folder of the run.
        name (`str`, *optional*): Name of the run in texts; by default that of its folder.

    Attributes:
        status (mapping): How the run ended, with its steps; empty if that was not logged.
        losses (`list` of `dict`): A line for each optimizer step.

    Raises:
        BucketingError: If the run left no log, here or where it is first read.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder, self.name = folder, folder.name if name is None else name
        self.status = read_status(folder) or {}
        self.losses = read_log(folder, "losses")

    @cached_property
    def plans(self) -> list[Line]:
        """A line for each plan: that of an epoch, or of what is left of one on another number of processes."""
        return read_log(self.folder, "plans")

    @property
    def first_plans(self) -> dict[int, Line]:
        """Counts of each epoch's plan, as [`EpochPlan.summary`][hf_bucketing.plans.EpochPlan] gives them.

        Of an epoch that was resumed on another number of processes, they are those of its beginning. A stream has only
        the number of processes and the epoch in which the pass over it began.
        """
        plans: dict[int, Line] = {}
        for plan in self.plans:
            plans.setdefault(plan["epoch"], plan)
        return plans

    @cached_property
    def samples(self) -> list[list[Line]]:
        """A line for each batch of each process."""
        return read_sample_logs(self.folder)

    @property
    def num_processes(self) -> int:
        """Processes that logged samples, without their logs being read."""
        return count_processes(self.folder)

    @property
    def batches(self) -> Iterator[Line]:
        """The lines of the batches of all processes, one process after another."""
        return chain.from_iterable(self.samples)

    @cached_property
    def skipped(self) -> list[Line]:
        """A line for each optimizer step that changed no weights."""
        return read_log(self.folder, "skipped")

    @cached_property
    def unreadable(self) -> list[Line]:
        """A line for each sample that could not be read."""
        return read_log(self.folder, "unreadable")

    @cached_property
    def resumes(self) -> list[Line]:
        """A line for each time that the run was resumed."""
        return read_log(self.folder, "resumes")

    @cached_property
    def held_out(self) -> list[Line]:
        """A line for each held-out loss up to the last of the steps in `losses`."""
        return [entry for entry in read_log(self.folder, "validation") if entry["global_step"] <= len(self.losses)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the run by name; empty if it saved none."""
        path = self.folder / SETTINGS
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes of the buckets by their ids; empty if the run has no table of them."""
        path = log_path(self.folder, "losses").with_name(TABLE)
        return BucketTable.from_json(path.read_text()).sizes if path.is_file() else ()

    @cached_property
    def steps(self) -> StepLog:
        """Losses, samples and seconds of the optimizer steps, if there are any."""
        if not self.losses or any("samples" not in line or "seconds" not in line for line in self.losses):
            path = log_path(self.folder, "losses")
            raise BucketingError(f"{path} holds no samples and seconds of each step; train again to draw its losses.")
        columns = self.column("train_loss"), self.column("samples").astype(np.int64), self.column("seconds")
        return StepLog(*columns)

    @property
    def by_expert(self) -> dict[str, list[Line]]:
        """The optimizer steps of each transformer, where a run trains two; empty for others."""
        names = sorted({line["expert"] for line in self.losses if "expert" in line})
        return {name: [line for line in self.losses if line.get("expert") == name] for name in names}

    def column(self, name: str) -> FloatArray:
        """Return a value of each optimizer step, NaN where it is not logged."""
        return np.array([line.get(name, math.nan) for line in self.losses], np.float64)
