"""Prepared folders: what training reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from tests.columns.test_map_columns import TABLE, WAN, sized


def prepared(root: Path | None = None) -> PreparedDataset:
    dataset = map_columns(sized(file_name=list("abc")), BucketColumns(TABLE, WAN))
    return PreparedDataset(
        dataset=dataset, table=TABLE, spec=WAN, column="file_name", caption_column=None, root=root and str(root)
    )


def test_a_prepared_folder_is_read_back_whole_and_may_move_with_its_media(tmp_path: Path) -> None:
    (tmp_path / "here" / "media").mkdir(parents=True)
    prepared(tmp_path / "here" / "media").save(tmp_path / "here" / "prepared")
    prepared(tmp_path / "here" / "media").save(tmp_path / "here" / "prepared")
    (tmp_path / "here").rename(tmp_path / "there")
    back = PreparedDataset.load(tmp_path / "there" / "prepared")
    assert (back.table, back.spec, back.column, back.caption_column) == (TABLE, WAN, "file_name", None)
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


def test_folders_of_the_version_without_caches_are_read_and_newer_ones_refused(tmp_path: Path) -> None:
    prepared().save(tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "bucketing.json").read_text())
    assert manifest.pop("cache") is None
    (tmp_path / "old" / "bucketing.json").write_text(json.dumps({**manifest, "version": 1}))
    assert PreparedDataset.load(tmp_path / "old").cache is None
    (tmp_path / "old" / "bucketing.json").write_text(json.dumps({**manifest, "version": 5}))
    with pytest.raises(BucketingError, match="has version 5; prepare it again"):
        PreparedDataset.load(tmp_path / "old")
