"""The warning of samplers that says how many rows were rejected, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from datasets.arrow_dataset import Column

from ..buckets.arrays import BoolArray, whole_column
from ..buckets.assignment import count_rejections
from ..errors import PlanError
from .host import process_rank

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
        counts = count_rejections(whole_column(rejection)[rejected])
        why = (
            ", ".join(f"{count:,} {label}" for label, count in counts.items())
            or "the rejection column names no reason"
        )
    logger.warning(
        f"{len(rejected):,} of {len(usable):,} rows were rejected and are never drawn: {why}.",
    )
