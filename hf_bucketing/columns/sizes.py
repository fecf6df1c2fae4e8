"""The sizes of a data set: those that it has already, if a sample of its files agrees, or those of all headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Image

from ..errors import ColumnError
from .apply import map_columns, undecoded
from .arrays import is_text, numbers, whole_numbers
from .captions_beside import STILL_IMAGES
from .metadata import ExistingMetadata, MediaMetadata

_SAMPLED_FILES = 16
_SIZES = ("width", "height")
_TIMES = ("num_frames", "fps")


class SizedDataset(NamedTuple):
    """A data set with its sizes.

    Attributes:
        dataset (`Dataset`): With `width`, `height`, `num_frames` and `fps`.
        origin (`str`): A sentence about where these come from.
    """

    dataset: Dataset
    origin: str


def add_sizes(
    dataset: Dataset, metadata: MediaMetadata, *, read_headers: bool = False, num_proc: int | None = None
) -> SizedDataset:
    """Add `width`, `height`, `num_frames` and `fps`: from columns of these names if they are right, else from headers.

    The columns are taken over where every row has its size (and, unless all are still images, its frames and frame
    rate), and a sample of 16 files says the same. Otherwise all headers are read.

    Args:
        dataset (`Dataset`): With a media column.
        metadata ([`MediaMetadata`]): How headers are read, and the target frame rate, which holds for both ways.
        read_headers (`bool`): Whether to read all headers although the data set has sizes.
        num_proc (`int`, *optional*): Processes that read headers.

    Raises:
        ColumnError: If the data set's sizes are not those of a sampled file; the message names it.
        MediaError: If a file cannot be read, unless `metadata.on_error` is `"reject"`.
    """
    names, reason = ((), "as asked for") if read_headers else _usable_columns(dataset, metadata.column)
    if names:
        unreadable = _compare_with_files(dataset, names, metadata)
        if unreadable:
            names, reason = (), f"{unreadable} of the files that were checked cannot be read"
    if not names:
        sized = map_columns(dataset, metadata, num_proc=num_proc, overwrite=True)
        present = [name for name in (*_SIZES, *_TIMES) if name in dataset.column_names]
        unused = f", instead of the columns {', '.join(present)}: {reason}" if present else ""
        return SizedDataset(sized, f"Sizes are read from the headers of the files{unused}.")
    sized = undecoded(dataset, [metadata.column])
    target = metadata.target_fps if len(names) == 4 else None
    if len(names) < 4 or target is not None:
        times = dict(zip(_TIMES, names[2:], strict=False))
        sized = map_columns(sized, ExistingMetadata(*_SIZES, **times, target_fps=target), overwrite=True)
    checked = min(len(dataset), _SAMPLED_FILES)
    return SizedDataset(sized, f"Sizes are the columns {', '.join(names)}; the headers of {checked} files agree.")


def _usable_columns(dataset: Dataset, media_column: str) -> tuple[tuple[str, ...], str]:
    """Return the columns that say the size of every row, or none and why."""
    if not len(dataset) or not set(_SIZES) <= set(dataset.column_names):
        return (), "width and height are needed"
    names = (*_SIZES, *_TIMES) if set(_TIMES) <= set(dataset.column_names) else _SIZES
    if len(names) == 2 and not _all_still_images(dataset, media_column):
        return (), "videos need num_frames and fps too"
    batch: dict[str, Any] = dataset.select_columns(list(names)).with_format("arrow")[:]
    try:
        sizes = [whole_numbers(batch, name) for name in names[:3]]
        fps = numbers(batch, "fps") if len(names) == 4 else None
    except ColumnError as error:
        return (), str(error)
    incomplete = np.minimum.reduce(sizes) < 1
    if fps is not None:
        incomplete |= (sizes[2] > 1) & ~(fps > 0)
    if incomplete.any():
        return (), f"{incomplete.sum()} rows lack a size or frame rate, the first of them row {incomplete.argmax()}"
    return names, ""


def _all_still_images(dataset: Dataset, column: str) -> bool:
    """Return whether the files are images by their column's type or their names' endings."""
    feature = dataset.features[column]
    if not is_text(feature):
        return isinstance(feature, Image)
    endings = "|".join(ending[1:] for ending in sorted(STILL_IMAGES))
    pattern = rf"\.({endings})$"
    batches = dataset.select_columns([column]).with_format("arrow").iter(batch_size=100_000)
    return all(
        pc.all(pc.match_substring_regex(batch[column], pattern, ignore_case=True).fill_null(False)).as_py()
        for batch in batches
    )


def _compare_with_files(dataset: Dataset, names: tuple[str, ...], metadata: MediaMetadata) -> int:
    """Read some headers; return how many cannot be read, or raise for one that says something else.

    Frames are those of the file, before any `target_fps`. A frame rate may be rounded, and frames that a header does
    not count may be a few more or less.
    """
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLED_FILES).astype(int)).tolist()
    sample = undecoded(dataset.select_columns([metadata.column, *names]).select(rows), [metadata.column])
    cells = sample[metadata.column][:]
    found = replace(metadata, target_fps=None)({metadata.column: cells})
    said = {name: sample[name][:] for name in names}
    unreadable = 0
    for place, row in enumerate(rows):
        file = {name: values[place] for name, values in found.items()}
        if file["width"] < 0:
            unreadable += 1
            continue
        wrong = [name for name in names if not _agrees(name, said[name][place], file)]
        if wrong:
            path = cells[place].get("path") if isinstance(cells[place], dict) else cells[place]
            columns = ", ".join(f"{name} {said[name][place]}" for name in names)
            header = ", ".join(f"{name} {file[name]}" for name in names)
            raise ColumnError(
                f"Row {row} ({path}) has {columns}, but the file has {header}, as shown; correct the columns, or use "
                "read_headers, which reads the sizes of all files instead."
            )
    return unreadable


def _agrees(name: str, said: float, file: Mapping[str, Any]) -> bool:
    if name == "fps":
        return file["num_frames"] == 1 or abs(said - file["fps"]) <= 0.01 * file["fps"]
    tolerance = max(1.0, 0.02 * file["num_frames"]) if name == "num_frames" and file["num_frames_estimated"] else 0.0
    return abs(said - file[name]) <= tolerance
