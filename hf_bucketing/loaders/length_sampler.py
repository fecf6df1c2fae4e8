"""The length batch sampler: batches of samples of similar length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..errors import PlanError, explains_arguments
from ..plans.epoch import EpochPlan
from ..plans.lengths import (
    Boundaries,
    LengthPlanConfig,
    LengthStrategy,
    length_buckets,
    oversize_rows,
    plan_lengths,
)
from ..plans.rows import column_of
from ..settings import chosen_config
from .planned import PlannedBatchSampler
from .row_column import RowColumn, column_name, refuse_bucket_ids


@explains_arguments(PlanError)
class LengthBatchSampler(PlannedBatchSampler):
    """Draw batches of samples that differ in length alone, such as audio or latents of one height and width.

    For a `torch.utils.data.Subset`, give the lengths of its own samples, in its order: `lengths[subset.indices]`.

    The keywords from `batch_size` to `evaluation` are the most used settings of the plan, which
    [`LengthPlanConfig`][hf_bucketing.plans.LengthPlanConfig] describes; `config` holds all settings in one value
    instead. `weights`, `longest_first`, `num_processes` and `process_index` are those of [`PlannedBatchSampler`].

    Args:
        lengths (array of `int` or `float`, shape `(n,)`): Length of each sample of the DataLoader's data set, in any
            unit: tokens, frames, seconds. Samples with a length of 0 or less are never drawn.
        config ([`LengthPlanConfig`][hf_bucketing.plans.LengthPlanConfig], *optional*): All settings of the plan.

    Raises:
        PlanError: On settings that `LengthPlanConfig` refuses, a setting beside `config`, or if a sample exceeds
            `max_tokens` and `oversize="error"`; the message names the longest.

    Example:
        >>> sampler = LengthBatchSampler([3, 9, 4, 8], max_tokens=20, num_buckets=2, num_processes=1, shuffle=False)
        >>> list(sampler), sampler.boundaries
        ([[0, 2], [1, 3]], [4, 9])
    """

    config: LengthPlanConfig

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        batch_size: int | None = None,
        max_tokens: float | None = None,
        strategy: LengthStrategy | None = None,
        num_buckets: int | None = None,
        boundaries: Boundaries | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        evaluation: bool | None = None,
        config: LengthPlanConfig | None = None,
        weights: npt.ArrayLike | None = None,
        longest_first: bool = False,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        config = chosen_config(
            LengthPlanConfig,
            config,
            error=PlanError,
            batch_size=batch_size,
            max_tokens=max_tokens,
            strategy=strategy,
            num_buckets=num_buckets,
            boundaries=boundaries,
            shuffle=shuffle,
            seed=seed,
            evaluation=evaluation,
        )
        refuse_bucket_ids(lengths, argument="lengths")
        self.lengths = column_of(lengths, "lengths")
        super().__init__(
            config,
            num_rows=len(self.lengths),
            weights=weights,
            longest_first=longest_first,
            num_processes=num_processes,
            process_index=process_index,
        )
        name = column_name(lengths)
        if name is not None:
            self._column = RowColumn(name=name, values=self.lengths, must_equal=True)
        oversize_rows(self.lengths, self.config)

    @property
    def boundaries(self) -> list[float]:
        """Upper bound of each bucket, included: the lengths to pad to for static shapes; whole if the lengths are."""
        bounds: list[float] = length_buckets(self.lengths, self.config).tolist()
        return bounds

    def _drawn_rows(self) -> BoolArray:
        drawn: BoolArray = self.lengths > 0
        return drawn

    def _planner(self, epoch: int) -> Callable[..., EpochPlan]:
        return partial(plan_lengths, self.lengths, self.config)

    def _sample_costs(self, plan: EpochPlan, epoch: int) -> IntArray | FloatArray:
        if not plan.num_steps:
            return np.zeros(0)
        longest: FloatArray = np.maximum.reduceat(self.lengths[plan.indices], plan.offsets[:-1])
        return np.repeat(longest, np.diff(plan.offsets))

    def _columns(self) -> dict[str, object]:
        return {"rows": self.lengths}
