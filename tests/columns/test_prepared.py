"""Prepared folders: what training reads."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hf_bucketing import BucketingError, open_table
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.columns.prepared import CacheInfo
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.randomness import ROW
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
    assert back.dataset[ROW] == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["media", "prepared"]


def test_a_folder_that_is_no_prepared_data_set_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BucketingError, match="choose another folder"):
        prepared().save(tmp_path)
    with pytest.raises(BucketingError, match="hf_bucketing prepare"):
        PreparedDataset.load(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("version", [6, 10])
def test_folders_of_other_versions_are_refused_by_name(version: int, tmp_path: Path) -> None:
    prepared().save(tmp_path / "other")
    path = tmp_path / "other" / "bucketing.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))
    with pytest.raises(BucketingError, match=rf"has version {version}, but .* version 9; prepare it again"):
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


CACHE = CacheInfo(folder="cache", batching="bucket", latents_model="a", text_model=None, empty_text_key=None, views={})


def record_of_download(folder: Path, file: str, *, etag: str = "git") -> None:
    """Write what huggingface_hub leaves in a folder into which it downloaded a file."""
    data = (folder / file).read_bytes()
    blob = hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
    record = folder / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    record.parent.mkdir(parents=True, exist_ok=True)
    digest = {"git": blob, "lfs": hashlib.sha256(data).hexdigest()}[etag]
    record.write_text(f"{'0' * 40}\n{digest}\n1700000000.0\n")


def downloaded(changes: dict, place: Path, folder: Path) -> Path:
    """Make a prepared folder with other entries of its manifest, as if it was downloaded to a folder."""
    prepared(place / "media").save(folder)
    manifest = json.loads((folder / "bucketing.json").read_text())
    (folder / "bucketing.json").write_text(json.dumps({**manifest, **changes}))
    return folder


PLACES = [
    ({"root": "/"}, "/"),
    ({"root": "../../../../../../../../../../.."}, "/"),
    ({"root": "../.."}, "{above}"),
    ({"root": "../../elsewhere"}, "{above}/elsewhere"),
    ({"other_roots": ["../media", "/etc"]}, "/etc"),
    ({"root": "file:///"}, "file:///"),
    ({"root": "zip://x::https://server/a.zip"}, "zip://x::https://server/a.zip"),
    ({"root": "s3://bucket/clips"}, "s3://bucket/clips"),
    ({"cache": {**asdict(CACHE), "folder": "/cache"}}, "/cache"),
    ({"root": "../media"}, None),
    ({"root": ".."}, None),
    ({"root": "media", "other_roots": ["hf://datasets/owner/name"]}, None),
    ({"root": "https://server/clips", "cache": {**asdict(CACHE), "folder": "../cache"}}, None),
]


@pytest.mark.parametrize("etag", ["git", "lfs"])
@pytest.mark.parametrize(("changes", "refused"), PLACES)
def test_a_downloaded_folder_names_only_places_in_its_download(
    changes: dict, refused: str | None, etag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = downloaded(changes, tmp_path / "data", tmp_path / "data" / "prepared")
    record_of_download(tmp_path / "data", "prepared/bucketing.json", etag=etag)
    if refused is None:
        PreparedDataset.load(folder)
        return
    place = refused.format(above=tmp_path)
    with pytest.raises(BucketingError, match=rf"reads files from {place}.* HF_BUCKETING_ALLOWED_PATHS={place}"):
        PreparedDataset.load(folder)
    if "::" not in place:  # a chain of file systems is never allowed
        monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", f"s3://other, {place}")
        PreparedDataset.load(folder)


@pytest.mark.parametrize(("changes", "refused"), PLACES)
def test_a_folder_that_was_prepared_here_names_any_place_but_the_whole_disk(
    changes: dict, refused: str | None, tmp_path: Path
) -> None:
    folder = downloaded(changes, tmp_path / "data", tmp_path / "data" / "prepared")
    if refused == "/":
        with pytest.raises(BucketingError, match="reads files from /, the whole disk"):
            PreparedDataset.load(folder)
    else:
        PreparedDataset.load(folder)


def test_a_folder_in_the_cache_of_the_hub_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / "main"
    downloaded({"root": str(tmp_path / "private")}, snapshot, snapshot / "prepared")
    with pytest.raises(BucketingError, match=f"reads files from {tmp_path}/private, outside of"):
        PreparedDataset.load(snapshot / "prepared")
    (tmp_path / "link").symlink_to(snapshot / "prepared")
    with pytest.raises(BucketingError, match=r"reads files from .*, outside of .*snapshots/main/prepared"):
        PreparedDataset.load(tmp_path / "link")
    downloaded({"root": "../media"}, snapshot, snapshot / "prepared")
    assert PreparedDataset.load(snapshot / "prepared").root == str(snapshot / "media")


def test_rows_of_a_download_without_a_root_begin_there(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    data = tmp_path / "data"
    folder = downloaded({"root": None}, data, data / "prepared")
    assert PreparedDataset.load(folder).files.source(str(tmp_path / "secret.png"), name="row 0").path
    record_of_download(data, "prepared/bucketing.json")
    assert PreparedDataset.load(folder).root == str(data)
    with pytest.raises(BucketingError, match="HF_BUCKETING_ALLOWED_PATHS"):
        PreparedDataset.load(folder).files.source(str(tmp_path / "secret.png"), name="row 0")


def test_a_folder_that_is_prepared_again_is_no_download(tmp_path: Path) -> None:
    data = tmp_path / "data"
    folder = downloaded({"root": "../../elsewhere"}, data, data / "prepared")
    record_of_download(data, "prepared/bucketing.json")
    shutil.copytree(data, tmp_path / "copied")
    with pytest.raises(BucketingError, match="copied, to which it was downloaded"):
        PreparedDataset.load(tmp_path / "copied" / "prepared")
    prepared(tmp_path / "other").save(folder)
    assert PreparedDataset.load(folder).root == str(tmp_path / "other")
