"""Frames of samples that a run appends to them as further tokens, each encoded by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.sizes import LatentSpec, Size


class AppendedFrames(NamedTuple):
    """Most frames of a sample that a run appends to it, each of the sample's height and width.

    There are at most one less than the sample has latent frames.

    Attributes:
        most: Their number.
        first: Whether its first frame may be one of them, so that there may be one more.
        text: Where the text encoder sees these frames, tokens that each adds to the text beside as many as it has
            itself.
    """

    most: int = 0
    first: bool = False
    text: int | None = None

    @property
    def setting(self) -> str:
        """Name under which states of streams hold them."""
        return "appended"

    @property
    def columns(self) -> tuple[str, ...]:
        """No column of a data set says how many there are."""
        return ()

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> RowAppended:
        """Return those of rows."""
        return RowAppended(rule=self, num_rows=num_rows)

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return their tokens beside a sample of a size, which no key spells."""
        return int(self.num_tokens(size, spec=spec)[0])

    def counts(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the most frames that are appended to samples `(n, 3)`, `(n,)`.

        There are none for images, and for rows without a size.

        Example:
            >>> spec = LatentSpec(temporal_stride=8, spatial_stride=32, patch=(1, 1, 1))
            >>> AppendedFrames(2).counts([[25, 64, 64], [9, 64, 64], [1, 64, 64]], spec=spec).tolist()
            [2, 1, 0]
        """
        frames = np.asarray(samples, np.int64).reshape(-1, 3)[:, 0]
        most = np.maximum(frames - 1, 0) // spec.temporal_stride + (self.first & (frames > 1))
        return np.minimum(self.most, most)

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of the most frames that are appended to samples `(n, 3)`, `(n,)`, with those of text."""
        _, height, width = spec.grid_of(*np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1).T)
        return self.counts(samples, spec=spec) * height * width + self.text_tokens(samples, spec=spec)

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens that these frames add to the texts of samples `(n, 3)`, `(n,)`."""
        frames = self.counts(samples, spec=spec)
        if self.text is None:
            return np.zeros_like(frames)
        _, height, width = spec.grid_of(*np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1).T)
        return frames * (height * width + self.text)


NO_FRAMES = AppendedFrames()
"""A run appends none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowAppended:
    """Frames that a run appends to the samples of rows, which are counted as if each had the most of them.

    Args:
        rule ([`AppendedFrames`]): How many there are.
        num_rows (`int`): Number of the rows.
    """

    name: ClassVar[str] = "appended frames"

    rule: AppendedFrames
    num_rows: int

    def select(self, rows: npt.ArrayLike) -> RowAppended:
        """Return those of some rows."""
        return replace(self, num_rows=np.size(rows))

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return their tokens of each row, `(n,)`, see [`ConditionRows.num_tokens`]."""
        return self.rule.num_tokens(samples, spec=spec)

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return those of text among them."""
        return self.rule.text_tokens(samples, spec=spec)

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return 0 for each row: the first sample of a stack decides how many all of them have."""
        return np.zeros(self.num_rows, np.int64)

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return 0 for each row, likewise."""
        return [0] * self.num_rows

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[tuple[Size, ...]]:
        """Return the sizes of the frames of each row."""
        targets = np.asarray(samples, np.int64).reshape(-1, 3)
        pairs = zip(targets.tolist(), self.rule.counts(targets, spec=spec).tolist(), strict=True)
        return [(Size(1, height, width),) * count for (_, height, width), count in pairs]
