"""Unreadable rows of a stream: they are taken out of their batches, and later rows take their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ColumnError
from ..randomness import ROW
from .grouping import Group, Row


@dataclass(slots=True)
class UnreadableRows:
    """Unreadable rows that one worker has met in a pass over the stream.

    Attributes:
        count (`int`): How many there were.
        waiting (`dict` of `int` to lists of pairs): Those whose places no row has taken yet, by the slot of their
            group, see [`OpenGroups`][hf_bucketing.streaming.grouping.OpenGroups]: the index of each, and how many rows
            had been read when it was taken out. Later rows alone take its place.
    """

    count: int = 0
    waiting: dict[int, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, place: Mapping[str, Any]) -> UnreadableRows:
        """Return what a worker's place holds, see [`saved`][UnreadableRows.saved]."""
        waiting = {slot: [*indices] for slot, indices in place.get("unplaced", ())}
        return cls(place.get("unreadable", 0), waiting)

    def saved(self) -> dict[str, Any]:
        """Return the values for a worker's place, as JSON holds them."""
        unplaced = [[slot, [*indices]] for slot, indices in self.waiting.items()]
        return {"unreadable": self.count, "unplaced": unplaced}

    def take_out(self, group: Group, positions: Collection[int], *, slot: int, read: int) -> list[Row]:
        """Remove and return rows at some positions of a group, after so many rows were read.

        Raises:
            ColumnError: If the rows have no such column.
        """
        if ROW not in group.rows[0]:
            raise ColumnError(f"Rows that are replaced need a column {ROW}, which names each; add one to the stream.")
        unreadable = [group.rows[position] for position in positions]
        readable = [position for position in range(len(group.rows)) if position not in positions]
        group.rows = [group.rows[position] for position in readable]
        group.ordinals = [group.ordinals[position] for position in readable]
        self.count += len(unreadable)
        self.waiting.setdefault(slot, []).extend([int(row[ROW]), read] for row in unreadable)
        return unreadable

    def planned(self, group: Group, *, slot: int) -> list[int]:
        """Return the indices of a group that is sent, with unreadable rows in the places that its rows take."""
        waiting = deque(self.waiting.pop(slot, []))
        planned = [int(row[ROW]) for row in group.rows]
        for position, ordinal in enumerate(group.ordinals):
            if waiting and ordinal >= waiting[0][1]:
                planned[position], _ = waiting.popleft()
        if waiting:
            self.waiting[slot] = [*waiting]
        return planned
