"""The bucket plan: every batch of one bucket, every step of one bucket on all processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .plan import MIXED, EpochPlan, IntArray, check_processes, rng_for
from .rows import EpochRows, epoch_rows

TailPolicy = Literal["short", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlanConfig:
    """What a bucket plan depends on, beside the rows, the epoch and the number of processes.

    Args:
        batch_size (`int` or mapping of bucket id to `int`): Samples per process and step.
        tail (`"short"` or `"drop"`): What happens to a bucket's samples that do not fill a step on all processes.
            `"short"` deals them evenly in one smaller step, and what remains of all buckets one by one in mixed
            steps, so that fewer than `num_processes` samples are dropped per epoch, other ones each epoch.
            `"drop"` leaves them out of this epoch.
        seed (`int`): Not negative.

    Raises:
        PlanError: On a batch size below 1 or an unknown tail policy.
    """

    batch_size: int | Mapping[int, int]
    tail: TailPolicy = "short"
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = self.batch_size.values() if isinstance(self.batch_size, Mapping) else [self.batch_size]
        if not sizes or min(sizes) < 1:
            raise PlanError(f"Every batch size must be at least 1, got {self.batch_size!r}.")
        if self.tail not in ("short", "drop"):
            raise PlanError(f'tail must be "short" or "drop", got {self.tail!r}.')

    def batch_sizes(self, bucket_ids: IntArray) -> IntArray:
        """Return the batch size of each of the given buckets.

        Raises:
            PlanError: If a mapping names no batch size for one of them.
        """
        if not isinstance(self.batch_size, Mapping):
            return np.full(len(bucket_ids), self.batch_size, np.int64)
        missing = [int(bucket) for bucket in bucket_ids if int(bucket) not in self.batch_size]
        if missing:
            raise PlanError(f"batch_size names no size for buckets {missing}; add them or reject their samples.")
        return np.array([self.batch_size[int(bucket)] for bucket in bucket_ids], np.int64)


def plan_buckets(
    bucket_ids: npt.ArrayLike,
    config: BucketPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of bucketed batches in which all processes take the same bucket in the same step.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row; negative for rejected rows, which are dropped.
        config ([`BucketPlanConfig`]): Batch sizes, tail policy and seed.
        epoch (`int`): Not negative; every epoch has its own order.
        num_processes (`int`): At least 1.
        consumed (array of `int`, *optional*): Row numbers that were seen in this epoch, as often as they were; the
            plan then holds what the epoch has left, which may be no step at all.

    Returns:
        [`EpochPlan`]: With drop reasons `rejected` and `remainder`. Steps stand in one uniform random order, which
        has the distribution of drawing buckets one after the other weighted by the steps that they have left.

    Raises:
        PlanError: If no row has a bucket, or too few for one step, or a bucket has no batch size.

    Example:
        Seven rows of bucket 0 and four of bucket 3, two processes, batches of two: one full step of each, then one
        short step of one row per process for the three rows that bucket 0 has left; its last row is dropped.

        >>> plan = plan_buckets([0] * 7 + [3] * 4, BucketPlanConfig(batch_size=2), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons), sorted(plan.bucket_ids.tolist())
        (3, 10, {'remainder': 1}, [0, 0, 0, 0, 3, 3])
    """
    check_processes(num_processes)
    ids = np.asarray(bucket_ids)
    chosen = epoch_rows(ids >= 0, consumed=consumed, seed=config.seed, epoch=epoch)
    rng = rng_for(config.seed, epoch, "buckets", consumed=chosen.consumed)
    rows, present, counts = _shuffled_rows(ids, chosen.rows, rng)
    if not len(rows) and not chosen.consumed:
        raise PlanError(
            "No row has a bucket: the data set is empty or every row was rejected. "
            "Look at the counts of its rejection column, and choose a table that fits the data."
        )
    per_step = config.batch_sizes(present) * num_processes
    full, rest = counts // per_step, counts % per_step
    short = rest // num_processes if config.tail == "short" else np.zeros_like(rest)
    starts = np.cumsum(counts) - counts
    kept = full * per_step + short * num_processes
    # One entry per step: first row, samples per process, bucket.
    first = [
        np.repeat(starts, full) + _ranges(full) * np.repeat(per_step, full),
        (starts + full * per_step)[short > 0],
    ]
    size = [np.repeat(per_step // num_processes, full), short[short > 0]]
    bucket = [np.repeat(present, full), present[short > 0]]
    if config.tail == "short":
        left = np.repeat(starts + kept, counts - kept) + _ranges(counts - kept)
        left = rng.permutation(left)
        mixed = len(left) // num_processes
        first.append(len(rows) + np.arange(mixed) * num_processes)
        size.append(np.ones(mixed, np.int64))
        bucket.append(np.full(mixed, MIXED))
        rows = np.concatenate([rows, rows[left]])
    steps = rng.permutation(sum(map(len, first)))
    if not len(steps) and not chosen.consumed:
        raise PlanError(
            f"{len(rows)} rows with a bucket do not fill one step of {num_processes} processes"
            + (' under tail="drop"; use tail="short" or smaller batches.' if config.tail == "drop" else ".")
        )
    return _assemble(
        rows,
        (np.concatenate(first)[steps], np.concatenate(size)[steps], np.concatenate(bucket)[steps]),
        chosen=chosen,
        num_processes=num_processes,
    )


def _shuffled_rows(
    bucket_ids: IntArray, rows: IntArray, rng: np.random.Generator
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the given rows, bucket by bucket and shuffled within; the buckets present; the rows of each."""
    rng.shuffle(rows)
    present, counts = np.unique(bucket_ids[rows], return_counts=True)
    ranks = np.searchsorted(present, bucket_ids[rows])
    small = ranks.astype(np.uint16) if len(present) < 2**16 else ranks  # numpy sorts 16-bit keys by radix
    return rows[np.argsort(small, kind="stable")], present.astype(np.int64), counts.astype(np.int64)


def _ranges(counts: IntArray) -> IntArray:
    """Return 0 … c−1 for each count c, one after the other: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _assemble(
    rows: IntArray,
    steps: tuple[IntArray, IntArray, IntArray],
    *,
    chosen: EpochRows,
    num_processes: int,
) -> EpochPlan:
    first, size, bucket = steps
    per_step = size * num_processes
    indices = rows[np.repeat(first, per_step) + _ranges(per_step)]
    reasons = {**chosen.drop_reasons, "remainder": len(chosen.rows) - len(indices)}
    return EpochPlan(
        indices=indices,
        offsets=np.concatenate([[0], np.cumsum(np.repeat(size, num_processes))]),
        bucket_ids=np.repeat(bucket, num_processes).astype(np.int32),
        num_processes=num_processes,
        drop_reasons=MappingProxyType({reason: count for reason, count in reasons.items() if count}),
        consumed=chosen.consumed,
    )
