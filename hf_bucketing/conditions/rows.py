"""All conditions of rows as one value: the tokens that they take, which rows can be stacked, and buckets by that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.assignment import has_bucket
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .appended import NO_FRAMES, AppendedFrames, RowAppended
from .audio import AudioRule, RowAudio
from .condition import Condition, token_conditions
from .names import REFERENCE
from .references import ReferenceRule, RowReferences

Rule = TypeVar("Rule")


class ConditionRule(Protocol):
    """How one condition is counted beside a sample."""

    @property
    def setting(self) -> str:
        """Name under which states of streams hold the rule."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a data set by which it is counted."""

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> ConditionRows:
        """Return it of `num_rows` rows by these columns: sequences of cells, or [`Lists`] for cells that are lists."""

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return its tokens beside a sample of a size, by the key of [`RowConditions.keys`]."""


class ConditionRows(Protocol):
    """One condition of rows."""

    @property
    def name(self) -> str:
        """Name of the condition."""

    @property
    def num_rows(self) -> int:
        """Number of the rows."""

    def select(self, rows: npt.ArrayLike) -> ConditionRows:
        """Return it of some rows."""

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return its tokens of each row, `(n,)`, with those that it adds to text.

        Args:
            samples (array of `int`, shape `(n, 3)`): Frames, height and width that each row's sample has in a batch;
                0 for rejected rows, whose conditions are not counted.
            spec ([`LatentSpec`]): Strides and patch of the model.
        """

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens among these that it adds to the text of each row, `(n,)`."""

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return a number for each row, `(n,)`, equal among these rows where they can be stacked; 0 for none."""

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> Sequence[int]:
        """Return a whole number for each row, equal for any rows that can be stacked, in bits of its own.

        The lowest [`AUDIO_BITS`] are those of audio; all above them are those of references.
        """

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[tuple[Size, ...]]:
        """Return the sizes of what it adds to the latents of each row as further grids of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRules:
    """How the conditions of a data set are counted in a run.

    Args:
        rules (`tuple` of [`ConditionRule`]): Rules of those that add tokens to a sample, in the order in which they
            stand behind it; none where no condition does.
    """

    rules: tuple[ConditionRule, ...] = ()

    @classmethod
    def of(
        cls,
        conditions: Collection[str],
        *,
        references: ReferenceRule,
        audio: AudioRule | None = None,
        appended: AppendedFrames = NO_FRAMES,
        taken: Iterable[Condition] = (),
    ) -> ConditionRules:
        """Return the rules of what samples have: references if they are among the names of conditions, and so on.

        Args:
            conditions (collection of `str`): Names of the data set's conditions.
            references ([`ReferenceRule`]): Rule of references.
            audio ([`AudioRule`], *optional*): Rule of audio; None where samples have none.
            appended ([`AppendedFrames`]): Frames that a run appends.
            taken (iterable of [`Condition`]): All that a model takes, for those that it takes as tokens.
        """
        rules: list[ConditionRule] = [references.counted] if REFERENCE in conditions else []
        rules += [appended] if appended.most else []
        rules += token_conditions(taken, conditions)
        rules += [] if audio is None else [audio]
        return cls(rules=tuple(rules))

    def __bool__(self) -> bool:
        """Return whether any condition is counted."""
        return bool(self.rules)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a data set by which conditions are counted, each once."""
        return tuple(dict.fromkeys(column for rule in self.rules for column in rule.columns))

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> RowConditions:
        """Return the conditions of rows by these columns, see [`ConditionRule.rows`]."""
        rows = tuple(rule.rows(columns, num_rows=num_rows) for rule in self.rules)
        return RowConditions(num_rows=num_rows, rows=rows)

    def rule_of(self, kind: type[Rule]) -> Rule | None:
        """Return the rule of a kind; None where there is none."""
        return next((rule for rule in self.rules if isinstance(rule, kind)), None)

    def settings(self) -> dict[str, object]:
        """Return the rules by the names under which states of streams hold them."""
        return {rule.setting: rule for rule in self.rules}

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return the tokens of all conditions beside a sample of a size, by a key of [`RowConditions.keys`]."""
        return sum(rule.tokens_of_key(key, size, spec=spec) for rule in self.rules)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowConditions:
    """All conditions of rows that add tokens to a sample.

    Without conditions, all numbers are 0.

    Args:
        num_rows (`int`): Number of the rows.
        rows (`tuple` of [`ConditionRows`]): Their conditions.

    Raises:
        BucketingError: If a condition is that of another number of rows.

    Example:
        >>> rules = ConditionRules.of(["reference"], references=ReferenceRule(multiples=(16, 16)))
        >>> rows = rules.rows({"reference_sizes": [[1, 64, 64, 1, 32, 64], []]}, num_rows=2)
        >>> spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
        >>> rows.num_tokens([[1, 64, 64], [1, 64, 64]], spec=spec).tolist()
        [24, 0]
    """

    num_rows: int
    rows: tuple[ConditionRows, ...] = ()

    def __post_init__(self) -> None:
        for rows in self.rows:
            if rows.num_rows != self.num_rows:
                raise BucketingError(
                    f"`{rows.name}` conditions are those of {rows.num_rows} rows, but others of {self.num_rows}."
                )

    @classmethod
    def of(cls, *rows: ConditionRows) -> RowConditions:
        """Return the value of one or more conditions of the same rows.

        Raises:
            BucketingError: If they are those of other numbers of rows.
        """
        return cls(num_rows=rows[0].num_rows, rows=rows)

    def __bool__(self) -> bool:
        """Return whether any condition is counted."""
        return bool(self.rows)

    @property
    def references(self) -> RowReferences:
        """Their references; none of any row where samples have none."""
        references = [rows for rows in self.rows if isinstance(rows, RowReferences)]
        return references[0] if references else RowReferences.none(self.num_rows)

    @property
    def audio(self) -> RowAudio | None:
        """Their audio; None where none is trained."""
        return next((rows for rows in self.rows if isinstance(rows, RowAudio)), None)

    @property
    def without_audio(self) -> RowConditions:
        """Those that stand in the sequence of a sample's video."""
        return replace(self, rows=tuple(rows for rows in self.rows if not isinstance(rows, RowAudio)))

    @property
    def appended(self) -> AppendedFrames:
        """Frames that a run appends to them."""
        return next((rows.rule for rows in self.rows if isinstance(rows, RowAppended)), NO_FRAMES)

    def appending(self, frames: AppendedFrames) -> RowConditions:
        """Return these conditions as a run counts them that appends frames to its samples."""
        others = [rows for rows in self.rows if not isinstance(rows, RowAppended)]
        appended = [RowAppended(rule=frames, num_rows=self.num_rows)] if frames.most else []
        return replace(self, rows=(*others, *appended))

    def select(self, rows: npt.ArrayLike) -> RowConditions:
        """Return the conditions of some rows."""
        return replace(self, num_rows=np.size(rows), rows=tuple(part.select(rows) for part in self.rows))

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of all conditions of each row, `(n,)`, see [`ConditionRows.num_tokens`]."""
        tokens = np.zeros(self.num_rows, np.int64)
        for rows in self.rows:
            tokens += rows.num_tokens(samples, spec=spec)
        return tokens

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens among these that conditions add to the text of each row, `(n,)`."""
        tokens = np.zeros(self.num_rows, np.int64)
        for rows in self.rows:
            tokens += rows.text_tokens(samples, spec=spec)
        return tokens

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[IntArray]:
        """Return for each condition [`ConditionRows.signatures`], all of which are equal where rows can be stacked."""
        return [rows.signatures(samples, spec=spec) for rows in self.rows]

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return a whole number of any length for each row, equal for any rows that can be stacked; 0 for none."""
        keys = [0] * self.num_rows
        for rows in self.rows:
            keys = [key | of_rows for key, of_rows in zip(keys, rows.keys(samples, spec=spec), strict=True)]
        return keys

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[tuple[Size, ...]]:
        """Return the sizes of what stands behind the latents of each row as further grids of tokens."""
        sizes: list[tuple[Size, ...]] = [()] * self.num_rows
        for rows in self.rows:
            sizes = [(*before, *more) for before, more in zip(sizes, rows.sizes(samples, spec=spec), strict=True)]
        return sizes

    def most(self, size: Size, *, spec: LatentSpec) -> RowConditions:
        """Return the conditions of one row, those that take most tokens beside a sample of a size."""
        tokens = self.num_tokens(np.tile(size, (self.num_rows, 1)), spec=spec)
        return self.select([tokens.argmax()])

    def shares(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> dict[str, int]:
        """Return the tokens of each condition in all rows, by its name."""
        return {rows.name: int(rows.num_tokens(samples, spec=spec).sum()) for rows in self.rows}

    def audio_tokens(self, samples: npt.ArrayLike) -> list[int]:
        """Return the tokens of the audio of each row, a sequence of its own; none where none is trained."""
        return [] if self.audio is None else self.audio.num_tokens(samples).tolist()


class BucketParts(NamedTuple):
    """Buckets divided so that the rows of a part can be stacked: conditions included, all have equal sizes.

    Attributes:
        ids (`int64`, shape `(n,)`): Part of each row, numbered from 0; rejected rows keep their bucket id.
        bucket_ids (`int64`, shape `(k,)`): Bucket of each part.
        condition_tokens (`int64`, shape `(k,)`): Tokens of the conditions of a row of each part.
    """

    ids: IntArray
    bucket_ids: IntArray
    condition_tokens: IntArray

    def buckets_of(self, labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return labels of batches with the bucket in place of each part; other labels stay what they are."""
        buckets, of_part = labels.copy(), has_bucket(labels)
        buckets[of_part] = self.bucket_ids[labels[of_part]]
        return buckets


def bucket_parts(
    bucket_ids: npt.ArrayLike, conditions: RowConditions, *, table: BucketTable | OpenTable, spec: LatentSpec
) -> BucketParts:
    """Divide buckets by the sizes of the conditions of their rows.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        conditions ([`RowConditions`]): Conditions of the rows.
        table ([`BucketTable`] or [`OpenTable`]): Their table.
        spec ([`LatentSpec`]): Strides and patch of the model.
    """
    ids = np.asarray(bucket_ids, np.int64)
    usable, samples = has_bucket(ids), sample_sizes(ids, table)
    keys = ids
    for signatures in conditions.signatures(samples, spec=spec):
        keys = keys * (signatures.max(initial=0) + 1) + signatures
    tokens = conditions.num_tokens(samples, spec=spec)
    _, first, of_row = np.unique(keys[usable], return_index=True, return_inverse=True)
    parts = ids.copy()
    parts[usable] = of_row.ravel()
    return BucketParts(parts, ids[usable][first], tokens[usable][first])


def tokens_with(
    conditions: RowConditions,
    tokens: IntArray,
    bucket_ids: npt.ArrayLike,
    *,
    table: BucketTable | OpenTable,
    spec: LatentSpec,
) -> IntArray:
    """Return tokens of rows with those of their conditions, `(n,)`; the same array where there are no conditions.

    Args:
        conditions ([`RowConditions`]): Conditions of the rows.
        tokens (array of `int`, shape `(n,)`): Tokens of the samples themselves.
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        table ([`BucketTable`] or [`OpenTable`]): Their table.
        spec ([`LatentSpec`]): Strides and patch of the model.
    """
    return tokens + conditions.num_tokens(sample_sizes(bucket_ids, table), spec=spec) if conditions else tokens


def sample_sizes(bucket_ids: npt.ArrayLike, table: BucketTable | OpenTable) -> IntArray:
    """Return frames, height and width of the bucket of each row, `(n, 3)`; 0 for rejected rows."""
    ids, of_row = np.unique(np.asarray(bucket_ids, np.int64), return_inverse=True)
    sizes = [table.size(bucket) if bucket >= 0 else (0, 0, 0) for bucket in ids.tolist()]
    return np.array(sizes, np.int64).reshape(-1, 3)[of_row.ravel()]
