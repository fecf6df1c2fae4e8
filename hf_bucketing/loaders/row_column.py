"""The column that a sampler was made from: compared with that of its loader's rows, and which rows are never drawn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from datasets.arrow_dataset import Column
from torch.utils.data import Subset

from ..buckets.arrays import BoolArray, column_values, stored_column
from ..buckets.assignment import count_rejections
from ..errors import PlanError
from .occurrences import NumberedRows
from .processes import process_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumn:
    """A number of each row, and the name of its column in the data set of the loader.

    Args:
        name (`str`): Name of the column.
        values (array, shape `(n,)`): Numbers that the sampler plans with; rows of 0 or less, of bucket ids below 0,
            are never drawn.
        must_equal (`bool`): Whether the rows that are drawn must have exactly these numbers. If not, as where other
            tokens were added to a column, only the same numbers in another order are refused.
    """

    name: str
    values: npt.NDArray[Any]
    must_equal: bool

    def check(self, dataset: Any, *, drawn: npt.NDArray[np.bool_]) -> None:
        """Raise PlanError if a data set has other numbers in this column, such as those of shuffled rows.

        Rows that are not those of a `datasets.Dataset`, or lack the column, are not compared.

        Args:
            dataset (data set): Rows of the loader, as many as values.
            drawn (array of `bool`, shape `(n,)`): Whether a row may be drawn.
        """
        present = _column_of(dataset, self.name)
        if present is None:
            return
        wrong = np.flatnonzero(drawn & (present != self.values))
        if not len(wrong) or not (self.must_equal or _rearranged(present, self.values)):
            return
        row = wrong[0]
        raise PlanError(
            f"Row {row} of the loader's data set has {self.name} {present[row]}, but the sampler was made with "
            f"{self.values[row]} ({len(wrong):,} rows differ): rows were shuffled, sorted or changed after it was "
            f'made, or it was made from another column. Make it from ds["{self.name}"] of the loader\'s data set.'
        )


def column_name(values: Any) -> str | None:
    """Return the name of a column of a `datasets.Dataset`; None for other values."""
    return values.column_name if isinstance(values, Column) and isinstance(values.source, Dataset) else None


def refuse_bucket_ids(values: Any, *, argument: str) -> None:
    """Raise PlanError if the numbers that an argument needs are a column of bucket ids, by its mark."""
    mark = getattr(values.features, "id", None) if isinstance(values, Column) else None
    if mark is not None:
        raise PlanError(
            f"`{argument}` got the column {values.column_name}, which holds {mark}; give the column of tokens or "
            'lengths, such as ds["num_tokens"].'
        )


def _column_of(dataset: Any, name: str) -> npt.NDArray[Any] | None:
    """Return the stored numbers of a column, also through wrappers that choose rows; None if there is none."""
    if isinstance(dataset, NumberedRows):
        return _column_of(dataset.dataset, name)
    if isinstance(dataset, Subset):
        of_all = _column_of(dataset.dataset, name)
        return None if of_all is None else of_all[np.asarray(dataset.indices, np.int64)]
    if not isinstance(dataset, Dataset) or name not in dataset.column_names:
        return None
    column: npt.NDArray[Any] = stored_column(dataset, name).to_numpy()
    return column


def _rearranged(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> bool:
    """Return whether two arrays hold the same numbers, in whatever order."""
    return (
        first.dtype.kind in "iuf" and first.sum() == second.sum() and np.array_equal(np.sort(first), np.sort(second))
    )


logger = logging.getLogger(__name__)


def warn_of_rejected(
    rows: Any,
    usable: BoolArray,
    *,
    rejection: npt.ArrayLike | None = None,
    process_index: int | None = None,
) -> None:
    """Log from the main process how many rows a sampler never draws because they were rejected, and why.

    The reasons are `rejection`, or the `rejection` column of the data set that the column `rows` belongs to.

    Raises:
        PlanError: If `rejection` does not have one value per row.
    """
    if rejection is None and isinstance(rows, Column) and isinstance(rows.source, Dataset):
        rejection = rows.source["rejection"] if "rejection" in rows.source.column_names else None
    if rejection is not None and isinstance(rejection, Sequence | np.ndarray) and len(rejection) != len(usable):
        raise PlanError(f"`rejection` needs one value per row: expected {len(usable)}, got {len(rejection)}.")
    rejected = np.flatnonzero(~usable)
    main = (process_rank() if process_index is None else process_index) in (None, 0)
    if not len(rejected) or not main:
        return
    if rejection is None:
        why = 'pass rejection=dataset["rejection"] to see why'
    else:
        counts = count_rejections(column_values(rejection)[rejected])
        why = (
            ", ".join(f"{count:,} {label}" for label, count in counts.items())
            or "the rejection column names no reason"
        )
    logger.warning(
        f"{len(rejected):,} of {len(usable):,} rows were rejected and are never drawn: {why}.",
    )
