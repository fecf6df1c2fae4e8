"""How messages name rows that cannot be used, and how all that is wrong with rows is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

from datasets import Dataset

from ..errors import BucketingError, RowsError
from .apply import undecoded

NAMED_ROWS = 3
"""Rows that a message names; of the others it gives the number."""

OF_BATCH = " Rows are counted from the first of their batch."
"""Sentence of messages about the rows of a batch."""

Report = Callable[[BucketingError], None]
"""Takes the error about rows at fault: it raises it, or keeps it, so that other checks follow."""


def raise_error(error: BucketingError) -> NoReturn:
    """Raise an error; the [`Report`] of a check that is made alone."""
    raise error


class Faults:
    """Keep the errors about rows, and raise them as one when the block ends.

    An error that ends the block itself is raised together with those that were kept.

    Example:
        >>> with Faults() as faults:
        ...     faults.report(BucketingError("1 caption is missing."))
        ...     faults.report(BucketingError("1 file is gone."))
        Traceback (most recent call last):
        hf_bucketing.errors.RowsError: 1 caption is missing.
        1 file is gone.
    """

    def __init__(self) -> None:
        self.errors: list[BucketingError] = []

    def report(self, error: BucketingError, *, source: str | None = None) -> None:
        """Keep an error, or all of which it consists; with a source, each names it."""
        errors = error.errors if isinstance(error, RowsError) else [error]
        if source is not None:
            errors = [type(fault)(f"{source}: {fault.fact}", advice=fault.advice) for fault in errors]
        self.errors += errors

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not (self.errors and isinstance(error, BucketingError)):
            return
        if isinstance(error, BucketingError):
            self.report(error)
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise RowsError(errors=self.errors) from error


def path_of(cell: Any) -> str | None:
    """Return the path in a cell of undecoded media; None for bytes without one."""
    path = cell.get("path") if isinstance(cell, dict) else cell
    return path if isinstance(path, str) else None


def paths_of(dataset: Dataset, rows: Sequence[int], media_column: str) -> list[str | None]:
    """Return the paths of the files of some rows, see [`path_of`]."""
    files = undecoded(dataset.select_columns([media_column]).select(rows), [media_column])
    return [*map(path_of, files[media_column])]


def listed(texts: Sequence[str], *, total: int, separator: str = "; ") -> str:
    """Join what is said of the first rows, with an ellipsis if there are more in total."""
    return separator.join([*texts, "…"] if total > len(texts) else texts)
