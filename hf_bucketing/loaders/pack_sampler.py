"""The pack batch sampler: samples of any size that run as one packed sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.cost import CostModel
from ..errors import PlanError, explains_arguments
from ..plans.bin_packing import PackStrategy
from ..plans.epoch import EpochPlan
from ..plans.packs import Balance, PackPlanConfig, plan_packs, sample_spans, texts_of
from ..plans.rows import Oversize, column_of
from .planned import PlannedBatchSampler, chosen_config
from .rejected import warn_of_rejected


@explains_arguments(PlanError)
class PackBatchSampler(PlannedBatchSampler):
    """Draw packs: samples of any size whose tokens together are at most `max_tokens`.

    The keywords from `max_tokens` to `evaluation` are settings of the plan, by default those of
    [`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig]; `config` holds all of them in one value instead.

    Args:
        num_tokens (array of `int`, shape `(n,)`, or callable of the epoch): The data set's `num_tokens` column; rows
            of 0 are never drawn. A callable, such as that of [`RandomResize`], gives the column of each epoch; a run
            resumes only with one of the same code and values.
        max_tokens (`int`): Tokens that one process takes in one step: the limit of memory.
        max_cost (`float`, *optional*): Largest cost of a pack, in the units of `cost_model`: the limit of time. Packs
            filled to the same cost take the same time, if `max_tokens` lets them get there.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): Cost of a sample, for `max_cost`, `balance` and
            `longest_first`.
        strip_length (`int`): Tokens per strip; each sample takes whole strips. The default is that of
            `enable_packing`: give both the same, or 1 for a model of your own whose packs have no strips.
        strategy (`str`): Bin packing of the samples, which come in random order; see `PackPlanConfig`.
        balance (`"none"` or `"cost"`): Choice of the packs of a step. `"none"`: random ones. `"cost"` without gradient
            accumulation: packs of similar cost among those of 64 steps (packs filled to one `max_cost` are similar
            already). `"cost"` with it: the packs of each accumulation window are dealt to the processes, the most
            expensive first, each to the process with the lowest sum so far.
        oversize (`str`): What happens to a sample that exceeds `max_tokens` or `max_cost` by itself: an `"error"`
            that names it, an `"own_batch"` (a pack of its own, above the limit), or a counted `"drop"`.
        shuffle (`bool`): If False, samples and packs keep the order of the rows, as far as `strategy` does.
        seed (`int`): Seed of all draws, at least 0.
        evaluation (`bool`): Take every row exactly once over all processes, also where they do not divide evenly: the
            last step then has one row per process, and its last processes repeat rows, which
            `accelerator.gather_for_metrics` leaves out. Give `shuffle=False` for one order in every epoch. Processes
            may hold different numbers of samples: gather with `use_gather_object=True`.
        config ([`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig], *optional*): All settings of the plan,
            with those that lack a keyword: `max_samples`, `open_packs`, `window` and `accumulation_steps`.
        text_tokens (`int` or array of `int`, shape `(n,)`): Tokens of each row's text, for models with joint
            attention.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default 1.
        longest_first (`bool`): Start every epoch with its most expensive step (tokens, or cost with a `cost_model`),
            so that a lack of memory shows at once.
        rejection (array, shape `(n,)`, *optional*): The data set's `rejection` column, for the warning that counts
            rejected rows by reason; not needed if `num_tokens` is a column of that data set.
        num_processes (`int`, *optional*): Number of processes; by default as in [`PlannedBatchSampler`].
        process_index (`int`, *optional*): Process whose packs alone are drawn; see [`PlannedBatchSampler`].

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
        max_cost: float | None = None,
        cost_model: CostModel | None = None,
        strip_length: int | None = None,
        strategy: PackStrategy | None = None,
        balance: Balance | None = None,
        oversize: Oversize | None = None,
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
            max_tokens=max_tokens,
            max_cost=max_cost,
            cost_model=cost_model,
            strip_length=strip_length,
            strategy=strategy,
            balance=balance,
            oversize=oversize,
            shuffle=shuffle,
            seed=seed,
            evaluation=evaluation,
        )
        super().__init__(
            config,
            weights=weights,
            longest_first=longest_first,
            num_processes=num_processes,
            process_index=process_index,
        )
        self._num_tokens = num_tokens if callable(num_tokens) else column_of(num_tokens, "num_tokens", whole=True)
        self.text_tokens = texts_of(text_tokens)
        first = self.num_tokens
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
        return column_of(self._num_tokens(epoch), "num_tokens", whole=True)

    @property
    def num_rows(self) -> int:
        """Rows of the data set."""
        return len(self.num_tokens)

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
