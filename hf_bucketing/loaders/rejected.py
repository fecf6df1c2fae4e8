"""What a sampler says about the rows that it never draws because they were rejected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from datasets import Dataset
from datasets.arrow_dataset import Column

from ..buckets.assignment import count_rejections
from ..errors import PlanError

logger = logging.getLogger(__name__)


def warn_of_rejected(
    rows: Any,
    usable: npt.NDArray[np.bool_],
    *,
    rejection: npt.ArrayLike | None = None,
    process_index: int | None = None,
) -> None:
    """Log once, from the main process, how many rows were rejected, and why; nothing if none was.

    Args:
        rows (array or `datasets.Column`): What the sampler was given for the rows. A column of a data set whose
            `rejection` column gives the reasons needs no `rejection`.
        usable (`bool`, shape `(n,)`): False for rejected rows.
        rejection (array, shape `(n,)`, *optional*): A `rejection` column, or the numbers of an
            [`Assignment`][hf_bucketing.Assignment].
        process_index (`int`, *optional*): Of a sampler outside accelerate; the first one logs.

    Raises:
        PlanError: If `rejection` has not one value per row.
    """
    if rejection is None and isinstance(rows, Column) and isinstance(rows.source, Dataset):
        rejection = rows.source["rejection"] if "rejection" in rows.source.column_names else None
    if rejection is not None and isinstance(rejection, Sequence | np.ndarray) and len(rejection) != len(usable):
        raise PlanError(f"Give one rejection per row: expected {len(usable)}, got {len(rejection)}.")
    rejected = np.flatnonzero(~usable)
    main = PartialState().is_main_process if PartialState._shared_state else process_index in (None, 0)
    if not len(rejected) or not main:
        return
    if rejection is None:
        why = 'pass rejection=dataset["rejection"] to see why'
    else:
        reasons = rejection[rejected.tolist()] if isinstance(rejection, Column) else np.asarray(rejection)[rejected]
        counts = count_rejections(np.asarray(reasons))
        why = (
            ", ".join(f"{count:,} {label}" for label, count in counts.items())
            or "the rejection column names no reason"
        )
    logger.warning(
        f"{len(rejected):,} of {len(usable):,} rows were rejected and are never drawn: {why}.",
    )
