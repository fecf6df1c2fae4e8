"""Names of columns that preparing reads without being asked, or makes, and what is said of those of a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..conditions.audio import HAS_AUDIO
from ..conditions.references import REFERENCE_SIZES
from ..media.rows import CLIP_END, CLIP_START, REGULARIZATION
from ..randomness import COLUMN_PREFIX
from .buckets import BucketColumns
from .clips import SCENE_END, SCENE_START
from .layouts import CAPTION_COLUMNS, MEDIA_COLUMNS
from .metadata import SIZES, MediaMetadata

_LISTED = 12
"""Columns without effect that are named."""


class Convention(NamedTuple):
    """Columns that have an effect by their names.

    Attributes:
        columns: Names of the columns, or beginnings of names that end with `*`.
        effect: What is done with them.
        instead: How another column is chosen, or none.
    """

    columns: tuple[str, ...]
    effect: str
    instead: str


CONVENTIONS = (
    Convention(MEDIA_COLUMNS, "media, unless a column has the type `Image` or `Video`", "`--media_column`"),
    Convention(CAPTION_COLUMNS, "captions", "`--caption_column`"),
    Convention(
        SIZES,
        "sizes, where all rows have one and the headers of a sample of files agree; otherwise replaced",
        "`--size_columns`, or `--sizes_from headers`",
    ),
    Convention((REGULARIZATION,), "marks of regularization samples", "`--ignore_columns`"),
    Convention((CLIP_START, CLIP_END), "seconds of its file at which a row begins and ends", "`--ignore_columns`"),
    Convention((SCENE_START, SCENE_END), "seconds of scenes, with `--clips scenes` alone", "another `--clips`"),
    Convention(
        BucketColumns.output_columns,
        "refused, as preparing makes them",
        "`--overwrite`, or `--ignore_columns`",
    ),
    Convention(
        (MediaMetadata.output_columns[-1], HAS_AUDIO, REFERENCE_SIZES),
        "replaced where preparing makes them",
        "rename them",
    ),
    Convention((f"{COLUMN_PREFIX}*",), "refused, as preparing makes columns of such names", "`--ignore_columns`"),
)
"""All columns that have an effect by their names alone, in the order of the documentation."""


def describe_columns(names: Sequence[str], read: Mapping[str, str]) -> str:
    """Return a sentence on the columns of a data set: those that are read, and for what, and those without effect.

    Args:
        names (sequence of `str`): Columns as they were loaded.
        read (mapping of `str` to `str`): What each column that is read is taken for.

    Example:
        >>> describe_columns(["file_name", "text", "weight"], {"file_name": "media", "text": "captions"})
        'Columns read: file_name as media, text as captions. Others have no effect: weight.'
    """
    said = "Columns read: " + ", ".join(f"{column} as {what}" for column, what in read.items()) + "."
    parents = {column.partition(".")[0] for column in read}
    others = [name for name in names if name not in read and name not in parents]
    if not others:
        return said
    more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
    return f"{said} Others have no effect: {', '.join(others[:_LISTED])}{more}."
