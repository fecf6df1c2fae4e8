"""The pack plan: samples of any size dealt into packs that fit a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .plan import MIXED, EpochPlan, IntArray, check_processes, rng_for
from .rows import epoch_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlanConfig:
    """What a pack plan depends on, beside the rows, the epoch and the number of processes.

    Args:
        capacity (`int`): Tokens that one process takes in one step.
        strategy (`"first_fit"`): Samples come in random order; each goes into the oldest open pack that has room.
        open_packs (`int`): Packs held open at once; the fullest is closed when one more is needed.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        multiple (`int`): Each sample takes its tokens rounded up to this multiple, as a pack of strips does.
        seed (`int`): Not negative.

    Raises:
        PlanError: On a value below 1 or an unknown strategy.
    """

    capacity: int
    strategy: Literal["first_fit"] = "first_fit"
    open_packs: int = 16
    max_samples: int | None = None
    multiple: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.strategy != "first_fit":
            raise PlanError(f'strategy must be "first_fit", got {self.strategy!r}.')
        for name in ("capacity", "open_packs", "max_samples", "multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} must be at least 1, got {value}.")


def plan_packs(
    num_tokens: npt.ArrayLike,
    config: PackPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of packs, the same number on every process.

    When the packs do not divide evenly among the processes, the largest are split; only if all hold one sample,
    fewer than `num_processes` samples are dropped, other ones each epoch.

    Args:
        num_tokens (array of `int`, shape `(n,)`): Tokens of each row; 0 or less for rejected rows, which are dropped.
        config ([`PackPlanConfig`]): Capacity, strategy and seed.
        epoch (`int`): Not negative; every epoch has its own order.
        num_processes (`int`): At least 1.
        consumed (array of `int`, *optional*): Row numbers that were seen in this epoch, as often as they were; the
            plan then holds what the epoch has left, which may be no step at all.

    Returns:
        [`EpochPlan`]: With bucket id −1 throughout and drop reasons `rejected` and `remainder`.

    Raises:
        PlanError: If a row exceeds the capacity (the message names the largest), or too few rows have tokens.

    Example:
        Two packs hold these rows in any order, one for each process; the last row was rejected.

        >>> plan = plan_packs([4, 4, 3, 3, 0], PackPlanConfig(capacity=8), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons)
        (1, 4, {'rejected': 1})
    """
    check_processes(num_processes)
    tokens = np.asarray(num_tokens, np.int64)
    chosen = epoch_rows(tokens > 0, consumed=consumed, seed=config.seed, epoch=epoch)
    rng = rng_for(config.seed, epoch, "packs", consumed=chosen.consumed)
    rows = chosen.rows
    if len(rows) < num_processes and not chosen.consumed:
        raise PlanError(
            f"{len(rows)} of {len(tokens)} rows have tokens, fewer than the {num_processes} processes. "
            "Look at the counts of the data set's rejection column."
        )
    spans = -(-tokens // config.multiple) * config.multiple
    if spans.max() > config.capacity:
        worst = int(spans.argmax())
        raise PlanError(
            f"Row {worst} takes {spans[worst]} tokens and exceeds capacity={config.capacity} "
            f"({np.count_nonzero(spans > config.capacity)} rows do). Raise the capacity or use smaller sizes."
        )
    rng.shuffle(rows)
    packs = _even_out(_first_fit(rows.tolist(), spans[rows].tolist(), config), num_processes, rng)
    order = rng.permutation(len(packs))
    lengths = np.array([len(packs[position]) for position in order], np.int64)
    indices = np.concatenate([packs[position] for position in order]) if packs else rows[:0]
    reasons = {**chosen.drop_reasons, "remainder": len(rows) - len(indices)}
    return EpochPlan(
        indices=indices,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        bucket_ids=np.full(len(packs), MIXED, np.int32),
        num_processes=num_processes,
        drop_reasons=MappingProxyType({reason: count for reason, count in reasons.items() if count}),
        consumed=chosen.consumed,
    )


def _first_fit(rows: Sequence[int], spans: Sequence[int], config: PackPlanConfig) -> list[list[int]]:
    limit = config.max_samples or len(rows)
    closed: list[list[int]] = []
    packs: list[list[int]] = []
    room: list[int] = []
    for row, span in zip(rows, spans, strict=True):
        position = next((place for place, free in enumerate(room) if span <= free), len(room))
        if position == len(room):
            if len(packs) == config.open_packs:
                fullest = room.index(min(room))
                closed.append(packs.pop(fullest))
                room.pop(fullest)
                position -= 1
            packs.append([])
            room.append(config.capacity)
        packs[position].append(row)
        room[position] -= span
        if room[position] == 0 or len(packs[position]) == limit:
            closed.append(packs.pop(position))
            room.pop(position)
    return closed + packs


def _even_out(packs: list[list[int]], num_processes: int, rng: np.random.Generator) -> list[IntArray]:
    """Split the packs of most samples until their number is a multiple of `num_processes`, or drop the rest."""
    missing = -len(packs) % num_processes
    packs = [packs[position] for position in rng.permutation(len(packs))]
    if sum(map(len, packs)) >= len(packs) + missing:
        for _ in range(missing):
            largest = max(range(len(packs)), key=lambda position: len(packs[position]))
            pack = packs[largest]
            packs[largest] = pack[::2]
            packs.append(pack[1::2])
    else:
        # Fewer samples than packs wanted: all single ones but fewer than num_processes.
        singles = [[row] for pack in packs for row in pack]
        packs = singles[: len(singles) // num_processes * num_processes]
    return [np.array(pack, np.int64) for pack in packs]
