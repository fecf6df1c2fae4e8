"""References: pictures and videos of sizes of their own that a model is shown as further tokens of a sample."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.sizes import LatentSpec, Size
from ..errors import explains_arguments
from .audio import AUDIO_BITS
from .condition import Condition, Enters, condition_named, has_size
from .names import REFERENCE


class Lists(NamedTuple):
    """Lists of whole numbers, one for each row.

    Attributes:
        values (array of `int`, shape `(k,)`): Numbers of one list after another.
        counts (array of `int`, shape `(n,)`): Length of each list.
    """

    values: IntArray
    counts: IntArray

    @classmethod
    def of(cls, cells: Sequence[Sequence[int]]) -> Lists:
        """Return those of cells.

        Example:
            >>> [part.tolist() for part in Lists.of([[1, 2], [], [3]])]
            [[1, 2, 3], [2, 0, 1]]
        """
        counts = np.fromiter(map(len, cells), np.int64, len(cells))
        return cls(np.array([number for cell in cells for number in cell], np.int64), counts)


REFERENCE_SIZES = "reference_sizes"
"""Column of the sizes of each row's references as they are stored: frames, height and width of one after another."""

_ALWAYS = (
    "max_pixels",
    "downscale_factor",
    "short_side",
    "multiples",
    "least",
    "most",
    "in_front",
    "text_tokens",
    "text_factor",
    "min_side",
    "max_ratio",
    "pictures_only",
)
"""Fields that rules have in the text by which locks and states know them, in its order."""

_ADDED = ("area", "shapes", "cropped", "alone_pixels", "as_stored", "resample")
"""Fields that were added when data sets had been prepared with the others."""

_FRAMES = {"appended": 0, "appended_first": False, "appended_text": None}
"""Fields of frames that a run appends, which rules of earlier releases had, as data sets have them."""

_COUNTED = 2**20
"""References whose grids are computed at once, so that those of 100 million rows fit in memory."""

_SIDE = 21
"""Bits of a side of a grid in the number that stands for it."""


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRule(Condition):
    """Say how many references a sample may have, which ones, and where they enter the model.

    By default there may be any number of them, and each is a grid of tokens of its own. As a latent frame in front of
    its sample, a reference has the tokens of a frame of the sample, whatever its own size. All other arguments are
    those of [`Condition`][hf_bucketing.conditions.condition.Condition].
    """

    name: str = REFERENCE
    enters: Enters = "tokens"
    most: int = sys.maxsize

    columns: ClassVar[tuple[str, ...]] = (REFERENCE_SIZES,)

    @property
    def setting(self) -> str:
        """Name under which states of streams hold the rule."""
        return "references"

    def __repr__(self) -> str:
        """Return the rule as locks of data sets and states of streams hold it, whatever release wrote them.

        Fields that rules had not always are omitted where they have their defaults; those of frames that a run
        appends were a part of rules.
        """
        values = {**{name: getattr(self, name) for name in _ALWAYS}, **_FRAMES, **self.added}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def in_front(self) -> bool:
        """Whether references are latent frames in front of their sample."""
        return self.enters == "latent frames"

    @property
    def settings(self) -> dict[str, Any]:
        """What manifests of prepared folders hold of the rule."""
        return {name: getattr(self, name) for name in (*_ALWAYS, *_ADDED)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> ReferenceRule:
        """Return the rule of a manifest; those of earlier releases also held the frames that runs append: none."""
        values = {name: value for name, value in settings.items() if name not in _FRAMES}
        in_front = values.pop("in_front", False)
        return cls(**values, enters="latent frames" if in_front else "tokens")

    @property
    def added(self) -> dict[str, Any]:
        """Fields that rules had not always, with their values, where these are not the defaults."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: values[name][0] for name in _ADDED if values[name][0] != values[name][1]}

    def entering(self, model: ReferenceRule) -> ReferenceRule:
        """Return this rule for references that enter a model, and add to its text, as those of another rule."""
        return replace(self, enters=model.enters, text_tokens=model.text_tokens, text_factor=model.text_factor)

    @property
    def counted(self) -> ReferenceRule:
        """Rule of the sizes by which tokens are counted: those that are shown, or in front of a sample its own."""
        return replace(self, short_side=None).within(None, 1) if self.in_front else self

    def fault(self, count: int) -> str:
        """Return why a sample with as many references cannot be trained, `""` if it can.

        Example:
            >>> ReferenceRule(most=1).fault(2)
            'It has 2 references, but the model takes at most 1'
        """
        if self.least <= count <= self.most:
            return ""
        takes = f"at most {self.most}" if self.most else "none"
        wanted = f"takes {takes}" if count > self.most else f"needs {self.least}"
        return f"It has {count or 'no'} reference{'' if count == 1 else 's'}, but the model {wanted}"

    def shape_fault(self, height: int, width: int) -> str:
        """Return why the model takes no reference of a size in pixels, `""` if it does.

        Example:
            >>> ReferenceRule(min_side=64).shape_fault(40, 80)
            '80×40 pixels; the model takes references of at least 64 a side'
        """
        shorter, longer = sorted((height, width))
        if shorter < self.min_side:
            return f"{width}×{height} pixels; the model takes references of at least {self.min_side} a side"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return f"{width}×{height} pixels; the model takes references up to {self.max_ratio:g} to 1"
        return ""

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> RowReferences:
        """Return the references of rows by their columns, as this rule shows them."""
        cells = columns[REFERENCE_SIZES]
        lists = cells if isinstance(cells, Lists) else Lists.of(cells)
        offsets = np.append(0, np.cumsum(lists.counts // 3))
        return RowReferences(rule=self, stored=lists.values.reshape(-1, 3), offsets=offsets)

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return the tokens of the references that a key of [`RowReferences.keys`] spells, with those of text.

        Example:
            >>> rule = ReferenceRule(multiples=(16, 16))
            >>> spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
            >>> (key,) = RowReferences.of_lists([[1, 64, 64, 1, 32, 64]], rule=rule).keys([[1, 64, 64]], spec=spec)
            >>> rule.tokens_of_key(key, Size(1, 64, 64), spec=spec)
            24
        """
        numbers, key = [], key >> AUDIO_BITS
        while key:
            numbers.append(key & (1 << 3 * _SIDE) - 1)
            key >>= 3 * _SIDE
        tokens = int(_sides(np.array(numbers, np.int64)).prod(1).sum())
        return (1 + self.text_factor) * tokens + len(numbers) * self.text_tokens


def references_of(conditions: Iterable[Condition]) -> ReferenceRule:
    """Return the condition of references among those that a model takes; one of none where it takes none."""
    declared = condition_named(conditions, REFERENCE)
    return declared if isinstance(declared, ReferenceRule) else ReferenceRule(most=0)


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

    name: ClassVar[str] = "reference"

    rule: ReferenceRule
    stored: IntArray
    offsets: IntArray

    @classmethod
    def of_lists(cls, cells: Sequence[Sequence[int]], *, rule: ReferenceRule) -> RowReferences:
        """Return those of cells of the column [`REFERENCE_SIZES`]."""
        return rule.rows({REFERENCE_SIZES: cells}, num_rows=len(cells))

    @classmethod
    def none(cls, num_rows: int) -> RowReferences:
        """Return those of rows that have none, which take no memory until they are read."""
        nothing = np.zeros((0, 3), np.int64)
        return cls(rule=ReferenceRule(), stored=nothing, offsets=np.zeros(num_rows + 1, np.int64))

    @property
    def num_rows(self) -> int:
        """Number of the rows."""
        return len(self.offsets) - 1

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

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec | None = None) -> list[tuple[Size, ...]]:
        """Return the sizes in which the references of each row are shown; `samples` as in [`num_tokens`]."""
        targets = np.repeat(np.asarray(samples, np.int64).reshape(-1, 3), self.counts, axis=0)
        sizes = self.rule.sizes(self.stored, targets, alone=self._alone).tolist()
        return [tuple(Size(*size) for size in sizes[start:stop]) for start, stop in pairwise(self.offsets.tolist())]

    def most(self, size: Size, *, spec: LatentSpec) -> tuple[Size, ...]:
        """Return the sizes of the references of one row, those that take most tokens beside a sample of a size."""
        if not len(self.stored):
            return ()
        tokens = self.num_tokens(np.tile(size, (len(self.counts), 1)), spec=spec)
        return self.select([tokens.argmax()]).sizes([size])[0]

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of the references of each row, `(n,)`, with those of text.

        Args:
            samples (array of `int`, shape `(n, 3)`): Frames, height and width that each row's sample has in a batch;
                0 for rejected rows, whose references are not counted.
            spec ([`LatentSpec`]): Strides and patch of the model.
        """
        return self._reference_tokens(samples, spec) + self.text_tokens(samples, spec=spec)

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens that they add to the text of each row, `(n,)`; arguments as in [`num_tokens`]."""
        from_tokens = self.rule.text_factor * self._reference_tokens(samples, spec) if self.rule.text_factor else 0
        return from_tokens + np.where(has_size(samples), self.counts * self.rule.text_tokens, 0)

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return a number for each row, `(n,)`, equal where references have equal grids in the same order.

        0 stands for none. Arguments as in [`num_tokens`].
        """
        return self._signatures(self._numbers(samples, spec))

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return for each row a whole number of any length that spells the grids of its references, 0 for none.

        Unlike [`signatures`], it means the same for any rows; see [`ReferenceRule.tokens_of_key`]. Arguments as in
        [`num_tokens`].
        """
        numbers, keys = self._numbers(samples, spec).tolist(), []
        for start, stop in pairwise(self.offsets.tolist()):
            key = 0
            for number in numbers[start:stop]:
                key = key << 3 * _SIDE | number
            keys.append(key << AUDIO_BITS)
        return keys

    def _numbers(self, samples: npt.ArrayLike, spec: LatentSpec) -> IntArray:
        """Return a number for the token grid of each reference, `(k,)`."""
        targets = np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1)
        numbers = np.empty(len(self.stored), np.int64)
        of_reference, alone = np.repeat(np.arange(len(self.offsets) - 1), self.counts), self._alone
        for start in range(0, len(numbers), _COUNTED):
            some = slice(start, start + _COUNTED)
            sizes = self.rule.sizes(self.stored[some], targets[of_reference[some]], alone=alone[some])
            t, h, w = spec.grid_of(*sizes.T)
            numbers[some] = t << 2 * _SIDE | h << _SIDE | w
        return numbers

    def _reference_tokens(self, samples: npt.ArrayLike, spec: LatentSpec) -> IntArray:
        """Return the tokens of each row's references themselves, 0 for rows without a size."""
        before = np.append(0, np.cumsum(_sides(self._numbers(samples, spec)).prod(1)))
        return np.where(has_size(samples), np.diff(before[self.offsets]), 0)

    def _signatures(self, numbers: IntArray) -> IntArray:
        """Number the lists of grids: those that begin alike are told apart by one grid after another."""
        grids = np.unique(numbers, return_inverse=True)[1].ravel() + 1
        signatures, counts = np.zeros(len(self.offsets) - 1, np.int64), self.counts
        for position in range(counts.max(initial=0)):
            rows = np.flatnonzero(counts > position)
            keys = signatures * (grids.max() + 1)
            keys[rows] += grids[self.offsets[rows] + position]
            signatures = np.unique(np.append(0, keys), return_inverse=True)[1].ravel()[1:]  # 0 stays that of none
        return signatures


def _sides(numbers: IntArray) -> IntArray:
    """Return the grids `(k, 3)` that numbers stand for."""
    side = 2**_SIDE - 1
    return np.stack([numbers >> 2 * _SIDE, numbers >> _SIDE & side, numbers & side], 1)
