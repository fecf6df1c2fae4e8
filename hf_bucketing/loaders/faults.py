"""Unreadable samples: others in their place, a log of each, and a limit."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..buckets.arrays import IntArray
from ..errors import BucketingError, ColumnError, MediaError
from ..randomness import Purpose, generator
from ..settings import check_at_least, check_literals, check_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """What happens to unreadable samples.

    Args:
        on_error (`"raise"` or `"replace"`): Whether an unreadable sample ends the run, or is logged and replaced by
            another one of its bucket.
        max_errors (`int`): Consecutive unreadable samples tolerated before the run fails.
        max_error_share (`float`): Share of the data set, in [0, 1], that may be unreadable in one epoch.

    Raises:
        BucketingError: On an unknown `on_error`, a negative number, or a share outside [0, 1].
    """

    on_error: Literal["raise", "replace"] = "raise"
    max_errors: int = 100
    max_error_share: float = 0.01

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(0, self, "max_errors")
        check_shares(self, "max_error_share")


class StandIns:
    """Where the stand-in of an unreadable sample comes from, and how many there may be.

    All workers of all processes append to one log, one JSON object per line: `epoch`, `index`, `reason` and the
    `stand_in`'s index. The log is also the count: it is read back at each error, and a sample that fails again after a
    restart counts once. Without a file system that all machines share, each machine counts its own.

    Args:
        dataset (`datasets.Dataset`): The one that is loaded, with an `index` column, and `bucket_id` or `num_tokens`.
        log (`str` or `Path`): The log; its folder is made.
        max_errors (`int`): More unreadable samples than this in a row, in one worker, are an error.
        max_share (`float`): More unreadable samples than this share of the data set, in one epoch, are an error.

    Raises:
        BucketingError: On a negative limit.
        ColumnError: If there is no `index` column.
    """

    def __init__(self, dataset: Any, *, log: str | Path, max_errors: int = 100, max_share: float = 0.01) -> None:
        if max_errors < 0 or not 0 <= max_share <= 1:
            raise BucketingError(
                f"Expected `max_errors` ≥ 0 and `max_share` in [0, 1], got {max_errors} and {max_share}."
            )
        if "index" not in dataset.column_names:
            raise ColumnError(
                f"Stand-ins need an index column beside {dataset.column_names}; add one with "
                'dataset.add_column("index", range(len(dataset))).'
            )
        self.dataset = dataset
        self.log = Path(log)
        self.max_errors = max_errors
        self.max_share = max_share
        self.in_a_row = 0
        self._columns: dict[str, IntArray] = {}
        self._read_to = 0
        self._listed: set[tuple[int, int]] = set()
        self.log.parent.mkdir(parents=True, exist_ok=True)

    def column(self, name: str) -> IntArray:
        """Return a column of whole numbers, kept once it was read.

        Raises:
            ColumnError: If there is none of that name.
        """
        if name not in self.dataset.column_names:
            raise ColumnError(f"Stand-ins are chosen by {name!r}, but the data set has {self.dataset.column_names}.")
        if name not in self._columns:
            self._columns[name] = np.asarray(self.dataset[name], np.int64)
        return self._columns[name]

    def choose(self, candidates: IntArray, *, index: int, seed: int, epoch: int) -> list[int]:
        """Return up to 32 of the candidate positions in random order, which depends on the arguments alone."""
        candidates = candidates[self.column("index")[candidates] != index]
        rng = generator(Purpose.REPLACEMENT, seed, epoch, index)
        return rng.choice(candidates, size=min(32, len(candidates)), replace=False).tolist() if len(candidates) else []

    def report(self, *, epoch: int, index: int, reason: str, stand_in: int) -> None:
        """Write an unreadable sample to the log, and stop if there are too many.

        Raises:
            MediaError: Past either limit.
        """
        line = json.dumps({"epoch": epoch, "index": index, "reason": reason, "stand_in": stand_in}) + "\n"
        # One write to a file opened for appending stays in one piece, whoever else writes.
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        self.in_a_row += 1
        if self.in_a_row > self.max_errors:
            raise MediaError(
                f"{self.in_a_row} samples in a row could not be read; the last: {reason} See {self.log}, remove the "
                "samples, or raise `max_errors`."
            )
        unreadable, rows = self._count(epoch), len(self.dataset)
        if unreadable > self.max_share * rows:
            raise MediaError(
                f"{unreadable} of {rows} samples could not be read in epoch {epoch}, more than the share of "
                f"{self.max_share:.2%} that is borne; the last: {reason} See {self.log}, remove the samples, or raise "
                "`max_share`."
            )

    def _count(self, epoch: int) -> int:
        with self.log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read_to += len(complete)
        entries = map(json.loads, complete.splitlines())
        self._listed.update((entry["epoch"], entry["index"]) for entry in entries)
        return sum(listed == epoch for listed, _ in self._listed)
