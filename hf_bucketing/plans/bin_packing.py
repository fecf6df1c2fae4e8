"""What a pack plan depends on."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from ..buckets.cost import CostModel
from ..errors import PlanError
from .epoch import IntArray
from .rows import FloatArray

PackStrategy = Literal["sequential", "first_fit", "best_fit_decreasing"]
Balance = Literal["none", "cost"]
PackOversize = Literal["error", "own_pack", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlanConfig:
    """What a pack plan depends on, beside the rows, the epoch and the number of processes.

    Args:
        capacity (`int`): Tokens that one process takes in one step: the limit of memory.
        strategy (`str`): Samples come in random order.
            `"sequential"` fills one pack after the other, and starts the next when a sample does not fit.
            `"first_fit"` puts each into the oldest of `open_packs` open packs that has room; nearly keeps the order.
            `"best_fit_decreasing"` takes `window` samples at a time, the largest first, each into the pack that it
            fills best; the samples of the emptiest packs go on to the next window. The fullest packs.
        open_packs (`int`): For `"first_fit"`: packs held open at once; the fullest is closed when one more is needed.
        window (`int`): For `"best_fit_decreasing"`: samples at a time.
        max_samples (`int`, *optional*): Largest number of samples per pack.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): For `max_cost` and `balance`.
        max_cost (`float`, *optional*): Largest cost of a pack: the limit of time, in the units of the cost model.
            Packs filled to the same cost take the same time, if the capacity lets them get there.
        multiple (`int`): Each sample takes its tokens rounded up to this multiple, as a pack of strips does.
        balance (`"none"` or `"cost"`): Which packs meet in a step. `"none"`: random ones. `"cost"`: without gradient
            accumulation, packs of like cost among those of 64 steps, which are more alike than random ones (packs
            filled to one `max_cost` need no such choice); with it, the packs of each accumulation window are dealt to
            the processes, the most expensive first, each to the process with the least so far.
        accumulation_steps (`int`): Steps per optimizer step, for `balance="cost"`; the processes wait for each other
            once per window.
        oversize (`str`): A sample that exceeds `capacity` or `max_cost` by itself is an `"error"` that names it, gets
            an `"own_pack"` above the limit, or is a counted `"drop"`.
        seed (`int`): Not negative.

    Raises:
        PlanError: On a value below 1, an unknown name, or a cost option without a cost model.
    """

    capacity: int
    strategy: PackStrategy = "first_fit"
    open_packs: int = 16
    window: int = 4096
    max_samples: int | None = None
    cost_model: CostModel | None = None
    max_cost: float | None = None
    multiple: int = 1
    balance: Balance = "none"
    accumulation_steps: int = 1
    oversize: PackOversize = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        names = {"strategy": PackStrategy, "balance": Balance, "oversize": PackOversize}
        for name, choices in names.items():
            if getattr(self, name) not in get_args(choices):
                raise PlanError(
                    f"`{name}` must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}."
                )
        for name in ("capacity", "open_packs", "window", "max_samples", "multiple", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"`{name}` must be at least 1, got {value}.")
        if self.max_cost is not None and not self.max_cost > 0:
            raise PlanError(f"max_cost must be above 0, got {self.max_cost}.")
        if self.cost_model is None and (self.max_cost is not None or self.balance == "cost"):
            raise PlanError('max_cost and balance="cost" need cost_model=, such as CostModel.for_transformer(width).')


_CHUNK = 2**18
Sample = tuple[int, float]


class Limits(NamedTuple):
    """What a pack may hold, and the least that a sample takes of it."""

    tokens: int
    cost: float
    samples: float
    smallest: int
    cheapest: float

    def fullness(self, room: int, cost_room: float) -> float:
        """Return how full a pack is, from 0 to 1, by the limit that it is nearest to."""
        return 1 - min(room / self.tokens, cost_room / self.cost if math.isfinite(self.cost) else 1)


def fill_packs(spans: IntArray, costs: FloatArray, config: PackPlanConfig) -> IntArray:
    """Return the pack of each sample.

    Args:
        spans (`int64`, shape `(n,)`): Tokens that each sample takes, at least 1 and at most the capacity.
        costs (`float64`, shape `(n,)`): Cost of each; 0 without a limit of cost.
        config ([`PackPlanConfig`]): Strategy and limits.

    Returns:
        `int64` of shape `(n,)`: Packs 0, 1, 2, … without a gap, nearly in the order of the samples.
    """
    if not len(spans):
        return np.zeros(0, np.int64)
    limits = Limits(
        config.capacity,
        math.inf if config.max_cost is None else config.max_cost,
        math.inf if config.max_samples is None else config.max_samples,
        int(spans.min()),
        float(costs.min()),
    )
    samples = _one_by_one(spans, costs)
    if config.strategy == "best_fit_decreasing":
        return np.array(_best_fit_decreasing(samples, limits, window=config.window), np.int64)
    if config.strategy == "first_fit":
        add = FirstFit(limits, open_packs=config.open_packs).add
        return np.array(array("q", (add(span, cost) for span, cost in samples)), np.int64)
    return np.array(_sequential(samples, limits), np.int64)


def _one_by_one(spans: IntArray, costs: FloatArray) -> Iterator[Sample]:
    """Yield samples as Python numbers, made of a part of the arrays at a time."""
    for start in range(0, len(spans), _CHUNK):
        yield from zip(
            spans[start : start + _CHUNK].tolist(),
            costs[start : start + _CHUNK].tolist(),
            strict=True,
        )


def _sequential(samples: Iterator[Sample], limits: Limits) -> array[int]:
    packs = array("q")
    pack, room, cost_room, count = 0, limits.tokens, limits.cost, 0
    for span, cost in samples:
        if span > room or cost > cost_room or count == limits.samples:
            pack, room, cost_room, count = pack + 1, limits.tokens, limits.cost, 0
        packs.append(pack)
        room, cost_room, count = room - span, cost_room - cost, count + 1
    return packs


class FirstFit:
    """Put samples one by one into the oldest open pack that has room, for a plan or for a stream.

    A pack is closed when no sample fits any more, or when it is the fullest of `open_packs` and one more is needed.

    Args:
        limits ([`Limits`]): What a pack may hold.
        open_packs (`int`): Packs held open at once.

    Attributes:
        closed (list of `int`): Numbers of the packs in the order in which they were closed; the caller may empty it.
    """

    def __init__(self, limits: Limits, *, open_packs: int) -> None:
        self.limits = limits
        self.open_packs = open_packs
        self.closed: list[int] = []
        _, _, self._samples, self._smallest, self._cheapest = limits
        self._opened = 0
        # One value per open pack, the oldest first.
        self._numbers: list[int] = []
        self._rooms: list[int] = []
        self._cost_rooms: list[float] = []
        self._counts: list[int] = []

    def add(self, span: int, cost: float = 0.0) -> int:
        """Return the number of the pack that takes a sample; packs are numbered as they are opened."""
        rooms, cost_rooms = self._rooms, self._cost_rooms
        for place, room in enumerate(rooms):
            if span <= room and cost <= cost_rooms[place]:
                break
        else:
            if len(rooms) == self.open_packs:
                fullness = self.limits.fullness
                self._close_at(max(range(len(rooms)), key=lambda place: fullness(rooms[place], cost_rooms[place])))
            place = len(rooms)
            self._open()
        number = self._numbers[place]
        rooms[place] = room = rooms[place] - span
        cost_rooms[place] = cost_room = cost_rooms[place] - cost
        self._counts[place] = count = self._counts[place] + 1
        if room < self._smallest or cost_room < self._cheapest or count == self._samples:
            self._close_at(place)
        return number

    def reopen(self, span: int, cost: float = 0.0, *, count: int) -> int:
        """Open a pack that holds `count` samples already, and return its number."""
        self._open()
        number = self._numbers[-1]
        self._rooms[-1] -= span
        self._cost_rooms[-1] -= cost
        self._counts[-1] = count
        if self._rooms[-1] < self._smallest or self._cost_rooms[-1] < self._cheapest or count == self._samples:
            self._close_at(-1)
        return number

    def close(self, number: int) -> None:
        """Close an open pack."""
        self._close_at(self._numbers.index(number))

    def _open(self) -> None:
        self._numbers.append(self._opened)
        self._rooms.append(self.limits.tokens)
        self._cost_rooms.append(self.limits.cost)
        self._counts.append(0)
        self._opened += 1

    def _close_at(self, place: int) -> None:
        del self._rooms[place], self._cost_rooms[place], self._counts[place]
        self.closed.append(self._numbers.pop(place))


def _best_fit_decreasing(samples: Iterator[Sample], limits: Limits, *, window: int) -> array[int]:
    packs = array("q")
    pool: list[tuple[int, float, int]] = []
    opened = 0
    while True:
        new = [(span, cost, len(packs) + i) for i, (span, cost) in zip(range(window), samples, strict=False)]
        packs.extend(0 for _ in new)
        pool += new
        if not pool:
            return packs
        members, rooms, cost_rooms = _best_fit(pool, limits)
        carried = _emptiest(members, rooms, cost_rooms, limits, most=window // 4) if len(new) == window else set()
        pool = [sample for pack in sorted(carried) for sample in members[pack]]
        for pack, group in enumerate(members):
            if pack not in carried:
                for _, _, position in group:
                    packs[position] = opened
                opened += 1


def _best_fit(
    samples: list[tuple[int, float, int]], limits: Limits
) -> tuple[list[list[tuple[int, float, int]]], list[int], list[float]]:
    """Put each sample, the largest first, into the pack that it fills best; return the packs and their two rooms.

    Largest and best are meant by the limit that the samples use more of; the other one is only kept.
    """
    by_cost = sum(cost for _, cost, _ in samples) / limits.cost > sum(span for span, _, _ in samples) / limits.tokens
    members: list[list[tuple[int, float, int]]] = []
    rooms: list[int] = []
    cost_rooms: list[float] = []
    open_packs: list[tuple[float, int]] = []  # the room of every open pack, in rising order, and its number
    for sample in sorted(samples, key=lambda sample: sample[by_cost], reverse=True):
        span, cost, _ = sample
        at = bisect_left(open_packs, (sample[by_cost], -1))
        while at < len(open_packs) and not (
            span <= rooms[open_packs[at][1]] and cost <= cost_rooms[open_packs[at][1]]
        ):
            at += 1
        if at < len(open_packs):
            pack = open_packs.pop(at)[1]
        else:
            pack = len(members)
            members.append([])
            rooms.append(limits.tokens)
            cost_rooms.append(limits.cost)
        members[pack].append(sample)
        rooms[pack] -= span
        cost_rooms[pack] -= cost
        open_still = rooms[pack] >= limits.smallest and cost_rooms[pack] >= limits.cheapest
        if open_still and len(members[pack]) < limits.samples:
            insort(open_packs, (cost_rooms[pack] if by_cost else rooms[pack], pack))
    return members, rooms, cost_rooms


def _emptiest(
    members: list[list[tuple[int, float, int]]],
    rooms: list[int],
    cost_rooms: list[float],
    limits: Limits,
    *,
    most: int,
) -> set[int]:
    """Return the packs, the emptiest first, whose samples may do better in the next window; `most` samples at most."""
    chosen: set[int] = set()
    fullness = [limits.fullness(room, cost_room) for room, cost_room in zip(rooms, cost_rooms, strict=True)]
    for pack in sorted(range(len(members)), key=fullness.__getitem__):
        most -= len(members[pack])
        if most < 0 or fullness[pack] > 0.99 or len(members[pack]) == limits.samples:
            break
        chosen.add(pack)
    return chosen
