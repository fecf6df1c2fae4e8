"""Variable resolution: draw a new size for every sample in every epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import BoolArray, FloatArray, IntArray, column_values
from ..buckets.sizes import LatentSpec, Size
from ..conditions.rows import RowConditions
from ..errors import BucketingError
from ..randomness import Purpose, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomResize:
    """Draw the height and width of each sample, to train packs on any resolution and aspect ratio.

    Each side is a whole number drawn uniformly from `min_side` to the sample's own side (a smaller side stays as it
    is), then rounded up to a multiple of the VAE's stride × the patch. The sample is cover-resized and cropped to that
    size; its frames stay. A draw depends on the seed, the epoch and the sample's index alone.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        min_side (`int`): Minimum side in pixels, at least 1.
        seed (`int`): Seed of the draws.

    Raises:
        BucketingError: If `min_side` is below 1 or `seed` is negative.
    """

    spec: LatentSpec
    min_side: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_side < 1 or self.seed < 0:
            raise BucketingError(f"Expected `min_side` ≥ 1 and `seed` ≥ 0, got {self.min_side} and {self.seed}.")

    def sizes(self, sizes: Sequence[Size], *, indices: npt.ArrayLike, epoch: int) -> list[Size]:
        """Return the drawn size of each sample.

        Args:
            sizes (sequence of [`Size`]): Sizes of the samples themselves.
            indices (array of `int`, shape `(n,)`): Row numbers of the samples in the data set.
            epoch (`int`): Epoch of the draw.

        Raises:
            BucketingError: If a side is below 1.
        """
        if any(min(size) < 1 for size in sizes):
            raise BucketingError(f"Every side of a size must be at least 1, got {sizes}.")
        frames, height, width = np.array(sizes, np.int64).reshape(-1, 3).T
        drawn = self._sides(height, width, indices=np.asarray(indices, np.int64), epoch=epoch)
        return [Size(*map(int, size)) for size in zip(*self.spec.snap_arrays(frames, *drawn), strict=True)]

    def token_counter(
        self,
        *,
        num_frames: npt.ArrayLike,
        height: npt.ArrayLike,
        width: npt.ArrayLike,
        index: npt.ArrayLike,
        conditions: RowConditions | None = None,
        views: Callable[..., IntArray] | None = None,
    ) -> Callable[[int], IntArray]:
        """Return a function from an epoch to the tokens of each row, of shape `(n,)`, for the sampler's `num_tokens`.

        Rows with a side below 1 have no size and get 0 tokens. The arguments are the data set's columns, the
        conditions of its rows, whose tokens count too, and, where samples have cached views, a function
        of `index` and of the keyword `epoch` that returns the view of each row, see `sides_of_views`; without it, each
        epoch draws new sizes.
        """
        columns = [column_values(column, np.int64) for column in (num_frames, height, width)]
        usable = np.minimum.reduce(columns) >= 1
        frames, heights, widths = (np.where(usable, column, 1) for column in columns)
        indices = column_values(index, np.int64)
        options: dict[str, Any] = {} if views is None else {"views": views}
        # A saved state compares what a partial holds; of a nested function it would compare the code too.
        return partial(self._tokens, usable, frames, heights, widths, indices, conditions or None, **options)

    def _tokens(
        self,
        usable: BoolArray,
        frames: IntArray,
        heights: IntArray,
        widths: IntArray,
        indices: IntArray,
        conditions: RowConditions | None,
        epoch: int,
        *,
        views: Callable[..., IntArray] | None = None,
    ) -> IntArray:
        """Return the tokens of each row in an epoch, 0 for rows that are not usable."""
        if views is None:
            drawn = self._sides(heights, widths, indices=indices, epoch=epoch)
        else:
            drawn = self.sides_of_views(heights, widths, indices=indices, views=views(indices, epoch=epoch))
        whole = self.spec.snap_arrays(frames, *drawn)
        t, h, w = self.spec.grid_of(*whole)
        tokens = t * h * w
        if conditions is not None:
            tokens += conditions.num_tokens(np.where(usable[:, None], np.stack(whole, 1), 0), spec=self.spec)
        return np.where(usable, tokens, 0)

    def sides_of_views(
        self, height: IntArray, width: IntArray, *, indices: IntArray, views: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the heights and widths in pixels of a cached view of each sample, `(n,)`, before they are rounded.

        View 0 has the sample's own height and width, and view `k` those of the draw of epoch `k - 1`. All arguments
        are arrays of shape `(n,)`.
        """
        sides = height.astype(np.int64), width.astype(np.int64)
        for view in range(1, int(views.max(initial=0)) + 1):
            rows = np.flatnonzero(views == view)
            drawn = self._sides(height[rows], width[rows], indices=indices[rows], epoch=view - 1)
            for side, values in zip(sides, drawn, strict=True):
                side[rows] = values
        return sides

    def _sides(self, height: IntArray, width: IntArray, *, indices: IntArray, epoch: int) -> tuple[IntArray, IntArray]:
        """Return drawn heights and widths."""
        draws = numbers_of_rows(generator(Purpose.RANDOM_RESIZE, self.seed, epoch), indices, each=2).T
        lowest = (np.minimum(self.min_side, side) for side in (height, width))
        sides = zip((height, width), lowest, draws, strict=True)
        drawn_height, drawn_width = (low + (draw * (side - low + 1)).astype(np.int64) for side, low, draw in sides)
        return drawn_height, drawn_width


def numbers_of_rows(rng: np.random.Generator, indices: IntArray, *, each: int) -> FloatArray:
    """Return uniform numbers of rows, `(n, each)`, that do not depend on which other rows there are.

    Row i has the numbers `each·i` and following of the generator's stream.
    """
    if not len(indices):
        return np.zeros((0, each))
    rng.bit_generator.advance(each * int(indices.min()))  # type: ignore[attr-defined]  # PCG64 has it
    stream = rng.random((int(np.ptp(indices)) + 1, each))
    numbers: FloatArray = stream[indices - indices.min()]
    return numbers
