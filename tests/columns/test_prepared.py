"""Prepared folders: what training reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_bucketing import BucketingError, open_table
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.media.references import ReferenceRule
from tests.columns.test_map_columns import TABLE, WAN, sized


def prepared(root: Path | None = None) -> PreparedDataset:
    dataset = map_columns(sized(file_name=list("abc")), BucketColumns(TABLE, WAN))
    return PreparedDataset(
        dataset=dataset,
        table=TABLE,
        open_table=open_table(WAN, max_frames=33),
        column="file_name",
        caption_column=None,
        root=root and str(root),
    )


def test_a_prepared_folder_is_read_back_whole_and_may_move_with_its_media(tmp_path: Path) -> None:
    (tmp_path / "here" / "media").mkdir(parents=True)
    prepared(tmp_path / "here" / "media").save(tmp_path / "here" / "prepared")
    prepared(tmp_path / "here" / "media").save(tmp_path / "here" / "prepared")
    (tmp_path / "here").rename(tmp_path / "there")
    back = PreparedDataset.load(tmp_path / "there" / "prepared")
    assert (back.table, back.open_table) == (TABLE, open_table(WAN, max_frames=33))
    assert (back.spec, back.column, back.caption_column) == (WAN, "file_name", None)
    assert back.root == str(tmp_path / "there" / "media")
    assert back.dataset["index"] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["media", "prepared"]


def test_a_folder_that_is_no_prepared_data_set_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BucketingError, match="choose another folder"):
        prepared().save(tmp_path)
    with pytest.raises(BucketingError, match="prepare_dataset"):
        PreparedDataset.load(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("version", [6, 9])
def test_folders_of_other_versions_are_refused_by_name(version: int, tmp_path: Path) -> None:
    prepared().save(tmp_path / "other")
    path = tmp_path / "other" / "bucketing.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(BucketingError, match=rf"has version {version}, but .* version 8; prepare it again"):
        PreparedDataset.load(tmp_path / "other")


def test_folders_from_before_references_are_read_unless_they_have_some(tmp_path: Path) -> None:
    data = replace(prepared(tmp_path / "media"), references=ReferenceRule(multiples=prepared().spec.multiples))
    for name, conditions in (("without", {"mask": "caption"}), ("with", {"reference": "caption"})):
        replace(data, conditions=conditions).save(tmp_path / name)
        path = tmp_path / name / "bucketing.json"
        manifest = json.loads(path.read_text())
        del manifest["references"]
        manifest["open_table"]["spec"]["added_frames"] = 0
        path.write_text(json.dumps({**manifest, "version": 7}))
    assert PreparedDataset.load(tmp_path / "without").files == replace(data, conditions={"mask": "caption"}).files
    with pytest.raises(BucketingError, match="before the sizes of references became a column; prepare it again"):
        PreparedDataset.load(tmp_path / "with")


def test_files_are_named_by_their_path_or_their_row() -> None:
    data = prepared()
    assert data.file_names([2, 0]) == ["c", "a"]
    cells = [{"bytes": b"x", "path": None}, {"bytes": None, "path": "b.png"}, {"bytes": b"x", "path": "c.png"}]
    nameless = data.dataset.remove_columns("file_name").add_column("file_name", cells)
    assert replace(data, dataset=nameless).file_names([0, 1]) == ["row 0", "b.png"]
