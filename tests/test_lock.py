"""Folders that one program at a time may write."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hf_bucketing import BucketingError
from hf_bucketing.files import complete_file, complete_folder
from hf_bucketing.lock import check_unlocked, locked

HERE = socket.gethostname()


@pytest.fixture(scope="module")
def ended() -> dict[str, object]:
    """The owner of a lock that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(process.pid).create_time()
    process.communicate()
    return {"host": HERE, "pid": process.pid, "began": began}


def test_a_second_writer_is_refused_by_host_and_process_until_the_first_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.lock"
    with locked(path, what="The run in new"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        refused = f"The run in new is written by process {os.getpid()} on host {HERE}. Wait for its end"
        with pytest.raises(BucketingError, match=refused), locked(path, what="The run in new"):
            pytest.fail("two hold the lock")
        with pytest.raises(BucketingError, match=refused):
            check_unlocked(path, what="The run in new")
    check_unlocked(path, what="The run in new")
    with pytest.raises(RuntimeError), locked(path, what="The run in new"):
        raise RuntimeError
    assert list(path.parent.iterdir()) == []


def test_the_lock_of_a_process_that_ended_is_taken_over_with_a_warning(tmp_path: Path, ended, caplog) -> None:
    path = tmp_path / "run.lock"
    same_number = {"host": HERE, "pid": os.getpid(), "began": 1.0}  # as in a container that was started again
    for content in (json.dumps(ended), json.dumps(same_number), ""):
        path.write_text(content)
        check_unlocked(path, what="It")
        with caplog.at_level(logging.WARNING), locked(path, what="It"):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    assert [record.message.split(";")[0] for record in caplog.records] == [
        f"It was locked by process {ended['pid']} of this host, which has ended",
        f"It was locked by process {os.getpid()} of this host, which has ended",
        "It was locked by a process that ended at once",
    ]
    assert list(tmp_path.iterdir()) == []


def test_of_another_host_the_error_names_the_file_to_remove(tmp_path: Path, ended) -> None:
    path = tmp_path / "run.lock"
    path.write_text(json.dumps({**ended, "host": "other"}))
    with pytest.raises(BucketingError, match=f"on host other. If that process has ended, remove {path}"):
        check_unlocked(path, what="It")
    with pytest.raises(BucketingError, match="on host other"), locked(path, what="It"):
        pytest.fail("two hold the lock")
    assert path.exists()


def test_two_writers_of_a_folder_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with complete_folder(path) as first:
        (first / "one").write_text("1")
        with pytest.raises(BucketingError, match=f"{path} is written by process"), complete_folder(path):
            pytest.fail("two write")
    assert [file.name for file in path.iterdir()] == ["one"]
    assert [file.name for file in tmp_path.iterdir()] == ["data"]


def test_what_a_killed_process_left_of_a_file_goes_with_the_next_and_that_of_a_living_one_stays(
    tmp_path: Path, ended
) -> None:
    names = [f".a.[1].{HERE}-{pid}.partial" for pid in (ended["pid"], os.getppid())] + [".a.[1].other-7.partial"]
    for name in names:
        (tmp_path / name).touch()
    with complete_file(tmp_path / "a.[1]") as partial:
        partial.write_text("new")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*names[1:], "a.[1]"])
