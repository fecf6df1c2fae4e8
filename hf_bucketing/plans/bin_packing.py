"""Greedy bin packing, in plain Python because each choice depends on the last."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray, IntArray

PackStrategy = Literal["sequential", "first_fit", "best_fit_decreasing"]

Sample = tuple[int, float]
"""Tokens and cost."""

_CHUNK = 2**18


class Limits(NamedTuple):
    """What a pack may hold, and the least that a sample takes of it.

    Attributes:
        tokens (`int`): Most tokens of a pack.
        cost (`float`): Largest cost of a pack; infinite for no limit.
        samples (`float`): Most samples of a pack; infinite for no limit.
        smallest (`int`): No sample takes fewer tokens; a pack with less room is closed.
        cheapest (`float`): No sample costs less.
    """

    tokens: int
    cost: float
    samples: float
    smallest: int
    cheapest: float

    def fullness(self, room: int, cost_room: float) -> float:
        """Return how full a pack is, from 0 to 1, by the limit that it is nearest to."""
        return 1 - min(room / self.tokens, cost_room / self.cost if math.isfinite(self.cost) else 1)


def fill_packs(
    spans: IntArray, costs: FloatArray, limits: Limits, *, strategy: PackStrategy, open_packs: int, window: int
) -> IntArray:
    """Return the pack of each sample: 0, 1, 2, … without a gap, nearly in the order of the samples; shape `(n,)`.

    The settings are those of [`PackPlanConfig`][hf_bucketing.plans.PackPlanConfig]. Spans are from 1 to
    `limits.tokens`; costs are 0 without a limit of cost.
    """
    samples = _one_by_one(spans, costs)
    if strategy == "best_fit_decreasing":
        return np.array(_best_fit_decreasing(samples, limits, window=window), np.int64)
    if strategy == "first_fit":
        return np.array(FirstFit(limits, open_packs=open_packs).add_all(samples), np.int64)
    return np.array(_sequential(samples, limits), np.int64)


def _one_by_one(spans: IntArray, costs: FloatArray) -> Iterator[Sample]:
    """Yield samples as Python numbers, converting a part of the arrays at a time to save memory."""
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
        self._has_costs = math.isfinite(limits.cost)
        self._opened = 0
        # One value per open pack, the oldest first.
        self._numbers: list[int] = []
        self._rooms: list[int] = []
        self._cost_rooms: list[float] = []
        self._counts: list[int] = []

    def add(self, span: int, cost: float = 0.0) -> int:
        """Return the number of the pack that takes a sample; packs are numbered as they are opened."""
        return self.add_all([(span, cost)])[0]

    def add_all(self, samples: Iterable[Sample]) -> array[int]:
        """Return the number of the pack that takes each sample, added one after the other."""
        added = array("q")
        append, rooms, cost_rooms, counts, numbers = (
            added.append,
            self._rooms,
            self._cost_rooms,
            self._counts,
            self._numbers,
        )
        smallest, cheapest, most, has_costs = self._smallest, self._cheapest, self._samples, self._has_costs
        for span, cost in samples:
            place = 0
            for room in rooms:
                if span <= room and (not has_costs or cost <= cost_rooms[place]):
                    break
                place += 1
            else:
                if place >= self.open_packs:
                    self._close_at(self._fullest())
                    place -= 1
                self._open()
                room = rooms[place]
            append(numbers[place])
            rooms[place] = room = room - span
            counts[place] = count = counts[place] + 1
            if has_costs:
                cost_rooms[place] -= cost
            if room < smallest or count == most or cost_rooms[place] < cheapest:
                self._close_at(place)
        return added

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

    def _fullest(self) -> int:
        """Return the place of the fullest open pack, the oldest of several."""
        rooms, cost_rooms, fullness = self._rooms, self._cost_rooms, self.limits.fullness
        if not self._has_costs:
            return rooms.index(min(rooms))
        return max(range(len(rooms)), key=lambda place: fullness(rooms[place], cost_rooms[place]))

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
    """Put each sample, the largest first, into the pack that it fills best; return the packs and what is free in them.

    Samples and packs are compared by the limit, tokens or cost, that the samples use more of.
    """
    by_cost = sum(cost for _, cost, _ in samples) / limits.cost > sum(span for span, _, _ in samples) / limits.tokens
    members: list[list[tuple[int, float, int]]] = []
    rooms: list[int] = []
    cost_rooms: list[float] = []
    open_packs: list[tuple[float, int]] = []  # room and number of every open pack, by rising room
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
    """Return the emptiest packs, of `most` samples in all, whose samples are tried again in the next window."""
    chosen: set[int] = set()
    fullness = [limits.fullness(room, cost_room) for room, cost_room in zip(rooms, cost_rooms, strict=True)]
    for pack in sorted(range(len(members)), key=fullness.__getitem__):
        most -= len(members[pack])
        if most < 0 or fullness[pack] > 0.99 or len(members[pack]) == limits.samples:
            break
        chosen.add(pack)
    return chosen
