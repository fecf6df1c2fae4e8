"""Token drop in training: NaViT's token dropping, and dropping until a sample or pack fits its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ..errors import PackingError, explains_arguments
from ..randomness import Purpose, generator
from .names import Grid

Mode = Literal["random", "tube", "frames"]
Seed: TypeAlias = "int | Sequence[int]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaRate:
    """A rate drawn per sample, `max_rate · Beta(alpha, beta)`, as in NaViT (Dehghani et al., 2023).

    The mean of the rate is `max_rate · alpha / (alpha + beta)`.

    Args:
        alpha (`float`): First parameter of the beta distribution, above 0.
        beta (`float`): Second parameter of the beta distribution, above 0.
        max_rate (`float`): Largest rate, from 0 to 1.

    Raises:
        PackingError: If a number is out of its range.
    """

    alpha: float
    beta: float
    max_rate: float = 1.0

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta) <= 0 or not 0 <= self.max_rate <= 1:
            raise PackingError(f"alpha and beta must be above 0 and max_rate from 0 to 1, got {self}.")


class _DropUnits(NamedTuple):
    """The units that a mode keeps or drops whole: `number` units of `tokens` tokens each, of which `kept` are kept."""

    number: int
    tokens: int
    kept: int


@explains_arguments(PackingError)
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDrop:
    """Rule by which tokens of each sample are dropped from a pack, in training.

    What a sample keeps depends on its own seed, not on the rest of the pack, unless the pack has a limit. At least
    one token, spatial position or frame is kept.

    Args:
        rate (`float`, callable or [`BetaRate`]): Share of the tokens to drop, from 0 to 1: the same for all samples,
            a function of the sample's token grid `(t, h, w)`, or drawn per sample.
        mode (`"random"`, `"tube"` or `"frames"`): What is dropped: single tokens, spatial positions over all frames,
            or whole frames.
        max_sample_tokens (`int`, *optional*): Largest number of tokens of a sample; more are dropped until it fits.
        max_pack_tokens (`int`, *optional*): Largest number of tokens of a pack; all samples drop more in proportion
            until it fits, so that an oversize sample need not be refused.

    Raises:
        PackingError: If the rate, mode or a limit is impossible.

    Example:
        >>> drop = TokenDrop(rate=0.5, mode="frames")
        >>> drop.num_kept([(4, 2, 3), (1, 2, 3)], seeds=[0, 1])
        [12, 6]
    """

    rate: float | Callable[[Grid], float] | BetaRate = 0.0
    mode: Mode = "random"
    max_sample_tokens: int | None = None
    max_pack_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rate, (int, float)):
            _check_rate(self.rate)
        if self.mode not in get_args(Mode):
            raise PackingError(f"mode must be one of {get_args(Mode)}, got {self.mode!r}.")
        for name in ("max_sample_tokens", "max_pack_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise PackingError(f"{name} must be at least 1, got {limit}.")

    def num_kept(
        self, grids: Sequence[Grid], *, seeds: Sequence[Seed], shown_tokens: Sequence[int] | None = None
    ) -> list[int]:
        """Return how many tokens of each sample's own grid a pack would hold, for planning.

        Args:
            grids (sequence of `(t, h, w)`): Token grids of the samples of one pack.
            seeds (sequence of `int`, or of tuples of them): Seed of each sample, such as `(seed, epoch, index)`.
            shown_tokens (sequence of `int`, *optional*): Tokens of each sample's references. They are never dropped,
                and count towards the limits. By default none.

        Raises:
            PackingError: If a limit cannot be met, or a rate is impossible.
        """
        plan = self._plan(grids, _generators(grids, seeds), shown_tokens or [0] * len(grids))
        return [part.tokens * part.kept for part in plan]

    def kept(
        self, grids: Sequence[Grid], *, seeds: Sequence[Seed], shown_tokens: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Return the tokens that each sample of a pack keeps, as ascending indices into its grid; see [`num_kept`]."""
        generators = _generators(grids, seeds)
        plan = self._plan(grids, generators, shown_tokens or [0] * len(grids))
        return [
            self._positions(grid, np.sort(generator.permutation(part.number)[: part.kept]))
            for grid, generator, part in zip(grids, generators, plan, strict=True)
        ]

    def _positions(self, grid: Grid, chosen: np.ndarray) -> np.ndarray:
        t, h, w = grid
        if self.mode == "tube":
            return (np.arange(t)[:, None] * (h * w) + chosen).ravel()
        if self.mode == "frames":
            return (chosen[:, None] * (h * w) + np.arange(h * w)).ravel()
        return chosen

    def _plan(
        self, grids: Sequence[Grid], generators: Sequence[np.random.Generator], shown_tokens: Sequence[int]
    ) -> list[_DropUnits]:
        plan = [
            self._fit_sample(self._units(grid, generator), reference_tokens, sample=sample)
            for sample, (grid, generator, reference_tokens) in enumerate(
                zip(grids, generators, shown_tokens, strict=True)
            )
        ]
        return plan if self.max_pack_tokens is None else _fit_pack(plan, self.max_pack_tokens - sum(shown_tokens))

    def _units(self, grid: Grid, generator: np.random.Generator) -> _DropUnits:
        t, h, w = grid
        number = {"random": t * h * w, "tube": h * w, "frames": t}[self.mode]
        if isinstance(self.rate, BetaRate):
            rate = self.rate.max_rate * generator.beta(self.rate.alpha, self.rate.beta)
        else:
            rate = self.rate(grid) if callable(self.rate) else self.rate
            _check_rate(rate)
        return _DropUnits(number, t * h * w // number, max(1, math.floor(number * (1 - rate) + 0.5)))

    def _fit_sample(self, units: _DropUnits, shown_tokens: int, *, sample: int) -> _DropUnits:
        if self.max_sample_tokens is None:
            return units
        if units.tokens > self.max_sample_tokens - shown_tokens:
            words = f" beside the {shown_tokens} of its references" if shown_tokens else ""
            raise PackingError(
                f"Mode {self.mode!r} keeps at least {units.tokens} tokens of sample {sample}{words}, more than the "
                f"max_sample_tokens of {self.max_sample_tokens}; use mode='random'."
            )
        return units._replace(kept=min(units.kept, (self.max_sample_tokens - shown_tokens) // units.tokens))


def _fit_pack(plan: list[_DropUnits], limit: int) -> list[_DropUnits]:
    """Lower what all samples keep, in proportion, just until the pack fits."""
    kept, tokens = (np.array([getattr(part, name) for part in plan]) for name in ("kept", "tokens"))
    if kept @ tokens <= limit:
        return plan
    if tokens.sum() > limit:
        raise PackingError(
            f"The pack keeps at least {tokens.sum()} tokens, more than max_pack_tokens={limit}; pack fewer "
            "samples, or use mode='random'."
        )
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _lowered(kept, middle) @ tokens <= limit else (low, middle)
    fitted = _lowered(kept, low)
    order = np.argsort(fitted - low * kept, kind="stable")
    # Rounding took away too much: give back one unit each, first to the samples that lost most, then what still fits.
    for most in (1, limit):
        for sample in order:
            room = (limit - fitted @ tokens) // tokens[sample]
            fitted[sample] += min(room, kept[sample] - fitted[sample], most)
    return [part._replace(kept=int(count)) for part, count in zip(plan, fitted, strict=True)]


def _lowered(kept: np.ndarray, factor: float) -> np.ndarray:
    return np.maximum(1, np.floor(kept * factor)).astype(np.int64)


def _generators(grids: Sequence[Grid], seeds: Sequence[Seed]) -> list[np.random.Generator]:
    if len(seeds) != len(grids):
        raise PackingError(f"Token drop needs one seed per sample, got {len(seeds)} seeds for {len(grids)} samples.")
    keys = [seed if isinstance(seed, Sequence) else (seed,) for seed in seeds]
    return [generator(Purpose.TOKEN_DROP, *key) for key in keys]


def _check_rate(rate: float) -> None:
    if not 0 <= rate <= 1:
        raise PackingError(f"A rate of token drop must be from 0 to 1, got {rate}.")
