"""The plan of an epoch: all its batches, decided before the first one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray, column_values
from ..errors import PlanError, explains_arguments

MIXED = -2
"""Bucket id of a batch that belongs to no bucket: in a mixed step, or of any lengths.

The processes of a mixed step hold different buckets, because they share the remainders.
"""

PACKED = -3
"""Bucket id of a pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """All batches of one epoch, for all processes.

    Batch `i` belongs to step `i // num_processes` and to process `i % num_processes`, which is how accelerate shards
    a batch sampler. Every process has the same number of steps.

    Args:
        indices (`int64`, shape `(num_samples,)`): Row numbers, batch after batch.
        offsets (`int64`, shape `(num_batches + 1,)`): Batch `i` is `indices[offsets[i]:offsets[i + 1]]`, never empty.
        bucket_ids (`int32`, shape `(num_batches,)`): Bucket of each batch, [`MIXED`] (−2) for a batch without a
            bucket of its own, [`PACKED`] (−3) for a pack.
        num_processes (`int`): Processes that share the batches.
        repeated (`int`): Occurrences in the plan of rows that the epoch holds already.
        drop_reasons (mapping of `str` to `int`): Number of rows that are not in the plan, by reason; where rows occur
            several times, the `remainder` counts occurrences.
        consumed (`int`): Occurrences that the epoch had before this plan. Above 0 for the plan of what is left of an
            epoch, made for another number of processes. `kept + dropped + consumed` is the number of rows, unless
            rows repeat.

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

    @classmethod
    def without_steps(
        cls, num_processes: int, *, consumed: int = 0, drop_reasons: Mapping[str, int] = MappingProxyType({})
    ) -> EpochPlan:
        """Return a plan of no step: that of a finished epoch, or of too few rows; arguments as for any plan."""
        return cls(
            indices=np.zeros(0, np.int64),
            offsets=np.zeros(1, np.int64),
            bucket_ids=np.zeros(0, np.int32),
            num_processes=num_processes,
            drop_reasons=drop_reasons,
            consumed=consumed,
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
        """Rows that are not in the plan, and occurrences of the remainder; see `drop_reasons`."""
        return sum(self.drop_reasons.values())

    @property
    def num_mixed_steps(self) -> int:
        """Steps whose processes hold different buckets; all of them in a plan without buckets."""
        by_step = self.bucket_ids.reshape(self.num_steps, self.num_processes)
        first = by_step[:, :1]
        return int(np.count_nonzero(((by_step != first) | np.isin(first, (MIXED, PACKED))).any(axis=1)))

    def counts_by_group(self, groups: npt.ArrayLike, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return how many rows of each group are kept and dropped, and how often its rows are repeated.

        Of what is left of an epoch (`consumed` above 0), nothing is counted as dropped.

        Args:
            groups (array of `int`, shape `(num_rows,)`): Group of each row of the data set, a position in `names`.
            names (sequence of `str`): Name of each group.

        Example:
            >>> plan = EpochPlan(indices=np.array([0, 3, 2, 3]), offsets=np.array([0, 2, 4]),
            ...                  bucket_ids=np.array([0, 0]), num_processes=1)
            >>> plan.counts_by_group([0, 0, 1, 1], ["a", "b"])["b"]
            {'kept': 2, 'repeated': 1, 'dropped': 0}
        """
        group, count = column_values(groups, np.int64), len(names)
        rows = np.bincount(group, minlength=count)
        kept = np.bincount(group[np.unique(self.indices)], minlength=count)
        repeated = np.bincount(group[self.indices], minlength=count) - kept
        dropped = np.zeros_like(rows) if self.consumed else rows - kept
        counts = zip(names, kept.tolist(), repeated.tolist(), dropped.tolist(), strict=True)
        return {name: dict(zip(("kept", "repeated", "dropped"), numbers, strict=True)) for name, *numbers in counts}

    @explains_arguments(PlanError)
    def summary(
        self,
        *,
        num_tokens: npt.ArrayLike | None = None,
        costs: npt.ArrayLike | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Return the counts of the plan as JSON values, and the cost of its steps if the rows' costs are known.

        Args:
            num_tokens (array, shape `(num_rows,)`, *optional*): Tokens or length of each row of the data set. Adds
                `padding`: the share of the computed tokens that belong to no sample.
            costs (array, shape `(num_rows,)`, *optional*): Cost of each row; by default its tokens. Adds
                `cost_imbalance`, largest ÷ mean cost over the processes, summed over the steps (1: no process ever
                waits), and the `cheapest_step` and the `most_expensive_step`, by their slowest process.
            max_tokens (`int`, *optional*): Tokens that a pack has room for. Without it, batches are padded to their
                longest sample, and each of their samples costs as much as the most expensive.
        """
        counts = {
            "num_processes": self.num_processes,
            "num_steps": self.num_steps,
            "num_mixed_steps": self.num_mixed_steps,
            "kept": self.kept,
            "repeated": self.repeated,
            "consumed": self.consumed,
            "dropped": dict(self.drop_reasons),
        }
        if not self.num_steps:
            return counts
        sizes = np.diff(self.offsets)
        if num_tokens is not None:
            tokens = column_values(num_tokens)[self.indices]
            longest = np.maximum.reduceat(tokens, self.offsets[:-1])
            computed = (longest * sizes).sum() if max_tokens is None else max_tokens * self.num_batches
            counts["padding"] = 1 - float(tokens.sum() / computed)
        if costs is not None or num_tokens is not None:
            sample_costs = column_values(num_tokens if costs is None else costs, np.float64)[self.indices]
            if max_tokens is None:
                sample_costs = np.repeat(np.maximum.reduceat(sample_costs, self.offsets[:-1]), sizes)
            counts.update(self._cost_summary(sample_costs))
        return counts

    def _cost_summary(self, sample_costs: FloatArray) -> dict[str, Any]:
        batches = np.add.reduceat(sample_costs, self.offsets[:-1]).reshape(-1, self.num_processes)
        slowest = batches.max(axis=1)
        cheapest, dearest = int(slowest.argmin()), int(slowest.argmax())
        return {
            "cost_imbalance": float(slowest.sum() / batches.mean(axis=1).sum()),
            "cheapest_step": {"step": cheapest, "cost": float(slowest[cheapest])},
            "most_expensive_step": {"step": dearest, "cost": float(slowest[dearest])},
        }

    def most_expensive_first(self, sample_costs: npt.ArrayLike) -> EpochPlan:
        """Return this plan with its most expensive step moved to the front, so that a lack of memory shows at once.

        Args:
            sample_costs (array, shape `(num_samples,)`): Cost of each sample of the plan, in the order of `indices`.
        """
        if not self.num_steps:
            return self
        step = self._cost_summary(np.asarray(sample_costs, np.float64))["most_expensive_step"]["step"]
        start, stop = step * self.num_processes, (step + 1) * self.num_processes
        first, last = self.offsets[start], self.offsets[stop]
        sizes, labels = np.diff(self.offsets), self.bucket_ids
        sizes = np.concatenate([sizes[start:stop], sizes[:start], sizes[stop:]])
        return replace(
            self,
            indices=np.concatenate([self.indices[first:last], self.indices[:first], self.indices[last:]]),
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            bucket_ids=np.concatenate([labels[start:stop], labels[:start], labels[stop:]]),
        )

    def batch(self, position: int) -> IntArray:
        """Return the row numbers of batch `position`, shape `(batch,)`."""
        return self.indices[self.offsets[position] : self.offsets[position + 1]]

    def batches(self, *, process_index: int | None = None, first_step: int = 0) -> Iterator[IntArray]:
        """Yield the batches of one process, or of all in process-interleaved order, from `first_step` on."""
        start, stride = (0, 1) if process_index is None else (process_index, self.num_processes)
        for position in range(first_step * self.num_processes + start, self.num_batches, stride):
            yield self.batch(position)

    def rows_in_steps(self, start: int, stop: int) -> IntArray:
        """Return the rows of all processes in steps `start` to `stop - 1`; `stop` may lie beyond the last step."""
        first, last = (min(step, self.num_steps) * self.num_processes for step in (start, stop))
        return self.indices[self.offsets[first] : self.offsets[last]]

    def samples_in_steps(self, start: int, stop: int) -> int:
        """Return how many samples all processes together take in steps `start` to `stop - 1`; see `rows_in_steps`."""
        return len(self.rows_in_steps(start, stop))
