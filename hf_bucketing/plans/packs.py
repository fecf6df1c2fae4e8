"""The pack plan: samples of any size dealt into packs that fit a number of tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..randomness import Purpose, generator
from .assemble import counted_plan, take_segments
from .balance import like_costs_together, longest_first_to_least_loaded, split_largest
from .bin_packing import PackPlanConfig, fill_packs
from .epoch import MIXED, EpochPlan, IntArray, check_processes
from .rows import BoolArray, FloatArray, epoch_rows


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

    When the packs do not divide evenly among the processes, those of most samples are split; only if all hold one
    sample, fewer than `num_processes` samples are dropped, other ones each epoch.

    Args:
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row; 0 or less for rejected rows, which are dropped.
        config ([`PackPlanConfig`]): Limits, strategy and seed.
        epoch (`int`): Not negative; every epoch has its own order.
        num_processes (`int`): At least 1.
        text_tokens (`int` or array of `int`, shape `(n,)`): Tokens of each row's text, where the model attends to them
            together with its own, as joint attention does; they count like those, but are not rounded.
        weights (array of `float`, shape `(n,)`, *optional*): How often each row comes per epoch; by default once.
        consumed (array of `int`, *optional*): Row numbers that were seen in this epoch, as often as they were; the
            plan then holds what the epoch has left, which may be no step at all.

    Returns:
        [`EpochPlan`]: With bucket id −1 throughout and drop reasons `rejected`, `oversize`, `weight` (rows that do not
        come in this epoch) and `remainder`.

    Raises:
        PlanError: If a row exceeds a limit (the message names the largest), or too few rows have tokens.

    Example:
        Two packs hold these rows in any order, one for each process; the last row was rejected.

        >>> plan = plan_packs([4, 4, 3, 3, 0], PackPlanConfig(capacity=8), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons)
        (1, 4, {'rejected': 1})
    """
    check_processes(num_processes)
    tokens = np.asarray(num_tokens, np.int64)
    spans, oversize = sample_spans(tokens, config, text_tokens=text_tokens)
    dropped = oversize if config.oversize == "drop" else None
    chosen = epoch_rows(
        tokens > 0, oversize=dropped, weights=weights, consumed=consumed, seed=config.seed, epoch=epoch
    )
    if len(chosen.rows) < num_processes and not chosen.consumed:
        raise PlanError(
            f"{len(chosen.rows)} of {len(tokens)} rows have tokens, fewer than the {num_processes} processes. "
            "Look at the counts of the data set's rejection column."
        )
    rng = generator(Purpose.PACK_PLAN, config.seed, epoch, chosen.consumed)
    rows, offsets = _packs(rng.permutation(chosen.rows), spans, oversize, config=config)
    even = split_largest(offsets, num_processes)
    if even is None:  # fewer samples than packs wanted: all single ones but fewer than num_processes
        rows = rng.permutation(rows)
        even = np.arange(len(rows) // num_processes * num_processes + 1)
    order = _order(rows, even, spans, config=config, num_processes=num_processes, rng=rng)
    sizes = np.diff(even)[order]
    return counted_plan(
        take_segments(rows, even[:-1][order], sizes),
        np.concatenate([[0], np.cumsum(sizes)]),
        np.full(len(order), MIXED, np.int32),
        num_processes=num_processes,
        chosen=chosen,
    )


def sample_spans(
    num_tokens: IntArray, config: PackPlanConfig, *, text_tokens: npt.ArrayLike = 0
) -> tuple[IntArray, BoolArray]:
    """Return the tokens of each sample in a pack, its own in whole strips and its text's; and which exceed a limit.

    Raises:
        PlanError: If there are not as many texts as rows, one has fewer than 0 tokens, or a sample exceeds a limit and
            `config.oversize` is `"error"`; the message names the largest.
    """
    text = np.asarray(text_tokens, np.int64)
    if text.ndim and text.shape != num_tokens.shape:
        raise PlanError(f"Give text_tokens once or per row: expected shape {num_tokens.shape}, got {text.shape}.")
    if text.size and text.min() < 0:
        raise PlanError(f"A text has at least 0 tokens, got {text.min()}.")
    spans: IntArray = -(-num_tokens // config.multiple) * config.multiple + text
    over: BoolArray = spans > config.capacity
    if config.cost_model is not None and config.max_cost is not None:
        over |= config.cost_model.cost(spans) > config.max_cost
    over &= num_tokens > 0
    if config.oversize == "error" and over.any():
        worst = int(np.where(over, spans, -1).argmax())
        name = "capacity" if spans[worst] > config.capacity else "max_cost"
        raise PlanError(
            f"Row {worst} takes {spans[worst]} tokens and exceeds `{name}={getattr(config, name)}` "
            f"({np.count_nonzero(over)} rows do).",
            advice=[f"raise `{name}`", "use smaller sizes", 'give `oversize="own_pack"` or `oversize="drop"`'],
        )
    return spans, over


def _costs(spans: IntArray, config: PackPlanConfig) -> FloatArray:
    return np.zeros(len(spans)) if config.cost_model is None else config.cost_model.cost(spans)


def _packs(
    rows: IntArray, spans: IntArray, oversize: BoolArray, *, config: PackPlanConfig
) -> tuple[IntArray, IntArray]:
    """Return the rows, pack by pack, and the bounds of the packs; an oversize row makes a pack alone."""
    alone = rows[oversize[rows]]
    shared = rows[~oversize[rows]] if len(alone) else rows
    packs = fill_packs(spans[shared], _costs(spans[shared], config), config)
    sizes = np.concatenate([np.bincount(packs), np.ones(len(alone), np.int64)])
    ordered = np.concatenate([shared[np.argsort(packs, kind="stable")], alone])
    return ordered, np.concatenate([[0], np.cumsum(sizes)])


def _order(
    rows: IntArray,
    offsets: IntArray,
    spans: IntArray,
    *,
    config: PackPlanConfig,
    num_processes: int,
    rng: np.random.Generator,
) -> IntArray:
    """Return the order of the packs, process by process and step by step."""
    if config.balance == "none" or config.cost_model is None or len(offsets) == 1:
        return rng.permutation(len(offsets) - 1)
    costs = config.cost_model.pack_cost(spans[rows[: offsets[-1]]], offsets)
    if config.accumulation_steps == 1:
        return like_costs_together(costs, num_processes, rng=rng)
    return longest_first_to_least_loaded(costs, num_processes, window=config.accumulation_steps, rng=rng)
