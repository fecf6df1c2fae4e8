"""Rows held out of training: a share of the files of a data set, or those of another."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from ..buckets.arrays import IntArray, stored_column
from ..errors import BucketingError
from ..randomness import Purpose, generator
from .arrays import column_array
from .faults import NAMED_ROWS
from .prepared import CacheInfo, PreparedDataset

_MAY_BE_SPELLED_OTHERWISE = r"^/|^$|/$|//|(^|/)\.\.?(/|$)"
"""Paths that are not below the root as they are written: absolute ones, and those with `.`, `..` or `//`."""


class Files(NamedTuple):
    """The files of a data set's rows.

    Attributes:
        of_row (array of `int`, shape `(n,)`): Number of the file of each row, from 0. Rows of one path have one file;
            bytes without a path are a file of their own.
        paths (list of `str`): Paths of the first files; the others are bytes without a path.
    """

    of_row: IntArray
    paths: list[str]

    @property
    def number(self) -> int:
        """Number of files."""
        return int(self.of_row.max(initial=-1)) + 1


def files_of(prepared: PreparedDataset) -> Files:
    """Return the files of the rows of a prepared data set, without reading their bytes."""
    paths = _paths(prepared.dataset, prepared.column)
    root = "" if prepared.root is None else os.path.abspath(prepared.root)
    encoded = paths.dictionary_encode().combine_chunks()
    numbers: dict[str, int] = {}
    spelled = encoded.dictionary
    if pc.any(pc.match_substring_regex(spelled, _MAY_BE_SPELLED_OTHERWISE)).as_py():
        spelled = [os.path.normpath(os.path.join(root, path)) for path in spelled.to_pylist()]
    else:
        spelled = pc.binary_join_element_wise(os.path.join(root, ""), spelled, "").to_pylist()
    number = np.array([numbers.setdefault(path, len(numbers)) for path in spelled], np.int64)
    named = paths.is_valid().to_numpy()
    of_row = np.empty(len(paths), np.int64)
    of_row[named] = number[encoded.indices.drop_null().to_numpy()]
    of_row[~named] = len(numbers) + np.arange(np.count_nonzero(~named))
    return Files(of_row, list(numbers))


def split_rows(prepared: PreparedDataset, share: float) -> tuple[PreparedDataset, PreparedDataset]:
    """Split a data set by files into the rows to train on and those held out.

    Of images and of videos, as few files are held out as hold the share of the usable rows, and at least one. They are
    taken in an order that depends on the number of files alone: neither on the seed nor on the process.

    Args:
        prepared ([`PreparedDataset`][hf_bucketing.columns.PreparedDataset]): Rows with `num_tokens`, 0 where they are
            rejected, and `fps`, 0 for images.
        share (`float`): Share of the usable rows to hold out, above 0 and below 1.

    Raises:
        BucketingError: If no row is usable, or none would be left to train on.
    """
    dataset, files = prepared.dataset, files_of(prepared)
    usable, image = column_array(dataset, "num_tokens") > 0, column_array(dataset, "fps") == 0
    order = generator(Purpose.HELD_OUT_ROWS, files.number).permutation(files.number)
    held_out = np.zeros(files.number, bool)
    images, rows_in_all = (int(share * np.count_nonzero(rows) + 0.5) for rows in (usable & image, usable))
    rows_in_all = max(1, rows_in_all)
    images = images if (usable & ~image).any() else rows_in_all
    for kind, wanted in ((usable & image, images), (usable & ~image, rows_in_all - images)):
        rows = np.bincount(files.of_row[kind], minlength=files.number)[order]
        held_out[order[(rows > 0) & (np.cumsum(rows) - rows < wanted)]] = True
    chosen = held_out[files.of_row]
    together = "leaves none to train on, as all rows of one file are on the same side"
    for side, what in ((usable & chosen, "holds out none"), (usable & ~chosen, together)):
        if not side.any():
            counts = f"{np.count_nonzero(usable)} usable rows in {files.number} files"
            raise BucketingError(
                f"`validation_split={share}` of {counts} {what}.",
                advice=["choose another share", "name other samples as `validation_dataset_dir`"],
            )
    training, validation = (
        dataclasses.replace(prepared, dataset=dataset.select(np.flatnonzero(rows))) for rows in (~chosen, chosen)
    )
    return training, validation


def check_apart(training: PreparedDataset, validation: PreparedDataset) -> None:
    """Refuse held-out samples of another folder that are also trained on, or that another model encoded.

    Raises:
        BucketingError: If both folders hold a file, or their caches do not go together.
    """
    _check_caches(training.cache, validation.cache)
    shared = sorted(_on_disk(training) & _on_disk(validation))
    if shared:
        more = f" and {len(shared) - NAMED_ROWS} more" if len(shared) > NAMED_ROWS else ""
        raise BucketingError(
            f"`validation_dataset_dir` holds files that are also trained on: {', '.join(shared[:NAMED_ROWS])}{more}. "
            "Remove them from one of the data sets, or hold rows of `dataset_dir` out with `validation_split`."
        )


def _check_caches(training: CacheInfo | None, validation: CacheInfo | None) -> None:
    if training is None and validation is None:
        return
    if training is None or validation is None:
        cached, plain = ("dataset_dir", "validation_dataset_dir")[:: 1 if validation is None else -1]
        raise BucketingError(
            f"`{cached}` holds encoded samples and `{plain}` does not; give both as hf_bucketing prepare wrote "
            "them, or both as hf_bucketing cache did."
        )
    for what in ("latents_model", "text_model"):
        if getattr(training, what) != getattr(validation, what):
            models = f"{what} {getattr(training, what)} and {getattr(validation, what)}"
            raise BucketingError(
                f"The caches of `dataset_dir` and `validation_dataset_dir` were made by different models ({models}); "
                "run hf_bucketing cache on both with one pipeline."
            )


def _on_disk(prepared: PreparedDataset) -> set[str]:
    """Return the paths of the files that are not part of the data set: names of bytes say nothing about others."""
    cells = stored_column(prepared.dataset, prepared.column)
    if pa.types.is_struct(cells.type):
        alone = np.flatnonzero(pc.struct_field(cells, "bytes").is_null().to_numpy())
        prepared = dataclasses.replace(prepared, dataset=prepared.dataset.select(alone))
    return set(files_of(prepared).paths)


def _paths(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """Return the paths of a media column, null for bytes without one."""
    cells = stored_column(dataset, column)
    if pa.types.is_struct(cells.type):
        cells = pc.struct_field(cells, "path")
    text = pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)
    return cells if text else pa.chunked_array([pa.nulls(len(cells), pa.string())])
