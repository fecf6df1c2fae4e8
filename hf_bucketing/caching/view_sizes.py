"""Cached views of several sizes: which of them an epoch holds of each row, and the tokens that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        >>> [views_in_turn(range(4), count=3, seed=0, epoch=epoch).tolist() for epoch in range(3)]
        [[1, 1, 1, 2], [2, 2, 2, 0], [0, 0, 0, 1]]
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
        columns: Mapping[str, IntArray],
        *,
        references: RowReferences | None = None,
        audio: RowAudio | None = None,
    ) -> Callable[[int], IntArray]:
        """Return a function from an epoch to the tokens of each row's view, as [`RandomResize.token_counter`] does.

        Args:
            own_tokens (array of `int`, shape `(n,)`): Tokens of the first view; 0 for rejected rows.
            columns (mapping of `str` to array of `int`, shape `(n,)`): `num_frames` of the samples, and `height`,
                `width` and `index` of the rows.
            references ([`RowReferences`], *optional*): References of the rows, whose tokens count too.
            audio ([`RowAudio`], *optional*): Audio of the rows, whose tokens count too.
        """
        return partial(self._tokens, own_tokens, columns, references, audio)

    def _tokens(
        self,
        own_tokens: IntArray,
        columns: Mapping[str, IntArray],
        references: RowReferences | None,
        audio: RowAudio | None,
        epoch: int,
    ) -> IntArray:
        views = views_in_turn(columns["index"], count=self.count, seed=self.seed, epoch=epoch)
        tokens = own_tokens.copy()
        for view in range(1, self.count):
            rows = np.flatnonzero((views == view) & (own_tokens > 0))
            counter = self.resize.token_counter(
                num_frames=columns["num_frames"][rows],
                height=columns["height"][rows],
                width=columns["width"][rows],
                index=columns["index"][rows],
                references=None if references is None else references.select(rows),
                audio=None if audio is None else audio.select(rows),
            )
            tokens[rows] = counter(view - 1)
        return tokens
