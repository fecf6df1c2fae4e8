"""The cost of a step: linear in its tokens, quadratic in the tokens that attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

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
