"""What a grid of renderings compares: prompts, seeds, strengths of adapters, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


class Cell(NamedTuple):
    """One rendering: its prompt, the seed of its noise, the strength of the adapters, and the scheduler's steps."""

    prompt: str
    seed: int
    strength: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderGrid:
    """Every prompt with every seed in a row, every strength with every number of steps in a column.

    Attributes:
        prompts (sequence of `str`): Prompts.
        seeds (sequence of `int`): Seeds of the noise.
        strengths (sequence of `float`): Factors of the strengths of adapters; 0 is the base model.
        steps (sequence of `int`): Scheduler steps.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    strengths: Sequence[float]
    steps: Sequence[int]

    @property
    def cells(self) -> list[Cell]:
        """The renderings, row by row."""
        return [Cell(*values) for values in product(self.prompts, self.seeds, self.strengths, self.steps)]

    @property
    def rows(self) -> list[str]:
        """Labels of the rows."""
        several = len(self.seeds) > 1
        pairs = product(self.prompts, self.seeds)
        return [f"seed {seed}: {prompt}" if several else prompt for prompt, seed in pairs]

    @property
    def columns(self) -> list[str]:
        """Labels of the columns.

        Example:
            >>> RenderGrid(prompts=["a"], seeds=[0], strengths=[0.0, 0.5], steps=[20]).columns
            ['base', 'strength 0.5']
            >>> RenderGrid(prompts=["a"], seeds=[0], strengths=[0.0, 1.0], steps=[20, 30]).columns[1]
            'base, 30 steps'
        """
        names = {strength: f"strength {strength:g}" if strength else "base" for strength in self.strengths}
        if len(self.strengths) == 1:
            return [f"{steps} steps" for steps in self.steps]
        if len(self.steps) == 1:
            return [*names.values()]
        return [f"{names[strength]}, {steps} steps" for strength, steps in product(self.strengths, self.steps)]
