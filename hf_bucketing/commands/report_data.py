r"""Show the rows of a prepared data set as a page: what a model will see of each, and what changed in them.

%(prog)s demo/prepared --html demo/data.html

Beside the page, a folder of its name holds its rows and pictures; both open from a disk, without a server.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import MediaError
from ..buckets.arrays import IntArray
from ..buckets.kept import mean_kept_area
from ..command_line.flags import FlagParser
from ..files import check_folder_writable, check_writable, complete_file, complete_folder
from ..media.probe import MediaInfo, probe
from ..media.rows import CLIP_START, SOURCE_COLUMN
from ..media.thumbnails import Thumbnail, sample_thumbnails, thumbnail
from ..media.views import ViewRule
from ..randomness import ROW, sample_key
from ..report import render_page
from ..report.data_rows import DataRow, RowTexts, data_page, describe_difference, describe_row, with_stored, write_rows
from ..report.text import size_label
from ..settings import check_at_least

if TYPE_CHECKING:
    from ..columns import PreparedDataset
    from ..conditions.shares import SourceConditions

MARKER = "rows-0.js"
"""File that every folder of a page's rows holds."""

ROWS_AT_ONCE = 64
"""Rows that are in memory at once, with their files where the data set holds these."""


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("dataset", metavar="DATASET", help="Folder that hf_bucketing prepare wrote.")
    parser.add_argument("--html", type=Path, required=True, help="HTML file for the page.")
    parser.add_argument("--condition", help="Conditions of training: rows say what the first epoch draws of them.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of these draws, as of training.")
    parser.add_argument("--compare", help="Earlier prepared folder; rows that differ from it are marked.")
    parser.add_argument(
        "--max_rows", type=int, default=10_000, help="Most rows of the page: changed ones, and others spread evenly."
    )
    parser.add_argument(
        "--max_thumbnails", type=int, default=2_000, help="Most rows with pictures, for which files are decoded."
    )
    return parser


def choose_rows(num_rows: int, changed: IntArray, most: int) -> IntArray:
    """Return the rows to show: as many changed ones as fit, and others spread evenly."""
    from ..columns.arrays import spread

    first = changed[:most]
    others = np.setdiff1d(np.arange(num_rows), changed)
    return np.sort(np.concatenate([first, spread(others, most - len(first))]))


def filters_of(prepared: PreparedDataset, row: dict[str, Any], change: str = "") -> dict[str, str]:
    """Return what a row is filtered by."""
    bucket = row.get("bucket_id", -1)
    return {
        "bucket": size_label(prepared.table.size(bucket)) if bucket >= 0 else "",
        "rejected": row.get("rejection", "no bucket") if bucket < 0 else "",
        "source": prepared.sources[row[SOURCE_COLUMN]] if prepared.sources else "",
        "change": change,
    }


def kept_of(prepared: PreparedDataset) -> float:
    """Return the mean kept area of the rows that have a bucket."""
    from ..columns import column_array

    ids, heights, widths = (column_array(prepared.dataset, name) for name in ("bucket_id", "height", "width"))
    return mean_kept_area(prepared.table, ids, heights=heights, widths=widths)


def decode(prepared: PreparedDataset, row: dict[str, Any], *, name: str) -> tuple[dict[str, Thumbnail], str]:
    """Return pictures of what the model sees of a row, or of all of a rejected one; or why there are none."""
    try:
        if row.get("bucket_id", -1) < 0:
            second = row.get(CLIP_START) or 0.0
            return {"no bucket": thumbnail(prepared.files.source(row[prepared.column], name=name), second=second)}, ""
        size = prepared.table.size(row["bucket_id"])
        sample = prepared.files.sample(row, size, views=ViewRule(random_crop=False), draws=np.zeros(0), name=name)
        return sample_thumbnails(sample), ""
    except MediaError as error:
        return {}, str(error)


def read_stored(prepared: PreparedDataset, row: dict[str, Any], *, name: str) -> MediaInfo | None:
    """Return what the header of a row's file states; None where it has none that can be read, as its picture says."""
    try:
        return probe(prepared.files.source(row[prepared.column], name=name))
    except MediaError:
        return None


class Conditions(NamedTuple):
    """What training draws of each row in its first epoch: conditions, and the seed."""

    drawn: SourceConditions
    seed: int

    def describe(self, prepared: PreparedDataset, row: dict[str, Any]) -> RowTexts:
        """Return what is drawn of a row by itself, as in packs; nothing of a rejected one."""
        if row.get("bucket_id", -1) < 0:
            return {}
        spec, size = prepared.spec, prepared.table.size(row["bucket_id"])
        drawn = self.drawn.of(prepared.sources[row[SOURCE_COLUMN]] if prepared.sources else None).draw(
            *sample_key(seed=self.seed, epoch=0, index=int(row[ROW])),
            latent_frames=spec.latent_size(size)[0] - spec.num_repeats,
            stride=spec.temporal_stride,
        )
        said = [drawn.name]
        if drawn.appended:
            said.append(f"frames of latent frames {', '.join(map(str, drawn.appended))} are appended")
        if drawn.frames.any():
            said.append(f"frames {', '.join(map(str, drawn.frames.nonzero()[0].tolist()))} are shown in place")
        return {"condition in epoch 0": ["; ".join(said)]}


def read_rows(prepared: PreparedDataset, rows: IntArray) -> Iterator[tuple[int, dict[str, Any], RowTexts]]:
    """Yield rows with their numbers and what they are."""
    numbers = rows.tolist()
    for number, row in zip(numbers, prepared.read_rows(numbers), strict=True):
        yield number, row, describe_row(prepared, row, name=f"row {number}")


class Earlier:
    """What changed since an earlier prepared folder.

    Args:
        earlier (`str`): Its folder.
        dataset (`str`): The later folder.
    """

    def __init__(self, earlier: str, dataset: str) -> None:
        from ..columns import PreparedDataset
        from ..columns.data_lock import compare_locks, require_lock

        self.changes = compare_locks(require_lock(earlier), require_lock(dataset))
        self.prepared = PreparedDataset.load(earlier)
        self.positions = {row: position for position, row in enumerate(self.changes.now.tolist())}
        self.added = {*self.changes.added.tolist()}

    @property
    def rows(self) -> IntArray:
        """Rows of the later folder that were added or changed."""
        return np.union1d(self.changes.added, self.changes.now)

    def removed(self, most: int) -> list[DataRow]:
        """Return the first rows that only the earlier folder has."""
        return [
            DataRow(number=None, texts=texts, filters=filters_of(self.prepared, row, "removed"))
            for _, row, texts in read_rows(self.prepared, self.changes.removed[:most])
        ]

    def change(self, row: int, texts: RowTexts) -> tuple[str, list[str]]:
        """Return what happened to a row of the later folder, and its differences."""
        if row in self.added:
            return "added", []
        if row not in self.positions:
            return "", []
        position = self.positions[row]
        fields = self.changes.fields_of(position)
        ((_, _, was),) = read_rows(self.prepared, self.changes.was[position : position + 1])
        return f"changed in {', '.join(fields)}", describe_difference(was, texts, fields)


def make_rows(
    prepared: PreparedDataset,
    rows: IntArray,
    pictured: set[int],
    folder: Path,
    *,
    earlier: Earlier | None,
    conditions: Conditions | None,
) -> list[DataRow]:
    """Return some rows for the page, and write the pictures of those that get some into a folder."""

    def make_row(read: tuple[int, dict[str, Any], RowTexts]) -> DataRow:
        number, row, texts = read
        change, differences = ("", []) if earlier is None else earlier.change(number, texts)
        thumbnails: dict[str, Thumbnail] = {}
        fault = ""
        if number in pictured:
            thumbnails, fault = decode(prepared, row, name=f"row {number}")
            info = read_stored(prepared, row, name=f"row {number}")
            texts = texts if info is None else with_stored(texts, info)
        pictures = []
        for place, (label, small) in enumerate(thumbnails.items()):
            name = f"{number}-{place}.{small.form}"
            (folder / name).write_bytes(small.data)
            pictures.append((label, name, small.width, small.height))
        return DataRow(
            number=number,
            texts={**texts, **({} if conditions is None else conditions.describe(prepared, row))},
            filters=filters_of(prepared, row, change),
            differences=differences,
            pictures=pictures,
            fault=fault,
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(make_row, read_rows(prepared, rows))]


def main(args: argparse.Namespace) -> None:
    from tqdm.auto import tqdm

    from ..caching.views import describe_latents
    from ..columns import PreparedDataset
    from ..columns.arrays import spread
    from ..conditions.shares import read_conditions

    check_at_least(0, args, "max_rows", "max_thumbnails", "seed")
    conditions = None if args.condition is None else Conditions(read_conditions(args.condition), args.seed)
    folder = args.html.with_name(f"{args.html.stem}_files")
    check_writable(args.html)
    check_folder_writable(folder)
    prepared = PreparedDataset.load(args.dataset)
    if conditions is not None:
        conditions.drawn.check_sources(prepared.sources)
    earlier = None if args.compare is None else Earlier(args.compare, args.dataset)
    chosen = choose_rows(
        len(prepared.dataset), np.zeros(0, np.int64) if earlier is None else earlier.rows, args.max_rows
    )
    pictured = {*spread(chosen, args.max_thumbnails).tolist()}
    changes = (
        "" if earlier is None else f"Compared with {args.compare}. {earlier.changes.describe() or 'The same rows.'}"
    )
    rows = [] if earlier is None else earlier.removed(args.max_rows)
    with complete_folder(folder, marker=MARKER) as partial:
        for start in tqdm(range(0, len(chosen), ROWS_AT_ONCE), desc=f"{len(pictured)} rows with pictures"):
            some = chosen[start : start + ROWS_AT_ONCE]
            rows += make_rows(prepared, some, pictured, partial, earlier=earlier, conditions=conditions)
        write_rows(rows, partial)
    page = data_page(
        rows,
        name=args.dataset,
        folder=folder.name,
        num_rows=len(prepared.dataset),
        kept_area=kept_of(prepared),
        changes=changes,
        cached="" if prepared.cache is None else describe_latents(prepared),
    )
    with complete_file(args.html) as partial:
        partial.write_text(render_page(page), encoding="utf-8")
    print(f"Page: {args.html}, with {folder}")
