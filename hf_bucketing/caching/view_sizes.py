"""Cached views of several sizes: which of them an epoch holds of each row, and the tokens that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..loaders.random_resize import RandomResize, numbers_of_rows
from ..media.row_audio import RowAudio
from ..media.row_references import RowReferences
from ..randomness import Purpose, generator


def views_in_turn(indices: npt.ArrayLike, *, count: int, seed: int, epoch: int) -> IntArray:
    """Return which of `count` views each row has in an epoch: another one in each, and all in `count` epochs.

    A plan counts the tokens of one size for each row, so that all occurrences of a row in an epoch have one view.

    Args:
        indices (array of `int`, shape `(n,)`): Row numbers in the data set.
        count (`int`): Views of each row.
        seed (`int`): Seed of the view that a row has first.
        epoch (`int`): Epoch.

    Example:
        >>> [views_in_turn([0, 1, 2], count=2, seed=0, epoch=epoch).tolist() for epoch in range(3)]
        [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    """
    rows = np.asarray(indices, np.int64)
    first = numbers_of_rows(generator(Purpose.FIRST_VIEW, seed), rows, each=1)[:, 0]
    views: IntArray = ((first * count).astype(np.int64) + epoch) % count
    return views


@dataclass(frozen=True, kw_only=True)
class ViewSizes:
    """Sizes of the cached views of rows: the first is the row's own, the others are drawn.

    Args:
        resize ([`RandomResize`][hf_bucketing.loaders.RandomResize]): Draws them; the second view has the size of its
            epoch 0.
        count (`int`): Views of each row.
        seed (`int`): Seed of the run, see [`views_in_turn`].
    """

    resize: RandomResize
    count: int
    seed: int

    def token_counter(
        self,
        own_tokens: IntArray,
        *,
        num_frames: IntArray,
        height: IntArray,
        width: IntArray,
        index: IntArray,
        references: RowReferences | None = None,
        audio: RowAudio | None = None,
    ) -> Callable[[int], IntArray]:
        """Return a function from an epoch to the tokens of each row's view, as [`RandomResize.token_counter`] does.

        Args:
            own_tokens (array of `int`, shape `(n,)`): Tokens of the first view; 0 for rejected rows.
            num_frames (array of `int`, shape `(n,)`): Frames of the samples.
            height (array of `int`, shape `(n,)`): Heights of the rows.
            width (array of `int`, shape `(n,)`): Widths of the rows.
            index (array of `int`, shape `(n,)`): Row numbers in the data set.
            references ([`RowReferences`], *optional*): References of the rows, whose tokens count too.
            audio ([`RowAudio`], *optional*): Audio of the rows, whose tokens count too.
        """
        return partial(self._tokens, own_tokens, num_frames, height, width, index, references, audio)

    def _tokens(
        self,
        own_tokens: IntArray,
        num_frames: IntArray,
        height: IntArray,
        width: IntArray,
        index: IntArray,
        references: RowReferences | None,
        audio: RowAudio | None,
        epoch: int,
    ) -> IntArray:
        views = views_in_turn(index, count=self.count, seed=self.seed, epoch=epoch)
        tokens = own_tokens.copy()
        for view in range(1, self.count):
            rows = np.flatnonzero((views == view) & (own_tokens > 0))
            counter = self.resize.token_counter(
                num_frames=num_frames[rows],
                height=height[rows],
                width=width[rows],
                index=index[rows],
                references=None if references is None else references.select(rows),
                audio=None if audio is None else audio.select(rows),
            )
            tokens[rows] = counter(view - 1)
        return tokens
