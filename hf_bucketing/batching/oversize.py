"""Rows that fit no batch: a few are rejected by name, as rows without a bucket are, and more are an error."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from accelerate import PartialState
from datasets import Features

from ..buckets.assignment import REJECTED_BUCKET, Rejection
from ..buckets.open_table import OpenTable
from ..columns.apply import with_columns
from ..columns.arrays import column_array
from ..columns.faults import NAMED_ROWS, listed
from ..columns.prepared import PreparedDataset
from ..errors import OversizeError
from ..packing.names import Grid
from ..plans.packs import PackPlanConfig, sample_spans

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def beyond_positions(bucket_ids: IntArray, table: OpenTable, refuse: Callable[[Grid], str | None]) -> BoolArray:
    """Return which rows have a token grid that the model cannot take, `(n,)`; `refuse` says why for one grid."""
    ids, of_row = np.unique(bucket_ids, return_inverse=True)
    refused = [
        bucket_id > REJECTED_BUCKET and refuse(_grid(table, bucket_id)) is not None for bucket_id in ids.tolist()
    ]
    return np.array(refused, np.bool_)[of_row.ravel()]


def _grid(table: OpenTable, bucket_id: int) -> Grid:
    return table.spec.grid(table.size(bucket_id))


def exceeding(num_tokens: IntArray, packs: PackPlanConfig, *, text_tokens: int) -> BoolArray:
    """Return which rows have more tokens than a pack holds, `(n,)`."""
    return sample_spans(num_tokens, dataclasses.replace(packs, oversize="own_batch"), text_tokens=text_tokens)[1]


def without_rows(prepared: PreparedDataset, rows: BoolArray, *, batch: str, why: str) -> PreparedDataset:
    """Reject rows of a data set as too large for a `batch`, and log from the main process how many, which and why."""
    dataset, label = prepared.dataset, Rejection.TOO_LARGE.label
    numbers = np.flatnonzero(rows)
    names = listed(prepared.file_names(numbers[:NAMED_ROWS].tolist()), total=len(numbers), separator=", ")
    kind = f"row fits no {batch} and is" if len(numbers) == 1 else f"rows fit no {batch} and are"
    if not PartialState._shared_state or PartialState().is_main_process:
        logger.warning(f"{len(numbers):,} {kind} rejected as {label}: {names}. {why}")
    columns = {
        "bucket_id": np.where(rows, np.int32(REJECTED_BUCKET), column_array(dataset, "bucket_id")),
        "num_tokens": np.where(rows, 0, column_array(dataset, "num_tokens")),
        "rejection": np.where(rows, label, column_array(dataset, "rejection").astype(object)),
    }
    features = Features({name: dataset.features[name] for name in columns})
    return dataclasses.replace(prepared, dataset=with_columns(dataset, columns, features=features))


def with_file(error: OversizeError, prepared: PreparedDataset, *, advice: Sequence[str]) -> OversizeError:
    """Return an error about a row with its file in place of its number, and other advice after the first."""
    assert error.row is not None, "plans name it"
    (name,) = prepared.file_names([error.row])
    return OversizeError(error.fact.replace(f"Row {error.row} ", f"{name} ", 1), advice=[error.advice[0], *advice])
