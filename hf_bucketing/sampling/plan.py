"""The plan of an epoch: all its batches, decided before the first one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import PlanError

IntArray = npt.NDArray[np.int64]
Purpose = Literal["buckets", "packs", "lengths", "weights"]

_STREAMS: dict[Purpose, int] = {"buckets": 1, "packs": 2, "lengths": 3, "weights": 4}

MIXED = -1
"""The bucket id of a batch in a mixed step, whose processes hold different buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """All batches of one epoch, for all processes.

    Batch `i` belongs to step `i // num_processes` and to process `i % num_processes`, which is how accelerate shards
    a batch sampler. Every process has the same number of steps.

    Args:
        indices (`int64`, shape `(num_samples,)`): Row numbers, batch after batch.
        offsets (`int64`, shape `(num_batches + 1,)`): Batch `i` is `indices[offsets[i]:offsets[i + 1]]`, never empty.
        bucket_ids (`int32`, shape `(num_batches,)`): Bucket of each batch, −1 where it has none (packs) or where the
            processes of its step hold different ones because they share what was left over.
        num_processes (`int`): Processes that share the batches.
        repeated (`int`): Occurrences in the plan of rows that it holds already.
        drop_reasons (mapping of `str` to `int`): Rows that are not in the plan, by reason.
        consumed (`int`): Occurrences that the epoch had before this plan, which holds what it had left: a plan made
            in the middle of an epoch, for another number of processes. `kept + dropped + consumed` is the number of
            rows, unless rows repeat.

    Raises:
        PlanError: If the number of batches is no multiple of `num_processes`, or arrays and offsets do not fit.

    Example:
        Two processes, two steps of two samples each: process 1 gets rows 5 and 1, then 3 and 4.

        >>> plan = EpochPlan(indices=np.array([0, 2, 5, 1, 7, 6, 3, 4]), offsets=np.arange(0, 9, 2),
        ...                  bucket_ids=np.array([0, 0, 1, 1]), num_processes=2)
        >>> [batch.tolist() for batch in plan.batches(process_index=1)]
        [[5, 1], [3, 4]]
    """

    indices: IntArray
    offsets: IntArray
    bucket_ids: npt.NDArray[np.int32]
    num_processes: int
    repeated: int = 0
    drop_reasons: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.num_batches % self.num_processes:
            raise PlanError(f"{self.num_batches} batches cannot be dealt evenly to {self.num_processes} processes.")
        if len(self.bucket_ids) != self.num_batches or self.offsets[-1] != len(self.indices):
            raise PlanError(
                f"{self.num_batches} batches over {len(self.indices)} indices do not fit {len(self.bucket_ids)} "
                f"bucket ids and a last offset of {self.offsets[-1]}."
            )

    @property
    def num_batches(self) -> int:
        """Batches of all processes."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, the same on every process."""
        return self.num_batches // self.num_processes

    @property
    def kept(self) -> int:
        """Different samples in the plan."""
        return len(self.indices) - self.repeated

    @property
    def dropped(self) -> int:
        """Rows that are not in the plan."""
        return sum(self.drop_reasons.values())

    @property
    def num_mixed_steps(self) -> int:
        """Steps whose processes hold different buckets; all of them in a plan of packs, which have no bucket."""
        by_step = self.bucket_ids.reshape(self.num_steps, self.num_processes)
        first = by_step[:, :1]
        return int(np.count_nonzero(((by_step != first) | (first == MIXED)).any(axis=1)))

    def summary(self) -> dict[str, Any]:
        """Return the counts of the plan as JSON values."""
        return {
            "num_processes": self.num_processes,
            "num_steps": self.num_steps,
            "num_mixed_steps": self.num_mixed_steps,
            "kept": self.kept,
            "repeated": self.repeated,
            "dropped": dict(self.drop_reasons),
        }

    def batch(self, position: int) -> IntArray:
        """Return the row numbers of batch `position`, shape `(batch,)`."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def batches(self, *, process_index: int | None = None, first_step: int = 0) -> Iterator[IntArray]:
        """Yield the batches of one process, or of all in process-interleaved order, from `first_step` on."""
        start, stride = (0, 1) if process_index is None else (process_index, self.num_processes)
        for position in range(first_step * self.num_processes + start, self.num_batches, stride):
            yield self.batch(position)

    def samples_in_steps(self, start: int, stop: int) -> int:
        """Return how many samples all processes together take in steps `start` to `stop - 1`; `stop` may overshoot."""
        first, last = (min(step, self.num_steps) * self.num_processes for step in (start, stop))
        return int(self.offsets[last] - self.offsets[first])


def rng_for(seed: int, epoch: int, purpose: Purpose, *, consumed: int = 0) -> np.random.Generator:
    """Return the generator of one decision in one epoch; every process makes the same one.

    A plan of the rest of an epoch has another order than the plan of the whole, by how much was `consumed`.
    """
    if seed < 0 or epoch < 0:
        raise PlanError(f"Seed and epoch must not be negative, got seed={seed}, epoch={epoch}.")
    return np.random.default_rng((seed, epoch, _STREAMS[purpose], *([consumed] if consumed else [])))


def check_processes(num_processes: int) -> None:
    """Raise PlanError unless at least one process shares the plan."""
    if num_processes < 1:
        raise PlanError(f"num_processes must be at least 1, got {num_processes}.")
