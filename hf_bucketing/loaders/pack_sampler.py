"""The pack batch sampler: samples of any size that run as one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..plans.bin_packing import PackPlanConfig
from ..plans.epoch import EpochPlan, IntArray
from ..plans.packs import plan_packs, sample_spans
from .planned import PlannedBatchSampler
from .rejected import warn_of_rejected
from .state import settings


class PackBatchSampler(PlannedBatchSampler):
    """Draw packs: samples of any size whose tokens together fit a capacity.

    Args:
        num_tokens (array of `int`, shape `(n,)`, or callable of the epoch): The data set's `num_tokens` column; rows
            of 0 are never drawn. A callable, such as that of [`RandomResize`], counts them anew in each epoch.
        capacity (`int`): Tokens per process and step.
        text_tokens (`int` or array of `int`, shape `(n,)`): Tokens of each row's text, where the model attends to
            them together with its own, as joint attention does.
        weights (array of `float`, shape `(n,)`, *optional*): How often each row comes per epoch; by default once.
        rejection (array, shape `(n,)`, *optional*): The data set's `rejection` column, for the warning that counts
            rejected rows by reason; not needed where `num_tokens` is a column of that data set.
        longest_first (`bool`): Start every epoch with its most expensive step (tokens, or cost with a `cost_model`),
            to run out of memory at once or never.
        num_processes (`int`, *optional*): Defaults to accelerate's.
        process_index (`int`, *optional*): For plain DDP; see [`PlannedBatchSampler`].
        **options: `strategy`, `open_packs`, `window`, `max_samples`, `cost_model`, `max_cost`, `multiple` (set it to
            the packs' `strip_length`: each sample takes whole strips), `balance`, `accumulation_steps`, `oversize` and
            `seed` of [`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig].

    Raises:
        PlanError: On options that [`PackPlanConfig`] refuses, or if a row exceeds a limit and `oversize="error"`; the
            message names the largest.
    """

    def __init__(
        self,
        num_tokens: npt.ArrayLike | Callable[[int], npt.ArrayLike],
        *,
        capacity: int,
        text_tokens: npt.ArrayLike = 0,
        weights: npt.ArrayLike | None = None,
        rejection: npt.ArrayLike | None = None,
        longest_first: bool = False,
        num_processes: int | None = None,
        process_index: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_processes=num_processes, process_index=process_index)
        self._num_tokens = num_tokens
        self.text_tokens = np.asarray(text_tokens, np.int64)
        self.weights = None if weights is None else np.asarray(weights, np.float64)
        self.longest_first = longest_first
        self.config = PackPlanConfig(capacity=capacity, **options)
        first = self.num_tokens
        sample_spans(first, self.config, text_tokens=self.text_tokens)
        warn_of_rejected(num_tokens, first > 0, rejection=rejection, process_index=process_index)

    @property
    def num_tokens(self) -> IntArray:
        """Tokens of each row in the present epoch, `(n,)`."""
        return self.tokens_in(self.epoch)

    def tokens_in(self, epoch: int) -> IntArray:
        """Return the tokens of each row in an epoch, `(n,)`."""
        given = self._num_tokens
        return np.asarray(given(epoch) if callable(given) else given, np.int64)

    def _make_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        num_tokens = self.tokens_in(epoch)
        plan = plan_packs(
            num_tokens,
            self.config,
            epoch=epoch,
            num_processes=num_processes,
            text_tokens=self.text_tokens,
            weights=self.weights,
            consumed=consumed,
        )
        if not self.longest_first:
            return plan
        spans, _ = sample_spans(num_tokens, self.config, text_tokens=self.text_tokens)
        taken, model = spans[plan.indices], self.config.cost_model
        return plan.most_expensive_first(taken if model is None else model.cost(taken))

    def _identity(self) -> dict[str, object]:
        return {
            "rows": self.tokens_in(0),
            "text_tokens": self.text_tokens if self.text_tokens.ndim else int(self.text_tokens),
            "weights": self.weights,
            "longest_first": self.longest_first,
            **settings(self.config),
        }
