"""References of the rows of a data set: the tokens that they take, and which rows can be stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.assignment import has_bucket
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from .references import Appended, ReferenceRule
from .row_audio import RowAudio

_COUNTED = 2**20
"""References whose grids are computed at once, so that those of 100 million rows fit in memory."""

_SIDE = 21
"""Bits of a side of a grid in the number that stands for it."""


class BucketParts(NamedTuple):
    """Buckets divided so that the rows of a part can be stacked: references and audio included, all have equal sizes.

    Attributes:
        ids (`int64`, shape `(n,)`): Part of each row, numbered from 0; rejected rows keep their bucket id.
        bucket_ids (`int64`, shape `(k,)`): Bucket of each part.
        beside_tokens (`int64`, shape `(k,)`): Tokens of the references and of the audio of a row of each part.
    """

    ids: IntArray
    bucket_ids: IntArray
    beside_tokens: IntArray

    def buckets_of(self, labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return labels of batches with the bucket in place of each part; other labels stay what they are."""
        buckets, of_part = labels.copy(), has_bucket(labels)
        buckets[of_part] = self.bucket_ids[labels[of_part]]
        return buckets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowReferences:
    """References of rows: their sizes as they are stored, and the rule of those in which they are shown.

    Args:
        rule ([`ReferenceRule`]): Rule of the sizes.
        stored (array of `int`, shape `(k, 3)`): Frames, height and width of one reference after another.
        offsets (array of `int`, shape `(n + 1,)`): References of row `i` are those from `offsets[i]` up to, and
            without, `offsets[i + 1]`.

    Example:
        >>> rows = RowReferences.of_lists([[1, 64, 64, 1, 32, 64], []], rule=ReferenceRule(multiples=(16, 16)))
        >>> spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
        >>> rows.num_tokens([[1, 64, 64], [1, 64, 64]], spec=spec).tolist()
        [24, 0]
    """

    rule: ReferenceRule
    stored: IntArray
    offsets: IntArray

    @classmethod
    def of_lists(cls, cells: Sequence[Sequence[int]], *, rule: ReferenceRule) -> RowReferences:
        """Return those of cells of the column [`REFERENCE_SIZES`][hf_bucketing.media.references.REFERENCE_SIZES]."""
        flat = np.array([side for cell in cells for side in cell], np.int64)
        offsets = np.cumsum([0, *(len(cell) // 3 for cell in cells)], dtype=np.int64)
        return cls(rule=rule, stored=flat.reshape(-1, 3), offsets=offsets)

    @property
    def counts(self) -> IntArray:
        """Number of references of each row, `(n,)`."""
        return np.diff(self.offsets)

    @property
    def _alone(self) -> npt.NDArray[np.bool_]:
        """Whether each reference is the only one of its row, `(k,)`."""
        return np.repeat(self.counts == 1, self.counts)

    def select(self, rows: npt.ArrayLike) -> RowReferences:
        """Return the references of some rows."""
        chosen = np.asarray(rows, np.int64)
        counts = self.counts[chosen]
        offsets = np.append(0, np.cumsum(counts))
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        stored = self.stored[np.repeat(self.offsets[chosen], counts) + inside]
        return replace(self, stored=stored, offsets=offsets)

    def sizes(self, samples: npt.ArrayLike) -> list[tuple[Size, ...]]:
        """Return the sizes in which the references of each row are shown; `samples` as in [`num_tokens`]."""
        targets = np.repeat(np.asarray(samples, np.int64).reshape(-1, 3), self.counts, axis=0)
        shown = self.rule.sizes(self.stored, targets, alone=self._alone).tolist()
        return [tuple(Size(*size) for size in shown[start:stop]) for start, stop in pairwise(self.offsets.tolist())]

    def most(self, size: Size, *, spec: LatentSpec) -> tuple[Size, ...]:
        """Return the sizes of the references of one row, those that take most tokens beside a sample of a size."""
        if not len(self.counts):
            return ()
        tokens = self.num_tokens(np.tile(size, (len(self.counts), 1)), spec=spec)
        return self.select([tokens.argmax()]).sizes([size])[0]

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of the references of each row, `(n,)`, with those of text and of appended frames.

        Args:
            samples (array of `int`, shape `(n, 3)`): Frames, height and width that each row's sample has in a batch;
                0 for rejected rows, whose references are not counted.
            spec ([`LatentSpec`]): Strides and patch of the model.
        """
        return self._sums(self._numbers(samples, spec), samples) + appended_tokens(self.rule, samples, spec=spec)

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return a number for each row, `(n,)`, equal where references have equal grids in the same order.

        0 stands for none. Arguments as in [`num_tokens`].
        """
        return self._signatures(self._numbers(samples, spec))

    def grid_keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return for each row a whole number of any length that spells the grids of its references, 0 for none.

        Unlike [`signatures`], it means the same for any rows; see [`tokens_of_key`]. Arguments as in [`num_tokens`].
        """
        numbers, keys = self._numbers(samples, spec).tolist(), []
        for start, stop in pairwise(self.offsets.tolist()):
            key = 0
            for number in numbers[start:stop]:
                key = key << 3 * _SIDE | number
            keys.append(key)
        return keys

    def _numbers(self, samples: npt.ArrayLike, spec: LatentSpec) -> IntArray:
        """Return a number for the token grid of each reference, `(k,)`."""
        targets = np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1)
        numbers = np.empty(len(self.stored), np.int64)
        of_reference, alone = np.repeat(np.arange(len(self.offsets) - 1), self.counts), self._alone
        for start in range(0, len(numbers), _COUNTED):
            some = slice(start, start + _COUNTED)
            shown = self.rule.sizes(self.stored[some], targets[of_reference[some]], alone=alone[some])
            t, h, w = spec.grid_of(*shown.T)
            numbers[some] = t << 2 * _SIDE | h << _SIDE | w
        return numbers

    def _sums(self, numbers: IntArray, samples: npt.ArrayLike) -> IntArray:
        """Return the tokens of each row's references, 0 for rows without a size."""
        before = np.append(0, np.cumsum(_sides(numbers).prod(1)))
        usable = np.asarray(samples, np.int64).reshape(-1, 3).min(1, initial=1) > 0
        tokens = (1 + self.rule.text_factor) * np.diff(before[self.offsets]) + self.counts * self.rule.text_tokens
        return np.where(usable, tokens, 0)

    def _signatures(self, numbers: IntArray) -> IntArray:
        """Number the lists of grids: those that begin alike are told apart by one grid after another."""
        grids = np.unique(numbers, return_inverse=True)[1].ravel() + 1
        found, counts = np.zeros(len(self.offsets) - 1, np.int64), self.counts
        for position in range(counts.max(initial=0)):
            rows = np.flatnonzero(counts > position)
            keys = found * (grids.max() + 1)
            keys[rows] += grids[self.offsets[rows] + position]
            found = np.unique(np.append(0, keys), return_inverse=True)[1].ravel()[1:]  # 0 stays that of none
        return found


def appending(references: RowReferences | None, frames: Appended, *, num_rows: int) -> RowReferences | None:
    """Return the references of rows, as they are counted in a run that appends frames to its samples.

    Args:
        references ([`RowReferences`], *optional*): References of the rows; None where they have none.
        frames ([`Appended`]): These frames.
        num_rows (`int`): Number of the rows.
    """
    if not frames.most:
        return references
    if references is None:
        nothing = np.zeros((0, 3), np.int64)
        references = RowReferences(rule=ReferenceRule(), stored=nothing, offsets=np.zeros(num_rows + 1, np.int64))
    return replace(references, rule=references.rule.appending(frames))


def appended_frames(rule: ReferenceRule, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
    """Return the most frames that are appended to samples `(n, 3)`, `(n,)`: 0 for images, and for rows without a size.

    Example:
        >>> spec = LatentSpec(temporal_stride=8, spatial_stride=32, patch=(1, 1, 1))
        >>> appended_frames(ReferenceRule(appended=2), [[25, 64, 64], [9, 64, 64], [1, 64, 64]], spec=spec).tolist()
        [2, 1, 0]
    """
    frames = np.asarray(samples, np.int64).reshape(-1, 3)[:, 0]
    most = np.maximum(frames - 1, 0) // spec.temporal_stride + (rule.appended_first & (frames > 1))
    return np.minimum(rule.appended, most)


def appended_tokens(rule: ReferenceRule, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
    """Return the tokens of the most frames that are appended to samples `(n, 3)`, `(n,)`; see [`appended_frames`].

    Those of text are among them.
    """
    _, height, width = spec.grid_of(*np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1).T)
    frames = appended_frames(rule, samples, spec=spec)
    return frames * height * width + appended_text_tokens(rule, samples, spec=spec)


def appended_text_tokens(rule: ReferenceRule, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
    """Return the tokens that these frames add to the texts of samples `(n, 3)`, `(n,)`."""
    frames = appended_frames(rule, samples, spec=spec)
    if rule.appended_text is None:
        return np.zeros_like(frames)
    _, height, width = spec.grid_of(*np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1).T)
    return frames * (height * width + rule.appended_text)


def _sides(numbers: IntArray) -> IntArray:
    """Return the grids `(k, 3)` that numbers stand for."""
    side = 2**_SIDE - 1
    return np.stack([numbers >> 2 * _SIDE, numbers >> _SIDE & side, numbers & side], 1)


def tokens_of_key(key: int, *, rule: ReferenceRule | None = None) -> int:
    """Return the tokens of the references that a key of [`RowReferences.grid_keys`] spells.

    With a rule, also those that each reference adds to the text of its sample.

    Example:
        >>> rows = RowReferences.of_lists([[1, 64, 64, 1, 32, 64]], rule=ReferenceRule(multiples=(16, 16)))
        >>> spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
        >>> [tokens_of_key(key) for key in rows.grid_keys([[1, 64, 64]], spec=spec)]
        [24]
    """
    numbers = []
    while key:
        numbers.append(key & (1 << 3 * _SIDE) - 1)
        key >>= 3 * _SIDE
    rule = rule or ReferenceRule()
    own = int(_sides(np.array(numbers, np.int64)).prod(1).sum())
    return (1 + rule.text_factor) * own + len(numbers) * rule.text_tokens


def bucket_parts(
    bucket_ids: npt.ArrayLike,
    *,
    table: BucketTable | OpenTable,
    spec: LatentSpec,
    references: RowReferences | None = None,
    audio: RowAudio | None = None,
) -> BucketParts:
    """Divide buckets by the grids of references and by the tokens of audio.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        table ([`BucketTable`] or [`OpenTable`]): Their table.
        spec ([`LatentSpec`]): Strides and patch of the model.
        references ([`RowReferences`], *optional*): References of the rows.
        audio ([`RowAudio`][hf_bucketing.media.row_audio.RowAudio], *optional*): Audio of the rows.
    """
    ids = np.asarray(bucket_ids, np.int64)
    usable, samples = has_bucket(ids), sample_sizes(ids, table)
    keys, tokens = ids.copy(), np.zeros_like(ids)
    if references is not None:
        signatures = references.signatures(samples, spec=spec)
        keys = keys * (signatures.max(initial=0) + 1) + signatures
        tokens += references.num_tokens(samples, spec=spec)
    if audio is not None:
        heard = audio.num_tokens(samples[:, 0])
        keys = keys * (heard.max(initial=0) + 1) + heard
        tokens += heard
    _, first, of_row = np.unique(keys[usable], return_index=True, return_inverse=True)
    parts = ids.copy()
    parts[usable] = of_row.ravel()
    return BucketParts(parts, ids[usable][first], tokens[usable][first])


def sample_sizes(bucket_ids: npt.ArrayLike, table: BucketTable | OpenTable) -> IntArray:
    """Return frames, height and width of the bucket of each row, `(n, 3)`; 0 for rejected rows."""
    ids, of_row = np.unique(np.asarray(bucket_ids, np.int64), return_inverse=True)
    sizes = [table.size(bucket) if bucket >= 0 else (0, 0, 0) for bucket in ids.tolist()]
    return np.array(sizes, np.int64).reshape(-1, 3)[of_row.ravel()]
