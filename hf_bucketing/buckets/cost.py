"""The cost of a step: linear in its tokens, quadratic in those that attend to each other, or fitted to times."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import FloatArray, column_values


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost of samples that attend to themselves alone: `linear · Σ tokens + quadratic · Σ tokens²`.

    Equal tokens are not equal time: one sample of 8 tokens has four times the token pairs of four samples of 2.

    Args:
        linear (`float`): Cost of one token, at least 0.
        quadratic (`float`): Cost of one pair of tokens of a sample, at least 0. At least one of the two is above 0.

    Raises:
        BucketingError: If a coefficient is negative or not finite, or both are 0.

    Example:
        >>> CostModel(linear=10, quadratic=1).cost([8, 2])
        array([144.,  24.])
    """

    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):  # whatever type they were given as
            object.__setattr__(self, name, float(getattr(self, name)))
        coefficients = (self.linear, self.quadratic)
        if not (np.isfinite(coefficients).all() and min(coefficients) >= 0 and max(coefficients) > 0):
            raise BucketingError(f"Costs must be finite and at least 0, and one of them above 0, got {self}.")

    @classmethod
    def for_transformer(cls, width: int) -> CostModel:
        """Return the floating-point operations of one transformer block's forward pass; a multiply-add counts as two.

        A block has 12·width² weights (4·width² in attention, 8·width² in a feed-forward four times as wide), and each
        token takes one multiply-add per weight: 24·width². Scores and weighted values take width multiply-adds each
        per pair of tokens: 4·width. Attention to a text is not counted. Source: the counts of Kaplan et al., "Scaling
        Laws for Neural Language Models" (2020, table 1), and of PaLM (Chowdhery et al., 2022, appendix B).

        Args:
            width (`int`): Hidden size of the model, at least 1.

        Raises:
            BucketingError: If the width is below 1.

        Example:
            At 6·width tokens, attention costs as much as everything else:

            >>> model = CostModel.for_transformer(1536)  # Wan 2.1 1.3B
            >>> model.linear * 9216 == model.quadratic * 9216**2
            True
        """
        if width < 1:
            raise BucketingError(f"The width of a model is at least 1, got {width}.")
        return cls(linear=24.0 * width**2, quadratic=4.0 * width)

    def cost(self, num_tokens: npt.ArrayLike) -> FloatArray:
        """Return the cost of each sample; shape as given.

        Args:
            num_tokens (array of `int`, any shape): Number of tokens of each sample, at least 0.
        """
        tokens = column_values(num_tokens, np.float64)
        return self.linear * tokens + self.quadratic * tokens**2

    def pack_cost(self, num_tokens: npt.ArrayLike, offsets: npt.ArrayLike) -> FloatArray:
        """Return the cost of each batch or pack: the sum over its samples.

        Args:
            num_tokens (array of `int`, shape `(n,)`): Tokens of each sample, batch after batch.
            offsets (array of `int`, shape `(num_batches + 1,)`): Batch `i` is `num_tokens[offsets[i]:offsets[i + 1]]`,
                never empty, as in an [`EpochPlan`][hf_bucketing.plans.EpochPlan].

        Returns:
            `float64` of shape `(num_batches,)`.

        Raises:
            BucketingError: If the offsets do not go from 0 to n in rising order.

        Example:
            >>> CostModel(linear=0, quadratic=1).pack_cost([8, 2, 2, 2, 2], [0, 1, 5])
            array([64., 16.])
        """
        costs, bounds = self.cost(num_tokens), np.asarray(offsets, np.int64)
        if bounds.ndim != 1 or not len(bounds) or bounds[0] or bounds[-1] != len(costs) or (np.diff(bounds) < 1).any():
            raise BucketingError(f"Offsets must rise from 0 to the number of samples, {len(costs)}; got {offsets!r}.")
        return np.add.reduceat(costs, bounds[:-1]) if len(costs) else np.zeros(0)


MIN_STEPS = 20
"""Fewest measured steps that are fitted."""

_MIN_VARIETY = 0.02
"""Smallest singular value of two columns of length one that still tells them apart; that of parallel ones is 0."""

_WORTH = 0.95
"""Share of the errors that may be left for a further coefficient to be worth it."""

_SINGULAR = 1e-4

_ITERATIONS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """Cost of samples in seconds, as a run measured it, and how well it fits.

    Args:
        linear (`float`): Seconds per token, at least 0.
        quadratic (`float`): Seconds per pair of tokens of a sample, at least 0. One of the two is above 0.
        per_batch (`float`): Seconds of a batch whatever its tokens, at least 0: launching kernels, optimizer, exchange
            of gradients. Processes do not differ in it, so no plan depends on it.
        residual (`float`): Median over the steps of |measured − fitted| ÷ measured.
        num_steps (`int`): Number of steps measured.

    Raises:
        BucketingError: If a number is negative or not finite, or both `linear` and `quadratic` are 0.
    """

    linear: float
    quadratic: float
    per_batch: float
    residual: float
    num_steps: int

    def __post_init__(self) -> None:
        _ = self.model
        if not all(math.isfinite(value) and value >= 0 for value in (self.per_batch, self.residual, self.num_steps)):
            raise BucketingError(f"Measured costs must be finite and at least 0, got {self}.")

    @property
    def model(self) -> CostModel:
        """The cost model, in seconds."""
        return CostModel(linear=self.linear, quadratic=self.quadratic)

    def __str__(self) -> str:
        return (
            f"{self.linear:.3g} s per token, {self.quadratic:.3g} s per pair of tokens, {self.per_batch:.3g} s per "
            f"batch; residual {self.residual:.1%} of {self.num_steps} steps"
        )

    def to_json(self) -> str:
        """Return the fit as JSON text; [`from_json`][CostFit.from_json] reads it back unchanged."""
        return json.dumps({"version": 1, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostFit:
        """Read a fit that [`to_json`][CostFit.to_json] wrote.

        Raises:
            BucketingError: If the text is not such a fit.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != 1:
                raise BucketingError(f"This release reads cost models of version 1, got {version!r}.")
            return cls(**values)
        except BucketingError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BucketingError(f"Expected a cost model as CostFit.to_json writes it: {error}.") from error


def read_cost_model(path: str | Path) -> CostModel:
    """Return the cost model in the file that a training run left, in seconds.

    Raises:
        BucketingError: As [`read_cost_fit`].
    """
    return read_cost_fit(path).model


def read_cost_fit(path: str | Path) -> CostFit:
    """Return the costs in the file that a training run left, with what a batch takes and how well they fit.

    Raises:
        BucketingError: If the file cannot be read, or holds something else; the message names it.
    """
    try:
        return CostFit.from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError, BucketingError) as error:
        raise BucketingError(
            f"{path} is no cost model ({str(error).rstrip('.')}); give the cost_model.json in the output folder of a "
            "training run."
        ) from error


def fit_costs(
    seconds: npt.ArrayLike, *, tokens: npt.ArrayLike, token_pairs: npt.ArrayLike, batches: npt.ArrayLike = 1
) -> CostFit:
    """Fit a cost model to measured steps: `linear · Σ tokens + quadratic · Σ tokens² + per_batch · batches`.

    The sum of the absolute errors is the least under coefficients of at least 0. Like a median, it is not moved far by
    a minority of steps that took longer for other reasons: warm-up, compilation, waiting for data or for another
    process. `per_batch` is 0 unless it lowers the typical error by more than 5 %: small models need it, and in packs
    that are all full it cannot be separated from `linear`, which then holds it.

    Args:
        seconds (array of `float`, shape `(n,)`): Time of each step, above 0.
        tokens (array of `int`, shape `(n,)`): Tokens of each step: Σ tokens over its samples.
        token_pairs (array of `int`, shape `(n,)`): Pairs of tokens of each step: Σ tokens² over its samples.
        batches (`int` or array of `int`, shape `(n,)`): Batches of each step, several under gradient accumulation.

    Raises:
        BucketingError: If there are fewer than 20 steps, samples of one size only, or times that do not rise with the
            tokens.

    Example:
        >>> tokens, pairs = np.arange(100, 200), np.arange(100, 200) ** 2 / 4  # four samples each
        >>> fit = fit_costs(0.1 + 2e-3 * tokens + 1e-5 * pairs, tokens=tokens, token_pairs=pairs)
        >>> f"{fit.linear:.4f} {fit.quadratic:.6f} {fit.per_batch:.3f} {fit.residual:.3f}"
        '0.0020 0.000010 0.100 0.000'
    """
    times = np.asarray(seconds, np.float64)
    table = np.stack(
        [np.broadcast_to(np.asarray(column, np.float64), times.shape) for column in (tokens, token_pairs, batches)], 1
    )
    if times.ndim != 1 or not np.isfinite(table).all() or not np.isfinite(times).all() or min(times, default=1) <= 0:
        raise BucketingError(f"Expected finite times above 0, one per step, got the shape {times.shape}.")
    if len(times) < MIN_STEPS:
        raise BucketingError(f"A cost model is fitted to at least {MIN_STEPS} steps, got {len(times)}.")
    if _variety(table[:, :2]) < _MIN_VARIETY:
        sizes = table[:, 1] / table[:, 0]
        raise BucketingError(
            f"The samples of all steps are too alike (about {sizes.min():.0f} to {sizes.max():.0f} tokens each) to "
            "tell the cost of tokens from that of their pairs; measure a run on samples of several sizes."
        )
    coefficients = np.append(_least_absolute(table[:, :2], times), 0.0)
    if _variety(table) > _SINGULAR:
        further = _least_absolute(table, times)
        if _typical_error(times - table @ further) < _WORTH * _typical_error(times - table @ coefficients):
            coefficients = further
    if not coefficients[:2].any():
        raise BucketingError("The times of the steps do not rise with their tokens; measure a larger model.")
    errors = np.abs(times - table @ coefficients) / times
    linear, quadratic, per_batch = coefficients.tolist()
    return CostFit(
        linear=linear,
        quadratic=quadratic,
        per_batch=per_batch,
        residual=float(np.median(errors)),
        num_steps=len(times),
    )


def _typical_error(errors: FloatArray) -> float:
    """Return the mean of the lower three quarters of the absolute errors, without the steps that took longer."""
    return float(np.sort(np.abs(errors))[: math.ceil(len(errors) * 0.75)].mean())


def _variety(columns: FloatArray) -> float:
    scaled = columns / np.linalg.norm(columns, axis=0)
    return float(np.linalg.svd(scaled, full_matrices=False)[1].min())


def _least_absolute(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Return the coefficients, at least 0, of the least sum of absolute errors, by reweighted least squares."""
    scale, smallest = np.linalg.norm(columns, axis=0), 1e-9 * float(np.median(values))
    scaled, weights = columns / scale, np.ones(len(values))
    solution = np.zeros(columns.shape[1])
    for _ in range(_ITERATIONS):
        weighted = scaled * weights[:, None]
        previous, solution = solution, _non_negative(weighted.T @ scaled, weighted.T @ values)
        if np.allclose(solution, previous, rtol=1e-9, atol=0):
            break
        weights = 1 / np.maximum(np.abs(values - scaled @ solution), smallest)
    coefficients: FloatArray = solution / scale
    return coefficients


def _non_negative(gram: FloatArray, products: FloatArray) -> FloatArray:
    """Return the coefficients of least squares, at least 0: the best of all choices of those above 0."""
    best, gain = np.zeros(len(gram)), 0.0
    for count in range(1, len(gram) + 1):
        for chosen in map(list, itertools.combinations(range(len(gram)), count)):
            solved = np.linalg.solve(gram[np.ix_(chosen, chosen)], products[chosen])
            if solved.min() >= 0 and (value := float(solved @ products[chosen])) > gain:
                best, gain = np.zeros(len(gram)), value
                best[chosen] = solved
    return best
