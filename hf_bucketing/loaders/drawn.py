"""The batches that a sampler hands out, counted, so that a state can say how many were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Drawn:
    """Count of the batches that an iteration handed out.

    Args:
        first_step (`int`): Step of the plan with which the iteration begins.
        num_steps (`int`): Steps of the plan.
        batches_per_step (`int`): Batches of one step: those of all processes, or of one.
        batches (`int`): Batches that were handed out.
    """

    first_step: int
    num_steps: int
    batches_per_step: int
    batches: int = 0

    @property
    def step(self) -> int:
        """Steps of the plan that are finished if what was handed out is."""
        return self.first_step + self.batches // self.batches_per_step

    @property
    def ended(self) -> bool:
        """Whether no batch is left."""
        return self.step >= self.num_steps


class DrawnBatches(Iterator[list[int]]):
    """Iterate batches, and count them.

    Args:
        batches (iterator): Batches to hand out.
        drawn ([`Drawn`]): Their count.
        before_first (callable): Called before the first batch is handed out.
        next_epoch (callable): Puts the sampler at the start of its next epoch.
    """

    def __init__(
        self,
        batches: Iterator[list[int]],
        drawn: Drawn,
        *,
        before_first: Callable[[], None],
        next_epoch: Callable[[], None],
    ) -> None:
        self._batches = batches
        self._drawn = drawn
        self._before_first = before_first
        self._next_epoch = next_epoch

    def __next__(self) -> list[int]:
        batch = next(self._batches)
        if not self._drawn.batches:
            self._before_first()
        self._drawn.batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the sampler's state holds the place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the next epoch if the loaded one has ended.

        torchdata's StatefulDataLoader calls this after the sampler has loaded its state, in the first `iter` after
        loading (`torchdata/stateful_dataloader/stateful_dataloader.py`). Where the epoch had ended, it then begins
        another iteration, and the training loop had no chance to call `set_epoch` in between.
        """
        if self._drawn.ended:
            self._next_epoch()
