"""Columns that lie within columns of dicts, by dotted names such as `json.caption`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetInfo, Features, IterableDataset, concatenate_datasets

from .apply import AnyDataset
from .arrays import column_batches

_MEDIA_KEYS = {"bytes", "path"}

_BATCH_ROWS = 8
"""Rows of a stream that are read at once, few because their files may be in memory."""


def nested_names(dataset: Dataset, *, within: str = "") -> list[str]:
    """Return the names of all columns; those of dicts are followed by the dotted names of what is in them.

    Args:
        dataset (`Dataset`): The data set.
        within (`str`): Column, or dotted name; only what lies in it is returned then.
    """
    names = list(_names(dataset.features))
    return [name for name in names if name.startswith(f"{within}.")] if within else names


def has_column(dataset: Dataset, name: str) -> bool:
    """Return whether [`with_nested`] can add a dotted name, or the data set has a column of that name.

    Dicts whose keys differ by row are JSON texts (datasets 4.6 and newer); whether they have a key is not checked.
    """
    return name in nested_names(dataset) or ("." in name and _is_json(dataset.features.get(name.partition(".")[0])))


def with_nested(dataset: AnyDataset, names: Iterable[str]) -> AnyDataset:
    """Add the columns of dotted names that the rows lack, where they have them; other names are ignored.

    Args:
        dataset (`Dataset` or `IterableDataset`): Rows in their stored order, as they were loaded; of a stream, all
            dotted names are added that are not known to be columns.
        names (iterable of `str`): Names of columns.
    """
    if isinstance(dataset, IterableDataset):
        present = dataset.column_names or ()
        dotted = tuple(name for name in dict.fromkeys(names) if "." in name and name not in present)
        function = partial(_nested_columns, names=dotted)
        return dataset.map(function, batched=True, batch_size=_BATCH_ROWS) if dotted else dataset
    for name in dict.fromkeys(names):
        if name not in dataset.column_names and has_column(dataset, name):
            dataset = _nested_column(dataset, name)
    return dataset


def _nested_columns(batch: Mapping[str, Sequence[Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns of dotted names for a batch of a stream, whose rows may differ in what they hold.

    A column whose own name is dotted, such as `depth.png`, comes first; a row without such a value gets None.
    """
    return {name: [*batch[name]] if name in batch else _values(batch, name) for name in names}


def _values(batch: Mapping[str, Sequence[Any]], name: str) -> list[Any]:
    outer, _, inner = name.partition(".")
    column = batch.get(outer)
    if column is None:
        return [None] * len(next(iter(batch.values())))
    return [reduce(_get, inner.split("."), value) for value in column]


def _nested_column(dataset: Dataset, name: str) -> Dataset:
    """Add the column of a dotted name, by reference: no cell is copied, however many bytes lie beside it.

    What lies in JSON texts is JSON again, and null where a row lacks it.
    """
    column, *keys = name.split(".")
    feature: Any = dataset.features[column]
    if _is_json(feature):
        inner = _within_json(dataset, column, keys, name)
    else:
        table = dataset.data.select([column])
        for key in keys:
            feature = feature[key]
            table = table.flatten()
        inner = Dataset(table.select([name]), info=DatasetInfo(features=Features({name: feature})))
    joined: Dataset = concatenate_datasets([dataset, inner], axis=1, split=dataset.split)
    return joined


def _within_json(dataset: Dataset, column: str, keys: Sequence[str], name: str) -> Dataset:
    parts = []
    for cells in column_batches(dataset, column):
        values = [reduce(_get, keys, None if text is None else json.loads(text)) for text in cells.storage.to_pylist()]
        texts = pa.array([None if value is None else json.dumps(value) for value in values], cells.storage.type)
        parts.append(pa.ExtensionArray.from_storage(cells.type, texts))
    features = Features({name: dataset.features[column]})
    return Dataset(pa.table({name: pa.chunked_array(parts)}), info=DatasetInfo(features=features))


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _names(features: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of features; dicts of bytes and path are media, not columns."""
    for key, feature in features.items():
        yield prefix + key
        if isinstance(feature, dict) and set(feature) != _MEDIA_KEYS:
            yield from _names(feature, f"{prefix}{key}.")


def _is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"
