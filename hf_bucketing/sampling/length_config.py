"""What a length plan depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from .rows import FloatArray

LengthStrategy = Literal["bucket", "random", "sorted"]
LengthOversize = Literal["error", "own_batch", "drop"]
Boundaries = Literal["quantile", "uniform"] | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlanConfig:
    """What a length plan depends on, beside the lengths, the epoch and the number of processes.

    Args:
        strategy (`str`): `"bucket"` makes batches of samples whose lengths lie between the same two boundaries;
            `"random"` of any samples; `"sorted"` of samples of neighbouring length, in random order among equal ones,
            for the least padding and the least mixing.
        batch_size (`int`, *optional*): Samples per process and step.
        capacity (`float`, *optional*): Instead of `batch_size`, in the unit of the lengths: the number of samples ×
            the longest of them is at most this. In a bucket, its upper bound counts as the longest, so all its full
            batches are of one size, and can be padded to one shape.
        num_buckets (`int`): For `"quantile"` and `"uniform"` boundaries.
        boundaries (`str` or sequence of `float`): `"quantile"`: equally many samples in each bucket. `"uniform"`:
            equally wide buckets. Or the upper bounds of the buckets themselves, rising, each included; what is longer
            than the last one makes one more bucket.
        drop_last (`bool`): Leave out what fills no step on all processes, instead of making smaller batches of it.
        shuffle (`bool`): If False, samples stay in their order (`"sorted"`: of rising length), and steps too; for
            evaluation.
        oversize (`str`): A sample longer than the capacity is an `"error"` that names it, gets an `"own_batch"` above
            the capacity, or is a counted `"drop"`.
        seed (`int`): Not negative.

    Raises:
        PlanError: If not exactly one of `batch_size` and `capacity` is given, on an unknown name, a value below 1, or
            boundaries that do not rise.
    """

    strategy: LengthStrategy = "bucket"
    batch_size: int | None = None
    capacity: float | None = None
    num_buckets: int = 10
    boundaries: Boundaries = "quantile"
    drop_last: bool = False
    shuffle: bool = True
    oversize: LengthOversize = "error"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in {"strategy": LengthStrategy, "oversize": LengthOversize}.items():
            if getattr(self, name) not in get_args(choices):
                raise PlanError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}.")
        if (self.batch_size is None) == (self.capacity is None):
            raise PlanError("Give either batch_size or capacity.")
        if (self.batch_size is not None and self.batch_size < 1) or self.num_buckets < 1:
            raise PlanError(
                f"Expected batch_size and num_buckets of at least 1, got {self.batch_size} and {self.num_buckets}."
            )
        if self.capacity is not None and not self.capacity > 0:
            raise PlanError(f"capacity must be above 0, got {self.capacity}.")
        if isinstance(self.boundaries, str):
            if self.boundaries not in ("quantile", "uniform"):
                raise PlanError(f'boundaries must be "quantile", "uniform" or numbers, got {self.boundaries!r}.')
        else:
            bounds = tuple(map(float, self.boundaries))
            if not bounds or not all(low < high for low, high in pairwise(bounds)):
                raise PlanError(f"Boundaries must be numbers that rise, got {self.boundaries!r}.")
            object.__setattr__(self, "boundaries", bounds)

    def upper_bounds(self, lengths: npt.NDArray[Any]) -> FloatArray:
        """Return the upper bound of each bucket, included; the last one is at least the largest of the lengths.

        Args:
            lengths (array of `int` or `float`, shape `(n,)`): At least one; those that are to be bucketed.

        Example:
            >>> LengthPlanConfig(batch_size=1, num_buckets=3, boundaries="uniform").upper_bounds(np.array([1.0, 4, 7]))
            array([3., 5., 7.])
        """
        longest = lengths.max()
        if not isinstance(self.boundaries, str):
            bounds = np.array(self.boundaries, np.float64)
            return bounds if bounds[-1] >= longest else np.append(bounds, longest)
        if self.boundaries == "uniform":
            return np.linspace(lengths.min(), longest, self.num_buckets + 1)[1:]
        # Bounds are lengths that occur, so that the sizes of batches follow from the longest sample of a bucket.
        bounds = np.quantile(lengths, np.linspace(0, 1, self.num_buckets + 1)[1:], method="inverted_cdf")
        return np.unique(bounds).astype(np.float64)
