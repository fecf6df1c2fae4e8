"""The length batch sampler: batches of samples of like length."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..plans.epoch import EpochPlan, IntArray
from ..plans.lengths import LengthPlanConfig, length_buckets, oversize_rows, plan_lengths
from .planned import PlannedBatchSampler
from .state import settings


class LengthBatchSampler(PlannedBatchSampler):
    """Draw batches of samples that differ in length alone, such as audio or latents of one height and width.

    For a `torch.utils.data.Subset`, give the lengths of its own samples, in its order: `lengths[subset.indices]`.

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): Length of each sample of the DataLoader's data set, in any
            unit; 0 or less for those that are never drawn.
        weights (array of `float`, shape `(n,)`, *optional*): How often each row comes per epoch; by default once.
        longest_first (`bool`): Start every epoch with its most expensive step (samples × longest), to run out of
            memory at once or never.
        num_processes (`int`, *optional*): Defaults to accelerate's.
        process_index (`int`, *optional*): For plain DDP; see [`PlannedBatchSampler`].
        **options: `strategy`, `batch_size` or `capacity`, `num_buckets`, `boundaries`, `drop_last`, `shuffle`,
            `oversize` and `seed` of [`LengthPlanConfig`][hf_bucketing.plans.LengthPlanConfig].

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, or a sample exceeds the capacity and
            `oversize="error"`; the message names the longest.

    Example:
        >>> sampler = LengthBatchSampler([3, 9, 4, 8], capacity=20, num_buckets=2, num_processes=1, shuffle=False)
        >>> list(sampler), sampler.boundaries
        ([[0, 2], [1, 3]], [4, 9])
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        longest_first: bool = False,
        num_processes: int | None = None,
        process_index: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_processes=num_processes, process_index=process_index)
        self.lengths = np.asarray(lengths)
        self.weights = None if weights is None else np.asarray(weights, np.float64)
        self.longest_first = longest_first
        self.config = LengthPlanConfig(**options)
        oversize_rows(self.lengths, self.config)

    @property
    def boundaries(self) -> list[float]:
        """Upper bound of each bucket, included: what to pad to for static shapes; whole if the lengths are."""
        bounds: list[float] = length_buckets(self.lengths, self.config).tolist()
        return bounds

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        plan = plan_lengths(
            self.lengths,
            self.config,
            epoch=epoch,
            num_processes=num_processes,
            weights=self.weights,
            consumed=consumed,
        )
        if not self.longest_first or not plan.num_steps:
            return plan
        longest = np.maximum.reduceat(self.lengths[plan.indices], plan.offsets[:-1])
        return plan.most_expensive_first(np.repeat(longest, np.diff(plan.offsets)))

    def _identity(self) -> dict[str, object]:
        return {
            "rows": self.lengths,
            "weights": self.weights,
            "longest_first": self.longest_first,
            **settings(self.config),
        }
