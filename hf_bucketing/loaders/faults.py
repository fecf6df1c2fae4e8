"""Unreadable samples: when they end a run, and the samples that replace them, with a log and limits."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..buckets.arrays import IntArray
from ..errors import BucketingError, ColumnError, MediaError, explains_arguments
from ..randomness import ADD_ROWS, ROW, Purpose, generator
from ..settings import check_at_least, check_literals, check_shares, setting

OnFault = Literal["raise", "replace"]


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """Decide what happens to samples that cannot be read.

    Args:
        on_error (`"raise"` or `"replace"`): Whether an unreadable sample ends the run, or is logged and replaced by
            another sample of the same bucket (in packs, of as many tokens); in a stream, by the next one.
        max_errors (`int`): Consecutive unreadable samples tolerated in one worker before the run fails.
        max_error_share (`float`): Share of the data set, from 0 to 1, that may be unreadable in one epoch before the
            run fails; in a stream, of the rows that a worker has read, once more than `max_errors` are unreadable.

    Raises:
        BucketingError: If `on_error` is unknown or a limit is out of range.
    """

    on_error: OnFault = setting("raise", encoded="media", held_out="raise")
    max_errors: int = 100
    max_error_share: float = 0.01

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(0, self, "max_errors")
        check_shares(self, "max_error_share")

    def log(self, path: str | Path) -> FaultLog | None:
        """Return the log of the unreadable rows of a stream, which others replace, or None if they end the run."""
        return FaultLog(log=path, faults=self) if self.on_error == "replace" else None

    def replacements(self, dataset: Any, *, log: str | Path) -> Replacements | None:
        """Return what a collator replaces unreadable samples with, or None if they end the run.

        Args:
            dataset (`datasets.Dataset`): See [`Replacements`].
            log (`str` or `Path`): See [`Replacements`].

        Raises:
            ColumnError: If samples are replaced and there is no `index` column.
        """
        return Replacements(dataset, log=log, faults=self) if self.on_error == "replace" else None


@explains_arguments()
class FaultLog:
    """Log unreadable samples, and stop the run if too many of them follow one another.

    All workers of all processes append to one log, one JSON object per line: `epoch`, `index`, `reason`, and the index
    of the `replacement`, which is null in a stream, as it comes later. Workers write it ahead of training, so it may
    name samples that were not trained; those that were replaced are where `index` and `planned_index` of a batch
    differ.

    Args:
        log (`str` or `Path`): Path of the log; its folder is created.
        faults ([`FaultRule`]): Limits; `on_error` must be `"replace"`.

    Raises:
        BucketingError: If `faults.on_error` is `"raise"`.
    """

    def __init__(self, *, log: str | Path, faults: FaultRule = FaultRule(on_error="replace")) -> None:
        if faults.on_error != "replace":
            raise BucketingError(
                'Unreadable samples are replaced only under `on_error="replace"`, got '
                f'`on_error="{faults.on_error}"`; leave it out, or pass FaultRule(on_error="replace", …).'
            )
        self.log = Path(log)
        self.faults = faults
        self.consecutive = 0
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def report(self, *, epoch: int, index: int, reason: str, replacement: int | None = None) -> None:
        """Log an unreadable sample, and raise if too many follow one another.

        Raises:
            MediaError: Beyond `max_errors`.
        """
        line = json.dumps({"epoch": epoch, "index": index, "reason": reason, "replacement": replacement}) + "\n"
        # A single write to a file opened for appending stays in one piece while other processes write too.
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        self.consecutive += 1
        if self.consecutive > self.faults.max_errors:
            raise MediaError(
                f"{self.consecutive} samples in a row could not be read; the last: {reason} See {self.log}, remove "
                "the samples, or raise `max_errors`."
            )

    def check_share(self, unreadable: int, *, rows: int, epoch: int, reason: str) -> None:
        """Raise if too many samples of an epoch are unreadable.

        Args:
            unreadable (`int`): How many are.
            rows (`int`): Samples among which they were found.
            epoch (`int`): The epoch, for the message.
            reason (`str`): What is wrong with the last one, for the message.

        Raises:
            MediaError: Beyond `max_error_share`.
        """
        if unreadable > self.faults.max_error_share * rows:
            raise MediaError(
                f"{unreadable} of {rows} samples could not be read in epoch {epoch}, more than the tolerated share of "
                f"{self.faults.max_error_share:.2%}; the last: {reason} See {self.log}, remove the samples, or raise "
                "`max_error_share`."
            )


@explains_arguments()
class Replacements(FaultLog):
    """Choose the samples that replace unreadable ones, log each of them, and stop the run if there are too many.

    The log is also the count of the samples that are unreadable in an epoch: it is read again at each error, and a
    sample that fails again after a restart counts once. Without a file system that all machines share, each machine
    counts its own errors.

    Args:
        dataset (`datasets.Dataset`): Data set that is loaded, with the columns `hf_bucketing_row`, and `bucket_id` or
            `num_tokens`.
        log (`str` or `Path`): As in [`FaultLog`].
        faults ([`FaultRule`]): As in [`FaultLog`].

    Raises:
        BucketingError: As [`FaultLog`].
        ColumnError: If there is no `hf_bucketing_row`.
    """

    def __init__(self, dataset: Any, *, log: str | Path, faults: FaultRule = FaultRule(on_error="replace")) -> None:
        super().__init__(log=log, faults=faults)
        if ROW not in dataset.column_names:
            raise ColumnError(f"Replacements need a column {ROW}, but there are {dataset.column_names}; {ADD_ROWS}.")
        self.dataset = dataset
        self._columns: dict[str, IntArray] = {}
        self._read_to = 0
        self._listed: set[tuple[int, int]] = set()

    def column(self, name: str) -> IntArray:
        """Return a column of whole numbers; it is read once.

        Raises:
            ColumnError: If there is no such column.
        """
        if name not in self.dataset.column_names:
            raise ColumnError(
                f"Replacements are chosen by {name!r}, but the data set has {self.dataset.column_names}."
            )
        if name not in self._columns:
            # numpy would read a Column row by row.
            self._columns[name] = np.asarray(self.dataset[name][:], np.int64)
        return self._columns[name]

    def choose(self, candidates: IntArray, *, index: int, seed: int, epoch: int) -> list[int]:
        """Return up to 32 of the candidate positions in random order, a function of the arguments alone."""
        candidates = candidates[self.column(ROW)[candidates] != index]
        rng = generator(Purpose.REPLACEMENT, seed, epoch, index)
        return rng.choice(candidates, size=min(32, len(candidates)), replace=False).tolist() if len(candidates) else []

    def report(self, *, epoch: int, index: int, reason: str, replacement: int | None = None) -> None:
        """Log an unreadable sample, and raise if there are too many.

        Raises:
            MediaError: Beyond either limit.
        """
        super().report(epoch=epoch, index=index, reason=reason, replacement=replacement)
        self.check_share(self._count(epoch), rows=len(self.dataset), epoch=epoch, reason=reason)

    def _count(self, epoch: int) -> int:
        with self.log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read_to += len(complete)
        entries = map(json.loads, complete.splitlines())
        self._listed.update((entry["epoch"], entry["index"]) for entry in entries)
        return sum(listed == epoch for listed, _ in self._listed)
