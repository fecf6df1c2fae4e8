"""Columns that lie within columns of dicts, by dotted names such as `json.caption`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import Dataset, DatasetInfo, Features, concatenate_datasets

_MEDIA_KEYS = {"bytes", "path"}


def nested_names(dataset: Dataset, *, within: str = "") -> list[str]:
    """Return the names of all columns; those of dicts are followed by the dotted names of what is in them.

    Args:
        dataset (`Dataset`): The data set.
        within (`str`): Column, or dotted name; only what lies in it is returned then.
    """
    names = list(_names(dataset.features))
    return [name for name in names if name.startswith(f"{within}.")] if within else names


def nested_column(dataset: Dataset, name: str) -> Dataset:
    """Add the column of a dotted name, by reference: no cell is copied, however many bytes lie beside it.

    Args:
        dataset (`Dataset`): Rows in their stored order, as they were loaded.
        name (`str`): One of [`nested_names`].
    """
    column, *keys = name.split(".")
    feature: Any = dataset.features[column]
    table = dataset.data.select([column])
    for key in keys:
        feature = feature[key]
        table = table.flatten()
    inner = Dataset(table.select([name]), info=DatasetInfo(features=Features({name: feature})))
    joined: Dataset = concatenate_datasets([dataset, inner], axis=1, split=dataset.split)
    return joined


def _names(features: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of features; dicts of bytes and path are media, not columns."""
    for key, feature in features.items():
        yield prefix + key
        if isinstance(feature, dict) and set(feature) != _MEDIA_KEYS:
            yield from _names(feature, f"{prefix}{key}.")
