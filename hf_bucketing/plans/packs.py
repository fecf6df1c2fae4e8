"""The pack plan: samples of any size, packed within a number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray
from ..buckets.cost import CostModel
from ..errors import OversizeError, PlanError, explains_arguments
from ..randomness import Purpose
from ..settings import check_at_least, check_types, plain_number
from .assemble import even_batches, longest_first_to_least_loaded, similar_costs_together, unbucketed_plan
from .bin_packing import Limits, PackStrategy, fill_packs
from .epoch import PACKED, EpochPlan
from .rows import EpochRows, RowPlanConfig, check_positive, column_of, epoch_rows

Balance = Literal["none", "cost"]
Tokens = TypeVar("Tokens", int, IntArray)

FEW = 20
"""Where one row of this many fits no pack, that row is at fault; where more do, the limits of packs are."""

SHORTEN = "cut long videos with max_frames of open_table (--max_frames or --clips of hf_bucketing prepare)"
"""Advice on samples that exceed a limit, where their frames are not known."""


@dataclass(frozen=True, kw_only=True)  # no slots: others read the defaults from the class
class PackLimits:
    """What a pack holds, in a plan as in a stream.

    Args:
        max_tokens (`int`): Tokens that one process takes in one step: the limit of memory.
        max_samples (`int`, *optional*): Most samples per pack.
        strip_length (`int`): Tokens per strip; each sample takes whole strips. The default is that of
            `enable_packing`: give both the same, or 1 for a model of your own whose packs have no strips.
        open_packs (`int`): Packs held open at once by `"first_fit"`; the fullest is closed when one more is needed.

    Raises:
        PlanError: On a value below 1, or one that is not a whole number.
    """

    max_tokens: int
    max_samples: int | None = None
    strip_length: int = 64
    open_packs: int = 16

    def __post_init__(self) -> None:
        check_types(self, error=PlanError)
        check_at_least(1, self, "max_tokens", "max_samples", "strip_length", "open_packs", error=PlanError)

    def of_bins(self, *, smallest: int, cheapest: float = 0.0, max_cost: float | None = None) -> Limits:
        """Return the limits as [`FirstFit`][hf_bucketing.plans.bin_packing.FirstFit] takes them."""
        return Limits(
            tokens=self.max_tokens,
            cost=math.inf if max_cost is None else max_cost,
            samples=math.inf if self.max_samples is None else self.max_samples,
            smallest=smallest,
            cheapest=cheapest,
        )


@explains_arguments(PlanError)
@dataclass(frozen=True, kw_only=True)
class PackPlanConfig(RowPlanConfig, PackLimits):
    """Settings of a pack plan, beside those of [`PackLimits`], [`RowPlanConfig`] and [`EpochConfig`].

    With `shuffle=False`, samples and packs keep the order of the rows, as far as `strategy` does. Processes may hold
    different numbers of samples in a step: with `evaluation`, gather with `use_gather_object=True`.

    Args:
        max_cost (`float`, *optional*): Largest cost of a pack, in the units of `cost_model`: the limit of time. Packs
            filled to the same cost take the same time, if `max_tokens` lets them get there.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): Cost of a sample, for `max_cost` and `balance`,
            and for a sampler's `longest_first`.
        strategy (`str`): How samples, which come in random order, get into packs.
            `"sequential"` fills one pack after the other, and starts the next when a sample does not fit.
            `"first_fit"` puts each into the oldest of `open_packs` open packs that has room; nearly keeps the order.
            `"best_fit_decreasing"` takes `window` samples at a time and puts each, the largest first, into the pack
            that it fills best; the samples of the emptiest packs move on to the next window. Fills packs best.
        window (`int`): Samples that `"best_fit_decreasing"` takes at a time.
        balance (`"none"` or `"cost"`): Choice of the packs of a step. `"none"`: random ones. `"cost"` without gradient
            accumulation: packs of similar cost among those of 64 steps (packs filled to one `max_cost` are similar
            already). `"cost"` with it: the packs of each accumulation window are dealt to the processes, the most
            expensive first, each to the process with the lowest sum so far.
        accumulation_steps (`int`): Steps per optimizer step, for `balance="cost"`; the processes wait for each other
            once per window.

    Raises:
        PlanError: On a value below 1, an unknown name, a cost option without a cost model, or `balance="cost"` with
            `shuffle=False`.
    """

    max_cost: float | None = None
    cost_model: CostModel | None = None
    strategy: PackStrategy = "first_fit"
    window: int = 4096
    balance: Balance = "none"
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        RowPlanConfig.__post_init__(self)
        PackLimits.__post_init__(self)
        check_at_least(1, self, "window", "accumulation_steps", error=PlanError)
        check_positive(self, "max_cost")
        if self.cost_model is None and (self.max_cost is not None or self.balance == "cost"):
            raise PlanError(
                '`max_cost` and `balance="cost"` need `cost_model`, such as CostModel.for_transformer(width).'
            )
        if self.balance == "cost" and not self.shuffle:
            raise PlanError('`balance="cost"` changes the order of the packs; leave it out with `shuffle=False`.')


def plan_packs(
    num_tokens: npt.ArrayLike,
    config: PackPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    text_tokens: npt.ArrayLike = 0,
    weights: npt.ArrayLike | None = None,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of packs, the same number on every process.

    When the packs do not divide evenly among the processes, those with the most samples are split. Only if all packs
    hold one sample, fewer than `num_processes` samples are dropped, other ones each epoch.

    Args:
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row; 0 or less for rejected rows, which are dropped.
        config ([`PackPlanConfig`]): Limits, strategy and seed.
        epoch (`int`): Number of the epoch, at least 0; every epoch has its own order.
        num_processes (`int`): Processes that share the packs, at least 1.
        text_tokens (`int` or array of `int`, shape `(n,)`): Tokens of each row's text, for models with joint
            attention; they count like the row's own, but are not rounded to strips.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default 1.
        consumed (array of `int`, *optional*): As in [`plan_buckets`][hf_bucketing.plans.plan_buckets].

    Returns:
        [`EpochPlan`]: With the bucket id `PACKED` throughout and the drop reasons `rejected`, `oversize`, `weight`
        (rows that do not occur in this epoch) and `remainder`.

    Raises:
        PlanError: If a row exceeds a limit (the message names the largest), or too few rows have tokens.

    Example:
        Two packs hold these rows in any order, one for each process; the last row was rejected.

        >>> plan = plan_packs([4, 4, 3, 3, 0], PackPlanConfig(max_tokens=8, strip_length=1), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons)
        (1, 4, {'rejected': 1})
    """
    tokens = column_of(num_tokens, "num_tokens", integer=True)
    spans, oversize = sample_spans(tokens, config, text_tokens=text_tokens)
    chosen = epoch_rows(
        tokens > 0,
        config,
        Purpose.PACK_PLAN,
        epoch=epoch,
        num_processes=num_processes,
        oversize=oversize if config.oversize == "drop" else None,
        weights=weights,
        consumed=consumed,
    )
    chosen.check_enough(of=len(tokens), have="tokens")
    rows, offsets = _packs(chosen.in_order()[0], spans, oversize, config=config)
    rows, offsets = even_batches(rows, offsets, chosen)
    order = _order(spans[rows], offsets, config, chosen)
    return unbucketed_plan(rows, offsets[:-1][order], np.diff(offsets)[order], label=PACKED, chosen=chosen)


def strip_tokens(num_tokens: Tokens, strip_length: int) -> Tokens:
    """Return the tokens of the whole strips that each sample takes in a pack; shape as given."""
    return -(-num_tokens // strip_length) * strip_length


def sample_spans(
    num_tokens: IntArray, config: PackPlanConfig, *, text_tokens: npt.ArrayLike = 0
) -> tuple[IntArray, BoolArray]:
    """Return the tokens of each sample in a pack, those of its strips and its text, and which samples exceed a limit.

    Raises:
        PlanError: If there are not as many texts as rows, one has fewer than 0 tokens, or a sample exceeds a limit and
            `config.oversize` is `"error"`; the message names the largest.
    """
    text = texts_of(text_tokens)
    if text.ndim and text.shape != num_tokens.shape:
        raise PlanError(
            f"`text_tokens` must be one number or one per row: expected shape {num_tokens.shape}, got {text.shape}."
        )
    if text.size and text.min() < 0:
        raise PlanError(f"`text_tokens` must be at least 0, got {text.min()}.")
    spans = strip_tokens(num_tokens, config.strip_length) + text
    over: BoolArray = spans > config.max_tokens
    if config.max_cost is not None:
        over |= _costs(spans, config) > config.max_cost
    over &= num_tokens > 0
    if config.oversize == "error" and over.any():
        worst = int(np.where(over, spans, -1).argmax())
        name = "max_tokens" if spans[worst] > config.max_tokens else "max_cost"
        strips = f", in strips of {config.strip_length}," if num_tokens[worst] % config.strip_length else ""
        error = OversizeError(
            f"Row {worst} takes {spans[worst]} tokens{strips} and exceeds `{name}={getattr(config, name)}` "
            f"({np.count_nonzero(over)} of {len(over)} rows do).",
            advice=[
                f"raise `{name}` to {spans[worst]}" if name == "max_tokens" else f"raise `{name}`",
                SHORTEN,
                "use smaller sizes",
                'give `oversize="own_batch"` or `oversize="drop"`',
            ],
        )
        error.row = worst
        raise error
    return spans, over


def are_few(rows: BoolArray, num_tokens: IntArray) -> bool:
    """Return whether some rows are marked, and so few of those with tokens that they can be rejected by name.

    Example:
        >>> are_few(np.arange(41) < 2, np.ones(41)), are_few(np.arange(41) < 3, np.ones(41))
        (True, False)
    """
    return bool(0 < np.count_nonzero(rows) * FEW < np.count_nonzero(num_tokens))


def texts_of(text_tokens: npt.ArrayLike) -> IntArray:
    """Return the tokens of texts as an array: of shape `()` if all rows have as many, else `(n,)`.

    Raises:
        PlanError: If they are no whole numbers.
    """
    if np.isscalar(text_tokens) or getattr(text_tokens, "shape", None) == ():
        return np.array(plain_number(text_tokens, "text_tokens", integer=True, error=PlanError), np.int64)
    return column_of(text_tokens, "text_tokens", integer=True)


def packs_of(spans: IntArray, costs: FloatArray, config: PackPlanConfig) -> IntArray:
    """Return the pack of each sample, as [`fill_packs`][hf_bucketing.plans.bin_packing.fill_packs] does."""
    if not len(spans):
        return np.zeros(0, np.int64)
    limits = config.of_bins(smallest=int(spans.min()), cheapest=float(costs.min()), max_cost=config.max_cost)
    return fill_packs(
        spans, costs, limits, strategy=config.strategy, open_packs=config.open_packs, window=config.window
    )


def _costs(spans: IntArray, config: PackPlanConfig) -> FloatArray:
    return np.zeros(len(spans)) if config.cost_model is None else config.cost_model.cost(spans)


def _packs(
    rows: IntArray, spans: IntArray, oversize: BoolArray, *, config: PackPlanConfig
) -> tuple[IntArray, IntArray]:
    """Return the rows, pack by pack, and the bounds of the packs; oversize rows get packs of their own at the end."""
    alone = rows[oversize[rows]]
    shared = rows[~oversize[rows]] if len(alone) else rows
    packs = packs_of(spans[shared], _costs(spans[shared], config), config)
    sizes = np.concatenate([np.bincount(packs), np.ones(len(alone), np.int64)])
    ordered = np.concatenate([shared[np.argsort(packs, kind="stable")], alone])
    return ordered, np.concatenate([[0], np.cumsum(sizes)])


def _order(spans: IntArray, offsets: IntArray, config: PackPlanConfig, chosen: EpochRows) -> IntArray:
    """Return the order of the packs, process by process and step by step; `spans` in the present order."""
    if chosen.rng is None or config.balance == "none" or config.cost_model is None or len(offsets) == 1:
        return chosen.shuffled(np.arange(len(offsets) - 1))
    costs = config.cost_model.pack_cost(spans, offsets)
    if config.accumulation_steps == 1:
        return similar_costs_together(costs, chosen.num_processes, rng=chosen.rng)
    return longest_first_to_least_loaded(costs, chosen.num_processes, window=config.accumulation_steps, rng=chosen.rng)
