"""Number the occurrences of a row in an epoch, so that each has random draws of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ColumnError
from ..randomness import ADD_ROWS, ROW, Purpose, generator, sample_key

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

OCCURRENCE = "occurrence_in_epoch"
"""Cell of a row and list of a batch: how often the epoch held the row before, on all processes together."""


class RepeatedRow(int):
    """Row number that a sampler yields where the epoch held the row before; it is used like any `int`.

    Args:
        row (`int`): Row of the data set.
        occurrence (`int`): How often the epoch held the row before, at least 1.
    """

    occurrence: int

    def __new__(cls, row: int, occurrence: int) -> RepeatedRow:
        number = super().__new__(cls, row)
        number.occurrence = occurrence
        return number

    def __reduce__(self) -> tuple[type[RepeatedRow], tuple[int, int]]:  # for the queue of a worker
        return RepeatedRow, (int(self), self.occurrence)


class NumberedRows:
    """Rows of a data set, each with the number of its earlier occurrences in the epoch.

    Give it to a `DataLoader` in place of the data set where rows occur several times in an epoch, by `weights` or
    `remainder="repeat"` of a sampler. The collators of this package then draw the view and the caption of each
    occurrence anew, and the batch has the list `occurrence_in_epoch` for draws of the training step. Without it, all
    occurrences in an epoch have the draws of the first.

    Args:
        dataset (`Dataset`): Data set with rows of cells by name.

    Example:
        >>> from datasets import Dataset
        >>> rows = NumberedRows(Dataset.from_dict({"caption": ["a", "b"]}))
        >>> rows.__getitems__([1, RepeatedRow(1, 2)])
        [{'caption': 'b', 'occurrence_in_epoch': 0}, {'caption': 'b', 'occurrence_in_epoch': 2}]
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a row."""
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of a batch, which torch asks for together."""
        cells = self.dataset.__getitems__([int(row) for row in rows])
        return [{**cell, OCCURRENCE: getattr(row, "occurrence", 0)} for row, cell in zip(rows, cells, strict=True)]


def occurrence_of(row: Mapping[str, Any]) -> int:
    """Return how often the epoch held a row before; 0 where nothing counts it."""
    return int(row.get(OCCURRENCE, 0))


def row_generator(
    purpose: Purpose, row: Mapping[str, Any], *, seed: int | None, epoch: int, occurrence: int = 0
) -> np.random.Generator:
    """Return the generator of a draw for a row.

    Args:
        purpose ([`Purpose`][hf_bucketing.randomness.Purpose]): What is drawn.
        row (mapping): Row with the column `hf_bucketing_row`, unless there is no seed.
        seed (`int`, *optional*): Seed of the draws; without one they follow torch's random state.
        epoch (`int`): Epoch of the draw.
        occurrence (`int`): How often the epoch held the row before.

    Raises:
        ColumnError: If this column is missing.
    """
    if seed is None:
        import torch  # its state makes these draws; the settings of captions need no torch

        return generator(purpose, int(torch.randint(2**62, ())))
    if ROW not in row:
        raise ColumnError(
            f"Captions and cached views are drawn by the number of a row, but there is no column {ROW}; {ADD_ROWS}."
        )
    return generator(purpose, *sample_key(seed=seed, epoch=epoch, index=int(row[ROW]), occurrence=occurrence))
