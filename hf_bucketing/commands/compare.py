r"""Say which rows of two prepared data sets differ, and in what; or of the data of a run and a prepared data set.

%(prog)s demo/prepared demo/prepared-again

Compared are hashes that preparing and caching write, and that a run keeps in its output folder: of each row's file,
clip and sizes, captions and conditions. No media is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_line.flags import FlagParser
from ..files import check_writable, complete_file
from ..report.data_rows import RowTexts, describe_difference, describe_row
from ..settings import check_at_least

if TYPE_CHECKING:
    pass


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("was", metavar="A", help="Prepared folder, or output folder of a run.")
    parser.add_argument("now", metavar="B", help="Prepared folder, or output folder of a run, to compare with it.")
    parser.add_argument("--max_rows", type=int, default=20, help="Rows to print of each kind.")
    parser.add_argument("--json", type=Path, help="JSON file for all rows that differ, by their numbers.")
    return parser


def read_texts(folder: str, rows: list[int]) -> list[RowTexts]:
    """Return the texts of some rows of a prepared folder; of a run, which holds no rows, none."""
    from ..columns import PreparedDataset
    from ..columns.prepared import MANIFEST

    if not Path(folder, MANIFEST).is_file():
        return [{} for _ in rows]
    prepared: PreparedDataset = PreparedDataset.load(folder)
    named = zip(rows, prepared.read_rows(rows), strict=True)
    return [describe_row(prepared, row, name=f"row {number}") for number, row in named]


def main(args: argparse.Namespace) -> None:
    from ..columns.data_lock import compare_locks, require_lock

    check_at_least(0, args, "max_rows")
    check_writable(args.json)
    was, now = require_lock(args.was), require_lock(args.now)
    changes = compare_locks(was, now)
    for folder, lock in ((args.was, was), (args.now, now)):
        print(f"{folder}: {len(lock):,} rows, digest {lock.digest}")
    print(changes.describe() or "The same rows.")
    for kind, folder, rows in (("removed", args.was, changes.removed), ("added", args.now, changes.added)):
        listed = rows[: args.max_rows].tolist()
        for row, texts in zip(listed, read_texts(folder, listed), strict=True):
            print(f"  {kind} row {row} {' '.join(texts.get('file', ()))}")
    pairs = [rows[: args.max_rows].tolist() for rows in (changes.was, changes.now)]
    was_texts, now_texts = read_texts(args.was, pairs[0]), read_texts(args.now, pairs[1])
    for position, (row, before, after) in enumerate(zip(pairs[1], was_texts, now_texts, strict=True)):
        differences = describe_difference(before, after, changes.fields_of(position))
        print(f"  changed row {row} {' '.join(after.get('file', ()))}: {'; '.join(differences)}")
    if args.json:
        values: dict[str, Any] = {name: getattr(changes, name).tolist() for name in ("added", "removed")}
        changed = zip(changes.was.tolist(), changes.now.tolist(), strict=True)
        values["changed"] = [
            {"was": before, "now": after, "fields": changes.fields_of(position)}
            for position, (before, after) in enumerate(changed)
        ]
        with complete_file(args.json) as partial:
            partial.write_text(json.dumps(values, indent=2) + "\n")
