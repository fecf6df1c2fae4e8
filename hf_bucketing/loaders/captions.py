"""The caption of a sample in an epoch: one of several, with its tags in random order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BucketingError, ColumnError
from ..randomness import ROW, Purpose
from ..settings import check_at_least, not_default
from .occurrences import occurrence_of, row_generator


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRule:
    """Choose the caption of each sample.

    Of a row that has several captions, one is drawn in every epoch. Draws depend on the seed, the epoch, the row's
    `index` and its occurrence (see [`NumberedRows`][hf_bucketing.loaders.NumberedRows]) alone.

    Args:
        shuffle_tags (`bool`): Whether the tags of a caption are put into a random order, anew in every epoch.
        tag_separator (`str`): Text between two tags; blanks beside it belong to it.
        keep_tags (`int`): Number of tags at the beginning of a caption that keep their places.

    Raises:
        BucketingError: If the separator is blank, the number is negative, or either has no effect.
    """

    shuffle_tags: bool = False
    tag_separator: str = ","
    keep_tags: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, self, "keep_tags")
        if not self.tag_separator.strip():
            raise BucketingError(f"`tag_separator` must hold a character such as a comma, got {self.tag_separator!r}.")
        if not self.shuffle_tags and (unused := not_default(self, "tag_separator", "keep_tags")):
            raise BucketingError(f"Omit `{unused[0]}`: no effect without `shuffle_tags`.")

    def caption(self, row: Mapping[str, Any], column: str, *, seed: int | None, epoch: int) -> str:
        """Return the caption of a row.

        Args:
            row (mapping): Row with the column, a text or a list of texts, and an `index` where something is drawn.
            column (`str`): Caption column.
            seed (`int`, *optional*): Seed of the draws; without one they follow torch's random state.
            epoch (`int`): Epoch of the draws.

        Raises:
            ColumnError: If the caption is neither, or `index` is missing.
        """
        text = texts_of(row, column)[drawn_caption(row, column, seed=seed, epoch=epoch)]
        if not self.shuffle_tags:
            return text
        tags = [tag.strip() for tag in text.split(self.tag_separator)]
        kept, others = tags[: self.keep_tags], tags[self.keep_tags :]
        order = _generator(Purpose.TAG_ORDER, row, seed=seed, epoch=epoch).permutation(len(others))
        between = self.tag_separator if self.tag_separator.endswith(" ") else f"{self.tag_separator} "
        return between.join([*kept, *(others[position] for position in order)])


def drawn_caption(row: Mapping[str, Any], column: str, *, seed: int | None, epoch: int) -> int:
    """Return the position of the caption that a row has in an epoch; arguments and errors as in [`CaptionRule`]."""
    count = len(texts_of(row, column))
    return int(_generator(Purpose.CAPTION, row, seed=seed, epoch=epoch).integers(count)) if count > 1 else 0


def texts_of(row: Mapping[str, Any], column: str) -> Sequence[str]:
    """Return the captions of a row, one or more.

    Raises:
        ColumnError: If the cell is neither a text nor a list of texts.
    """
    cell = row[column]
    texts = [cell] if isinstance(cell, str) else cell
    valid = isinstance(texts, (list, tuple, np.ndarray)) and all(isinstance(text, str) for text in texts)
    if not valid or not len(texts):
        name = f"row {row[ROW]}" if ROW in row else "a row"
        raise ColumnError(
            f"The caption of {name} (column {column}) must be a text or a list of texts, got {cell!r}; check_captions "
            "makes texts of a column."
        )
    return texts


def _generator(purpose: Purpose, row: Mapping[str, Any], *, seed: int | None, epoch: int) -> np.random.Generator:
    return row_generator(purpose, row, seed=seed, epoch=epoch, occurrence=occurrence_of(row))
