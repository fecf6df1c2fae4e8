"""Apply a column callable to a data set."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from datasets import (
    Dataset,
    DatasetInfo,
    Features,
    Image,
    IterableDataset,
    LargeList,
    List,
    Video,
    concatenate_datasets,
)
from datasets.fingerprint import Hasher
from datasets.table import ConcatenationTable, InMemoryTable

from ..errors import ColumnError
from .arrays import cell_of_list, column_table

AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)


class ColumnFunction(Protocol):
    """Batch function that can be pickled and names the columns that it reads and writes.

    A function whose results depend on more than itself and the columns, such as on the contents of files, also has
    `reusable = False`: datasets then neither stores its results, nor reuses earlier ones, nor hashes the function. One
    that knows the types of its columns may give them as `features`.

    Attributes:
        input_columns (`tuple[str, ...]`): Columns that a batch must have.
        optional_columns (`tuple[str, ...]`): Columns that are read if they exist.
        output_columns (`tuple[str, ...]`): Columns that the function returns.
        vectorised (`bool`): Whether the function takes Arrow columns, in large batches.
    """

    @property
    def input_columns(self) -> tuple[str, ...]: ...
    @property
    def optional_columns(self) -> tuple[str, ...]: ...
    @property
    def output_columns(self) -> tuple[str, ...]: ...
    @property
    def vectorised(self) -> bool: ...
    def __call__(self, batch: Any) -> Any: ...


def map_columns(
    dataset: AnyDataset,
    function: ColumnFunction,
    *,
    batch_size: int | None = None,
    num_proc: int | None = None,
    overwrite: bool = False,
) -> AnyDataset:
    """Add the columns that a callable computes, or take them from the cache of datasets.

    Only the new columns are written, or kept in memory if the data set lies in a read-only folder; the other columns
    are not copied, however many bytes they hold, also if rows were shuffled, selected or split. Media columns that the
    callable reads are returned as `Image(decode=False)` or `Video(decode=False)`, that is as paths or bytes: files are
    decoded once, in the collator, when their target size is known. The data set keeps its format.

    Args:
        dataset (`Dataset` or `IterableDataset`): Rows with the callable's `input_columns`.
        function (callable): Column function, such as `MediaMetadata` or `BucketColumns`.
        batch_size (`int`, *optional*): Rows per call; by default 1,000, or 100,000 for a vectorised callable.
        num_proc (`int`, *optional*): Number of processes, for a `Dataset`.
        overwrite (`bool`): Whether existing columns may be replaced.

    Returns:
        The data set with `function.output_columns` added.

    Raises:
        ColumnError: If the data set is empty, lacks an input column, or has an output column and `overwrite` is False.
    """
    columns: list[str] = _check_columns(dataset, function, overwrite=overwrite)
    inputs = [*function.input_columns, *(name for name in function.optional_columns if name in columns)]
    dataset = undecoded(dataset, inputs)
    batch_size = batch_size or (100_000 if function.vectorised else 1000)
    if isinstance(dataset, IterableDataset):
        return dataset.map(function, batched=True, batch_size=batch_size)
    reuse: dict[str, Any] = {}
    if not getattr(function, "reusable", True):
        reuse = {"load_from_cache_file": False, "keep_in_memory": True, "new_fingerprint": uuid.uuid4().hex}
    elif not _can_cache(dataset):
        reuse = {"keep_in_memory": True}
    # Only what is read: processes would be sent the other columns too.
    read = _narrowed(dataset.with_format(None), list(dict.fromkeys(inputs)))
    new: Dataset = (
        (_gathered(read) if function.vectorised else read)
        .with_format("arrow" if function.vectorised else None)
        .map(
            function,
            batched=True,
            batch_size=batch_size,
            writer_batch_size=batch_size,
            num_proc=num_proc,
            remove_columns=list(dict.fromkeys(inputs)),
            features=getattr(function, "features", None),
            desc=f"{type(function).__name__}: {', '.join(function.output_columns)}",
            **reuse,
        )
        .with_format(None)
    )
    kept = dataset.with_format(None).remove_columns([name for name in function.output_columns if name in columns])
    mapped = _side_by_side(kept, new)
    caller_format: dict[str, Any] = dataset.format
    if caller_format["type"] is not None or set(caller_format["columns"]) != set(columns):
        visible = [name for name in mapped.column_names if name in caller_format["columns"] or name not in columns]
        mapped.set_format(caller_format["type"], visible, **caller_format["format_kwargs"])
    return mapped


def with_columns(dataset: Dataset, columns: Mapping[str, Any], *, features: Features | None = None) -> Dataset:
    """Add columns, or replace those of the same names in place; the others are not copied.

    `Dataset.add_column` would write all columns anew where rows were shuffled, selected or split.

    Args:
        dataset (`Dataset`): The rows.
        columns (mapping of `str` to arrays): Columns of numpy or Arrow, of shape `(n,)`.
        features (`Features`, *optional*): Types of the columns; by default those that their arrays have.
    """
    table = InMemoryTable(pa.table(dict(columns)))
    if features is not None:
        table = table.cast(features.arrow_schema)
    # Without a fingerprint, datasets would pickle the table to make one.
    fingerprint = Hasher.hash([dataset._fingerprint, *columns, *(table.column(name) for name in columns)])
    new = Dataset(table, info=DatasetInfo(features=features), fingerprint=fingerprint)
    kept = dataset.remove_columns([name for name in columns if name in dataset.column_names])
    names = [*dataset.column_names, *(name for name in columns if name not in dataset.column_names)]
    return (_side_by_side(kept, new) if kept.column_names else new).select_columns(names)


def _narrowed(dataset: Dataset, columns: list[str]) -> Dataset:
    """Return some columns of a data set.

    Of a table joined of parts, `select_columns` alone leaves parts without columns, whose length is lost when a shard
    is sent to a process.
    """
    chosen: Dataset = dataset.select_columns(columns)
    if not isinstance(chosen.data, ConcatenationTable):
        return chosen
    blocks = [[block for block in row if block.num_columns] for row in chosen.data.blocks]
    table = ConcatenationTable.from_blocks(blocks)
    return Dataset(table, chosen.info, chosen.split, chosen._indices, chosen._fingerprint)


def _gathered(dataset: Dataset) -> Dataset:
    """Return columns of numbers in memory if indices choose their rows, which datasets would gather one by one."""
    if dataset._indices is None:
        return dataset
    table = InMemoryTable(column_table(dataset, dataset.column_names))
    return Dataset(table, dataset.info, dataset.split, fingerprint=dataset._fingerprint)


def _side_by_side(kept: Dataset, new: Dataset) -> Dataset:
    """Join columns of the same rows.

    If rows are chosen by indices, `concatenate_datasets` would write all columns anew in their order. Instead, the new
    columns are put in the order of the stored rows, in memory, with nulls where a stored row is not chosen.
    """
    if kept._indices is None:
        joined: Dataset = concatenate_datasets([kept, new], axis=1, split=kept.split)
        return joined
    chosen = kept._indices.column(0).to_numpy()
    source = np.full(kept.data.num_rows, -1)
    source[chosen] = np.arange(len(chosen))
    stored_order = new.data.table.take(pa.array(source, mask=source < 0))
    fingerprint = Hasher.hash([kept._fingerprint, new._fingerprint])
    stored = [
        Dataset(kept.data, info=kept.info, fingerprint=fingerprint),
        Dataset(InMemoryTable(stored_order), info=new.info, fingerprint=fingerprint),
    ]
    combined = concatenate_datasets(stored, axis=1, split=kept.split)
    return Dataset(combined.data, combined.info, kept.split, kept._indices, fingerprint)


def undecoded(dataset: AnyDataset, columns: Iterable[str]) -> AnyDataset:
    """Return the data set with the named columns of images, videos, or lists of them as paths or bytes, undecoded."""
    for column in columns:
        feature: Any = (dataset.features or {}).get(column)
        files: Any = cell_of_list(feature)
        if isinstance(files, (Image, Video)) and files.decode:
            encoded: Any = type(files)(decode=False)
            is_list = isinstance(feature, (List, LargeList))
            dataset = dataset.cast_column(column, replace(feature, feature=encoded) if is_list else encoded)
    return dataset


def _can_cache(dataset: Dataset) -> bool:
    """Return whether datasets can write its cache, which it keeps beside the files of the data set."""
    return all(os.access(os.path.dirname(file["filename"]), os.W_OK) for file in dataset.cache_files)


def _check_columns(dataset: AnyDataset, function: ColumnFunction, *, overwrite: bool) -> list[str]:
    """Return the columns of the data set, or raise if one is missing or would be replaced."""
    name = type(function).__name__
    columns: list[str] = list(dataset.column_names or next(iter(dataset), {}))
    if not columns or (isinstance(dataset, Dataset) and not len(dataset)):
        raise ColumnError(f"The data set is empty; {name} needs rows with {', '.join(function.input_columns)}.")
    missing = [column for column in function.input_columns if column not in columns]
    if missing:
        raise ColumnError(f"{name} reads {missing}, but the data set has the columns {columns}.")
    present = [column for column in function.output_columns if column in columns]
    if present and not overwrite:
        raise ColumnError(
            f"The data set already has {present}, which {name} would replace.",
            advice=["pass `overwrite=True`", "remove or rename them"],
        )
    return columns
