"""The pack batch sampler: samples of any size that run as one packed sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..buckets.cost import CostModel
from ..errors import PlanError, explains_arguments
from ..plans.bin_packing import PackStrategy
from ..plans.epoch import EpochPlan
from ..plans.packs import Balance, PackPlanConfig, plan_packs, sample_spans, texts_of
from ..plans.rows import column_of
from ..settings import chosen_config
from .planned import PlannedBatchSampler
from .row_column import RowColumn, column_name, refuse_bucket_ids, warn_of_rejected


@explains_arguments(PlanError)
class PackBatchSampler(PlannedBatchSampler):
    """Draw packs: samples of any size whose tokens together are at most `max_tokens`.

    The keywords from `max_tokens` to `evaluation` are the most used settings of the plan, which
    [`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig] describes; `config` holds all settings in one value instead.
    `weights`, `longest_first`, `num_processes` and `process_index` are those of [`PlannedBatchSampler`].

    Args:
        num_tokens (array of `int`, shape `(n,)`, or callable of the epoch): The data set's `num_tokens` column; rows
            of 0 are never drawn. A callable, such as that of [`RandomResize`], gives the column of each epoch; a run
            resumes only with one of the same code and values.
        config ([`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig], *optional*): All settings of the plan.
        text_tokens (`int` or array of `int`, shape `(n,)`): Tokens of each row's text, for models with joint
            attention.
        rejection (array, shape `(n,)`, *optional*): The data set's `rejection` column, for the warning that counts
            rejected rows by reason; not needed if `num_tokens` is a column of that data set.

    Raises:
        PlanError: On settings that `PackPlanConfig` refuses, a setting beside `config`, or if a row exceeds a limit
            and `oversize="error"`; the message names the largest.
    """

    config: PackPlanConfig

    def __init__(
        self,
        num_tokens: npt.ArrayLike | Callable[[int], npt.ArrayLike],
        *,
        max_tokens: int | None = None,
        cost_model: CostModel | None = None,
        strip_length: int | None = None,
        strategy: PackStrategy | None = None,
        balance: Balance | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        evaluation: bool | None = None,
        config: PackPlanConfig | None = None,
        text_tokens: npt.ArrayLike = 0,
        weights: npt.ArrayLike | None = None,
        longest_first: bool = False,
        rejection: npt.ArrayLike | None = None,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        config = chosen_config(
            PackPlanConfig,
            config,
            error=PlanError,
            max_tokens=max_tokens,
            cost_model=cost_model,
            strip_length=strip_length,
            strategy=strategy,
            balance=balance,
            shuffle=shuffle,
            seed=seed,
            evaluation=evaluation,
        )
        refuse_bucket_ids(num_tokens, argument="num_tokens")
        self._num_tokens = num_tokens if callable(num_tokens) else column_of(num_tokens, "num_tokens", integer=True)
        first = self.tokens_in(0)
        super().__init__(
            config,
            num_rows=len(first),
            weights=weights,
            longest_first=longest_first,
            num_processes=num_processes,
            process_index=process_index,
        )
        if not callable(num_tokens):
            name = column_name(num_tokens)
            self._column = RowColumn(name=name or "num_tokens", values=first, must_equal=name is not None)
        self.text_tokens = texts_of(text_tokens)
        sample_spans(first, self.config, text_tokens=self.text_tokens)
        warn_of_rejected(num_tokens, first > 0, rejection=rejection, process_index=self.process_index)

    @property
    def num_tokens(self) -> IntArray:
        """Tokens of each row in the present epoch, shape `(n,)`."""
        return self.tokens_in(self.epoch)

    def tokens_in(self, epoch: int) -> IntArray:
        """Return the tokens of each row in an epoch, shape `(n,)`."""
        if not callable(self._num_tokens):
            return self._num_tokens
        return column_of(self._num_tokens(epoch), "num_tokens", integer=True)

    def _drawn_rows(self) -> BoolArray:
        drawn: BoolArray = self.tokens_in(0) > 0
        return drawn

    def _planner(self, epoch: int) -> Callable[..., EpochPlan]:
        return partial(plan_packs, self.tokens_in(epoch), self.config, text_tokens=self.text_tokens)

    def _sample_costs(self, plan: EpochPlan, epoch: int) -> IntArray | FloatArray:
        spans, _ = sample_spans(self.tokens_in(epoch), self.config, text_tokens=self.text_tokens)
        taken, model = spans[plan.indices], self.config.cost_model
        return taken if model is None else model.cost(taken)

    def _columns(self) -> dict[str, object]:
        columns: dict[str, object] = {
            "rows": self.tokens_in(0),
            "text_tokens": self.text_tokens if self.text_tokens.ndim else int(self.text_tokens),
        }
        # Equal numbers in one epoch do not tell that those of later epochs are equal.
        return {**columns, "num_tokens": self._num_tokens} if callable(self._num_tokens) else columns
