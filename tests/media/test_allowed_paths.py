"""What a data set may name: files below its folder or URL, servers, the hub, and what the person allows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_bucketing.columns import MediaMetadata, load_source, map_columns
from hf_bucketing.errors import MediaError
from hf_bucketing.media.remote import check_allowed
from hf_bucketing.media.rows import MediaColumns
from hf_bucketing.media.source import MediaSource

ROOT = "/data/set"


@pytest.mark.parametrize(
    ("cell", "root"),
    [
        ("/data/set/a.mp4", ROOT),
        ("/data/set/../set/a.mp4", ROOT),
        ("https://server/a.mp4", ROOT),
        ("http://server/a.mp4", "s3://bucket"),
        ("hf://datasets/owner/name/a.mp4", ROOT),
        ("s3://bucket/set/a.mp4", "s3://bucket/set"),
        ("memory://anywhere.mp4", None),
    ],
)
def test_a_cell_may_name(cell: str, root: str | None) -> None:
    check_allowed(cell, root)


@pytest.mark.parametrize(
    ("cell", "root"),
    [
        ("/etc/passwd", ROOT),
        ("/data/sets/a.mp4", ROOT),
        ("/data/set/../other/a.mp4", ROOT),
        ("../other/a.mp4", ROOT),
        ("file:///etc/passwd", ROOT),
        ("file:///etc/passwd", "hf://datasets/owner/name"),
        ("/etc/passwd", "hf://datasets/owner/name"),
        ("zip://inside.mp4::https://server/a.zip", ROOT),
        ("https://server/a.zip::file:///etc/passwd", ROOT),
        ("reference://a.mp4", ROOT),
        ("s3://bucket/set2/a.mp4", "s3://bucket/set"),
        ("s3://bucket/set/../a.mp4", "s3://bucket/set"),
        ("S3://other/a.mp4", "s3://bucket/set"),
    ],
)
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_cell_may_not_name(cell: str, root: str, as_dict: bool) -> None:
    value = {"path": cell, "bytes": None} if as_dict else cell
    with pytest.raises(MediaError, match=r"HF_BUCKETING_ALLOWED_PATHS|leaves its root"):
        MediaSource.from_cell(value, root=root)
    with pytest.raises(MediaError, match=r"HF_BUCKETING_ALLOWED_PATHS|leaves its root"):
        MediaColumns(column="media", root=root, conditions={"mask": "mask"}).condition(
            "mask", {"mask": value}, name="row 0"
        )


def test_a_folder_and_its_files_may_be_named_behind_links(tmp_path: Path) -> None:
    """A folder may be a link, and tables may name its files by other links than the given one."""
    (tmp_path / "disk" / "cats").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / "disk" / "cats" / "a.png")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    loaded = load_source(str(tmp_path / "link"))
    assert loaded.column == "image", "read by datasets"
    assert map_columns(loaded.dataset, MediaMetadata("image", root=loaded.root))["width"][:] == [12]
    linked = str(tmp_path / "link" / "cats" / "a.png")
    assert MediaSource.from_cell(linked, root=tmp_path / "disk").path == linked
    (tmp_path / "disks").mkdir()
    with pytest.raises(MediaError, match="lies outside"):
        MediaSource.from_cell(linked, root=tmp_path / "disks")


def test_the_person_allows_more_and_the_message_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "elsewhere").mkdir()
    Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / "elsewhere" / "a.png")
    row = {"file_name": str(tmp_path / "elsewhere" / "a.png"), "caption": "a"}
    (tmp_path / "set" / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    loaded = load_source(str(tmp_path / "set"))
    metadata = MediaMetadata(loaded.column, root=loaded.root)
    with pytest.raises(MediaError, match=f"such as HF_BUCKETING_ALLOWED_PATHS={tmp_path}/elsewhere"):
        map_columns(loaded.dataset, metadata)
    monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", f"s3://bucket, {tmp_path}/elsewhere")
    assert map_columns(loaded.dataset, metadata)["width"][:] == [12]
