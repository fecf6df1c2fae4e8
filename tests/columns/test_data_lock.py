"""The lock of a data set: it changes with what a model sees of a row, and with nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_bucketing import BucketingError, BucketTable, LatentSpec, Size, open_table
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.columns.data_lock import (
    LOCK_FILE,
    LOCKED,
    DataChanges,
    DataLock,
    compare_locks,
    read_lock,
    require_lock,
)
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.conditions.references import ReferenceRule

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 32, 64), Size(5, 32, 64)))
NAMES = ["a.png", "b.png", "c.mp4", "c.mp4"]
COLUMNS = {
    "image": NAMES,
    "caption": ["a", "b", "c", "d"],
    "width": [70, 100, 64, 64],
    "height": [64, 40, 32, 32],
    "num_frames": [1, 1, 9, 9],
    "fps": [0.0, 0.0, 8.0, 8.0],
    "clip_start": [None, None, 0.0, 2.0],
    "clip_end": [None, None, 1.0, 3.0],
    "mask": [None, "b.png", None, None],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def prepared_of(folder: Path, **columns: list[object]) -> PreparedDataset:
    rows = Dataset.from_dict({**COLUMNS, **columns})
    return PreparedDataset(
        dataset=map_columns(rows, BucketColumns(TABLE, SPEC)),
        table=TABLE,
        open_table=open_table(SPEC),
        column="image",
        caption_column="caption",
        root=str(folder),
        conditions={"mask": "mask"},
    )


def lock_of(prepared: PreparedDataset) -> DataLock:
    return prepared.lock_rule.lock(prepared.dataset)


def changed(was: DataLock, now: DataLock) -> dict[int, list[str]]:
    """Return the changed rows, each with its fields; check that no row was added or removed."""
    changes = compare_locks(was, now)
    assert not len(changes.added)
    assert not len(changes.removed)
    return {row: changes.fields_of(position) for position, row in enumerate(changes.now.tolist())}


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({"caption": ["a", "B", "c", "d"]}, {1: ["caption"]}),
        ({"caption": [["a"], ["b"], ["c", "d"], ["d"]]}, {2: ["caption"]}),
        ({"clip_start": [None, None, 0.5, 2.0]}, {2: ["size"]}),
        ({"width": [70, 100, 64, 80]}, {3: ["size"]}),
        ({"fps": [0.0, 0.0, 8.0, 16.0]}, {3: ["size"]}),
        ({"mask": [None, None, None, None]}, {1: ["conditions"]}),
        ({ROW_WEIGHT: [1.0, 2.0, 3.0, 4.0]}, {}),
    ],
    ids=["caption", "one of several captions", "clip", "size", "frame rate", "mask", "weight"],
)
def test_a_row_changes_in_the_field_that_changed(
    columns: dict[str, list[object]], rows: dict[int, list[str]], folder: Path
) -> None:
    assert changed(lock_of(prepared_of(folder)), lock_of(prepared_of(folder, **columns))) == rows


def test_rows_change_in_whether_the_model_hears_them(folder: Path) -> None:
    rule = AudioRule(rate=16000, samples_per_token=640)
    heard = [
        replace(prepared_of(folder, has_audio=flags), audio=rule)
        for flags in ([False, False, True, True], [False, False, True, False])
    ]
    assert changed(lock_of(heard[0]), lock_of(heard[1])) == {3: ["conditions"]}


def test_files_change_with_their_length_and_time_and_so_do_files_of_conditions(folder: Path) -> None:
    data = prepared_of(folder)
    was = lock_of(data)
    os.utime(folder / "c.mp4", ns=(0, 1))
    assert changed(was, lock_of(data)) == {2: ["file"], 3: ["file"]}
    (folder / "b.png").unlink()
    assert changed(was, lock_of(data))[1] == ["file", "conditions"]


def test_rules_of_the_whole_data_set_change_the_rows_that_they_concern(folder: Path) -> None:
    data = prepared_of(folder)
    was = lock_of(data)
    shorter = replace(data, open_table=open_table(SPEC, max_frames=5))
    assert changed(was, lock_of(shorter)) == {2: ["size"], 3: ["size"]}
    other = BucketTable(sizes=(Size(1, 64, 64), Size(1, 32, 48), Size(5, 32, 64)))
    assert changed(was, lock_of(replace(data, table=other))) == {1: ["size"]}
    data = replace(data, conditions={"reference": "mask"})
    smaller = replace(data, references=ReferenceRule(max_pixels=64))
    assert {*map(tuple, changed(lock_of(data), lock_of(smaller)).values())} == {("conditions",)}


def test_files_in_memory_are_known_by_their_contents(folder: Path) -> None:
    cells = [{"bytes": bytes([number]) * 200_000, "path": None} for number in range(4)]
    data = prepared_of(folder, image=cells)
    was = lock_of(data)
    assert changed(was, lock_of(data)) == {}
    cells[2] = {"bytes": b"\2" * 199_999 + b"x", "path": None}
    changes = compare_locks(was, lock_of(prepared_of(folder, image=cells)))
    assert (changes.added.tolist(), changes.removed.tolist()) == ([2], [2])


def made(*rows: tuple[int, ...]) -> DataLock:
    columns = np.array(rows).reshape(-1, 5).T
    return DataLock(**dict(zip(("name", *LOCKED), columns, strict=True)))


def test_rows_are_paired_by_what_they_have_most_in_common() -> None:
    """A removed clip leaves the other clips of its file as they were."""
    was = made((1, 1, 1, 1, 1), (2, 1, 1, 1, 1), (2, 1, 2, 1, 1), (2, 1, 3, 1, 1), (3, 1, 1, 1, 1))
    now = made((4, 1, 1, 1, 1), (2, 1, 3, 9, 1), (2, 1, 2, 1, 1), (1, 1, 1, 1, 1))
    changes = compare_locks(was, now)
    assert (changes.added.tolist(), changes.removed.tolist()) == ([0], [1, 4])
    assert (changes.was.tolist(), changes.now.tolist()) == ([3], [1])
    assert changes.fields_of(0) == ["caption"]
    assert changes.describe() == "Rows: 1 added, 2 removed, 1 changed (1 in caption; row 1)."


def test_rows_that_are_alike_are_counted_each(folder: Path) -> None:
    changes = compare_locks(made((1, 1, 1, 1, 1)), made(*[(1, 1, 1, 1, 1)] * 3))
    assert changes.added.tolist() == [1, 2]
    same = made((1, 1, 1, 1, 1), (2, 1, 1, 1, 1))
    assert compare_locks(same, same).describe() == ""
    assert compare_locks(same, made((2, 1, 1, 1, 1), (1, 1, 1, 1, 1))).describe() == "The same rows in another order."
    nothing: DataChanges = compare_locks(made(), made())
    assert nothing.describe() == ""


def test_hashes_are_the_same_on_all_machines() -> None:
    """Locks of two machines and of two releases are compared: a new hash needs a new RULE_VERSION."""
    data = prepared_of(Path("/nowhere"))
    assert lock_of(data).digest == "eb28be6726fefb61"


def test_a_prepared_folder_holds_its_lock_and_one_of_before_is_read_without(folder: Path) -> None:
    data = prepared_of(folder)
    data.save(folder / "prepared")
    lock = require_lock(folder / "prepared")
    assert np.array_equal(lock.rows, lock_of(data).rows)
    (folder / "prepared" / LOCK_FILE).unlink()
    assert len(PreparedDataset.load(folder / "prepared").dataset) == 4
    assert read_lock(folder / "prepared") is None
    with pytest.raises(BucketingError, match=rf"prepared holds no {LOCK_FILE} .* prepared again"):
        require_lock(folder / "prepared")
