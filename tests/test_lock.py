"""Folders that one program at a time may write."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hf_bucketing import BucketingError
from hf_bucketing.errors import WriteError
from hf_bucketing.files import complete_file, complete_folder
from hf_bucketing.lock import check_unlocked, locked

HERE = socket.gethostname()

KILLED = """
import os, sys, time
from pathlib import Path
from hf_bucketing.lock import locked
with locked(Path(sys.argv[1]), what="It"):
    worker = os.fork()
    if not worker:
        print("held", flush=True)
        os.close(1)
        time.sleep(60)
    time.sleep(60)
"""
"""A process that holds a lock, and a worker that it forked."""


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


def test_a_lock_is_held_whatever_the_clock_and_the_name_beside_it_say(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "run.lock"
    began = psutil.Process.create_time
    with locked(path, what="It"):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: began(self) + 10)  # the clock is put forward
        for name, holder in ((path.read_text(), f"process {os.getpid()} on host {HERE}"), ("", "another process")):
            path.write_text(name)
            with pytest.raises(BucketingError, match=f"It is written by {holder}. Wait"), locked(path, what="It"):
                pytest.fail("two hold the lock")
            with pytest.raises(BucketingError, match=f"It is written by {holder}. Wait"):
                check_unlocked(path, what="It")
        path.unlink()
        with pytest.raises(BucketingError, match="by another process"), locked(path, what="It"):
            pytest.fail("two hold the lock")


def test_the_lock_of_a_killed_process_is_free_at_once_though_its_workers_run(tmp_path: Path, caplog) -> None:
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        (worker,) = psutil.Process(process.pid).children()
        with pytest.raises(BucketingError, match=f"by process {process.pid} on host {HERE}"):
            check_unlocked(path, what="It")
        process.kill()
        process.wait()
        assert worker.is_running()
        with locked(path, what="It"):
            assert f"It was locked by process {process.pid} of this host, which has ended" in caplog.text
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_file_system_without_locks_has_a_file_for_a_lock_and_other_faults_of_it_are_named(
    tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "run.lock"

    def refuse(number: int) -> None:
        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    refuse(errno.ENOSYS)
    warns = pytest.warns(UserWarning, match="flock not supported")
    refused = pytest.raises(BucketingError, match=f"by process {os.getpid()}")
    with warns, locked(path, what="It"), refused, locked(path, what="It"):
        pytest.fail("two hold the lock")
    assert list(tmp_path.iterdir()) == []
    refuse(errno.ENOLCK)
    with pytest.raises(WriteError, match=r"run.lock.held cannot be locked \(No locks available\)"):
        locked(path, what="It").__enter__()


def test_the_lock_of_a_process_that_ended_is_taken_over_with_a_warning(tmp_path: Path, ended, caplog) -> None:
    path = tmp_path / "run.lock"
    same_number = {"host": HERE, "pid": os.getpid(), "began": 1.0}  # as in a container that was started again
    for content in (json.dumps(ended), json.dumps(same_number), "", "{}"):
        path.write_text(content)
        check_unlocked(path, what="It")
        with caplog.at_level(logging.WARNING), locked(path, what="It"):
            assert json.loads(path.read_text())["pid"] == os.getpid()
    assert [record.message.split(";")[0] for record in caplog.records] == [
        f"It was locked by process {ended['pid']} of this host, which has ended",
        f"It was locked by process {os.getpid()} of this host, which has ended",
        *["It was locked by a process that ended at once"] * 2,
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
