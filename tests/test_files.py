"""Files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_bucketing import BucketingError
from hf_bucketing.files import complete_file, complete_folder, complete_parts, partial_path, remove_folders


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_replaces_the_earlier_one_at_the_end(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    for content in ("old", "new"):
        with complete_file(path, shared=shared) as partial:
            partial.write_text(content)
            assert path.exists() == (content == "new")
        assert path.read_text() == content
    assert names(path.parent) == ["report.json"]


def test_writers_of_a_shared_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with complete_file(path, shared=True) as one, complete_file(path, shared=True) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"
    with pytest.raises(FileNotFoundError), complete_file(path) as one, complete_file(path) as other:
        other.write_text("the only file")
    assert names(tmp_path) == ["entry"]


def test_an_error_leaves_the_earlier_file_and_the_earlier_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part").write_text("old")

    def write_half(context: AbstractContextManager[Path]) -> None:
        with context as partial:
            (partial / "part" if partial.is_dir() else partial).write_text("ne")
            raise RuntimeError

    for context in (
        complete_file(tmp_path / "file"),
        complete_folder(tmp_path / "folder"),
        complete_parts(tmp_path / "folder", last="part"),
    ):
        with pytest.raises(RuntimeError):
            write_half(context)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "part").read_text() == "old"
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["part"]


def test_a_folder_replaces_the_earlier_one_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with complete_folder(path) as partial:
        (partial / "one").write_text("1")
    partial_path(path).mkdir()
    (partial_path(path) / "left").write_text("by a killed writer")
    with complete_folder(path) as partial:
        assert partial == partial_path(path)
        (partial / "two").write_text("2")
        assert names(path) == ["one"]
    assert names(path) == ["two"]
    assert names(tmp_path) == ["data"]


def test_a_folder_whose_deletion_is_cut_short_has_lost_its_name_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("save-1", "save-2", "other-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_folders([tmp_path / "save-1"])
    assert names(tmp_path) == [".save-1.replaced", "other-1", "save-2"]
    remove_folders([tmp_path / "save-2"])
    assert names(tmp_path) == ["other-1"]


def test_a_folder_without_the_marker_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    refused = pytest.raises(BucketingError, match=r"holds no index\.json, so it is not replaced")
    with refused, complete_folder(tmp_path, marker="index.json"):
        pytest.fail("nothing is written")
    (tmp_path / "index.json").write_text("{}")
    with complete_folder(tmp_path, marker="index.json"):
        pass
    assert names(tmp_path) == []


def test_parts_join_what_a_folder_holds_and_the_last_one_marks_them_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("logs", "vae"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("")
    (tmp_path / "index.json").write_text("old")
    order, replace = [], Path.replace

    def note(path: Path, target: Path) -> Path:
        order.append((path.name, (tmp_path / "index.json").exists()))
        return replace(path, target)

    with complete_parts(tmp_path, last="index.json") as partial:
        (partial / "index.json").write_text("new")
        (partial / "vae").mkdir()
        (partial / "vae" / "new").write_text("")
        monkeypatch.setattr(Path, "replace", note)
    assert order == [("vae", False), ("index.json", False)]
    assert (tmp_path / "index.json").read_text() == "new"
    assert (names(tmp_path / "vae"), names(tmp_path / "logs")) == (["new"], ["old"])
    assert names(tmp_path) == ["index.json", "logs", "vae"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads which file a descriptor belongs to")
def test_folders_are_on_the_disk_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), (tmp_path / "data").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with complete_folder(tmp_path / "data") as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").write_text("content")
    before = {path for path, named in flushed if not named}
    assert before == {partial, partial / "sub", partial / "sub" / "file"}
    assert flushed[-1] == (tmp_path, True)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_safetensors_have_the_permissions_of_other_files(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with complete_file(tmp_path / "one.safetensors") as partial:
            save_file({"a": np.zeros(3)}, partial)
        with complete_folder(tmp_path / "folder") as folder:
            (folder / "below").mkdir()
            save_file({"a": np.zeros(3)}, folder / "below" / "two.safetensors")
            (folder / "link").symlink_to("below")
        with complete_parts(tmp_path / "parts") as folder:
            save_file({"a": np.zeros(3)}, folder / "three.safetensors")
    finally:
        os.umask(before)
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {mode}
    assert not [*tmp_path.rglob(".*")], "nothing else is left"
