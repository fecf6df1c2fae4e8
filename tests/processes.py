"""Programs in processes of their own: started anew, or forked from one that has imported what training needs.

Forked processes save the seconds of imports, also those of the fork server of their workers. They have the
environment that `accelerate launch` gives, run the script as `__main__`, and end together if one fails. What depends
on the launcher itself (its messages, Ctrl-C, a process that dies) is tested with `accelerate launch`.

As a program, this is the process that is forked: it reads a job per line from its standard input.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

IMPORTED = (
    "hf_bucketing.training.loop",
    "hf_bucketing.models.registry",
    "diffusers.pipelines.wan.pipeline_wan",
    "transformers.models.umt5.modeling_umt5",
    "transformers.models.t5.tokenization_t5",
    "torch.utils.tensorboard",
)

HANG_GUARD = 1080.0
"""Seconds after which a started process counts as hung: less than pytest's own limit, which would end the run."""

_GRACE = 10.0
"""Seconds that processes have to end after one has failed."""


def launch_forked(
    flags: Sequence[object],
    command: Sequence[object],
    *,
    num_processes: int,
    env: Mapping[str, str],
    check: bool = True,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, with arguments, in the processes that `accelerate launch` would start.

    Args:
        flags (sequence): Flags of the launcher; those of `accelerate launch` and of the number of processes.
        command (sequence): Script or module, and its arguments.
        num_processes (`int`): Number of processes that the flags ask for.
        env (mapping): Variables beside those of this process and of the launcher.
        check (`bool`): Whether a command that fails fails the test.
        cwd (`Path`, *optional*): Working directory.
    """
    each = [{**launched, **env} for launched in launched_environments(flags, num_processes)]
    return run_forked(command, each, check=check, cwd=cwd)


def launched_environments(flags: Sequence[object], num_processes: int) -> list[dict[str, str]]:
    """Return the environment of each process that `accelerate launch` with these flags would start."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = launch_command_parser().parse_args([*map(str, flags), "--main_process_port", "0", "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    if num_processes == 1:
        return [prepare_simple_launcher_cmd_env(arguments)[1]]
    common = prepare_multi_gpu_env(arguments)
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.main_process_port)}
    common |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes), "GROUP_RANK": "0"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.processes"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)


def run_forked(
    command: Sequence[object], each: Sequence[Mapping[str, str]], *, check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m` and a module, with arguments, once for each environment, as [`run`] does."""
    with tempfile.TemporaryDirectory() as name:
        files = _submit(command, each, folder=Path(name), cwd=cwd)
        end = time.monotonic() + HANG_GUARD
        while not files["code"].exists():
            assert _server().poll() is None, "the process that is forked has ended"
            if time.monotonic() > end:
                dump_stacks_and_end(int(files["pid"].read_text()))
                files["code"].write_text("hung")
            time.sleep(0.02)
        code, stdout, stderr = (files[file].read_text() for file in ("code", "stdout", "stderr"))
    arguments = [str(part) for part in command]
    return _ended(arguments, None if code == "hung" else int(code), stdout, stderr, check=check)


def kill_forked_when(
    done: Callable[[], bool], command: Sequence[object], each: Sequence[Mapping[str, str]], *, timeout: float = 240
) -> None:
    """Run a script as [`run_forked`] does, and kill all its processes at once when something is done."""
    with tempfile.TemporaryDirectory() as name:
        files = _submit(command, each, folder=Path(name), cwd=None)
        deadline = time.monotonic() + timeout
        while not done():
            assert not files["code"].exists(), f"it ended before it could be killed:\n{files['stderr'].read_text()}"
            assert time.monotonic() < deadline, "it never came as far"
            time.sleep(0.05)
        first = psutil.Process(int(files["pid"].read_text()))
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)


def _submit(
    command: Sequence[object], each: Sequence[Mapping[str, str]], *, folder: Path, cwd: Path | None
) -> dict[str, Path]:
    """Let the server fork a process for each environment; return the files for what they print, pid and exit code."""
    files = {file: folder / file for file in ("stdout", "stderr", "pid", "code")}
    job = {
        "arguments": [str(part) for part in command],
        "environments": [{**environment, "PYTHONFAULTHANDLER": "1"} for environment in each],
        "files": {file: str(path) for file, path in files.items()},
        "cwd": str(cwd or Path.cwd()),
    }
    stdin = _server().stdin
    assert stdin is not None
    stdin.write(json.dumps(job) + "\n")
    stdin.flush()
    return files


def run(
    command: list[object],
    *,
    check: bool = True,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = HANG_GUARD,
) -> subprocess.CompletedProcess[str]:
    """Run a command offline and return what it printed; with `check`, a command that fails fails the test.

    A command that hangs fails the test after `timeout` seconds, with the stacks of all Python processes it started.
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})}
    arguments = [str(part) for part in command]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
    )
    code: int | None
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        dump_stacks_and_end(process.pid)
        stdout, stderr = process.communicate()
        code = None
    return _ended(arguments, code, stdout, stderr, check=check)


def _ended(
    arguments: list[str], code: int | None, stdout: str, stderr: str, *, check: bool
) -> subprocess.CompletedProcess[str]:
    """Return what a command printed; fail the test if it hung (no code) or, with `check`, failed."""
    if code is None:
        pytest.fail(f"{' '.join(arguments)} hung:\n{stdout[-4000:]}\n{stderr[-16000:]}")
    if check and code:
        pytest.fail(f"{' '.join(arguments)} exited with {code}:\n{stderr[-16000:]}")
    return subprocess.CompletedProcess(arguments, code, stdout, stderr)


def dump_stacks_and_end(pid: int) -> None:
    """End a process and all its children; those started with PYTHONFAULTHANDLER print their stacks first."""
    started = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for signal_number in (signal.SIGABRT, signal.SIGKILL):  # the first prints the stacks
        for child in started:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal_number)
        psutil.wait_procs(started, timeout=3)


def spare_collector() -> None:
    """Keep what exists now, most of it modules, out of later searches for garbage."""
    gc.collect()
    gc.freeze()


def _serve() -> dict[str, Any]:
    """Fork a process for each job that is read; return in the processes that run a script, with what they run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _start(json.loads(line))
    os._exit(0)


def _start(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the processes of a job and wait for them; return in each of these."""
    os.setsid()
    files = job["files"]
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        opened = os.open(files[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Path(files["pid"]).write_text(str(os.getpid()))
    running = set()
    for environment in job["environments"]:
        pid = os.fork()
        if pid == 0:
            return {**job, "environment": environment}
        running.add(pid)
    code, killed_at = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > killed_at:
                _signal(running, signal.SIGKILL)
            time.sleep(0.02)
            continue
        running.discard(pid)
        if status and not code:
            code, killed_at = 1, time.monotonic() + _GRACE
            _signal(running, signal.SIGTERM)
            if len(job["environments"]) == 1:
                code = os.waitstatus_to_exitcode(status)
    Path(files["code"] + ".partial").write_text(str(code))
    Path(files["code"] + ".partial").rename(files["code"])
    os._exit(0)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _run(job: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    _fork_server_of_workers()
    script, *arguments = job["arguments"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if script == "-m":
        module, *arguments = arguments
        sys.path[0] = job["cwd"]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).parent)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def _fork_server_of_workers() -> None:
    """Fork the server of this process's DataLoader workers, which multiprocessing would start anew."""

    def fork(executable: str, arguments: Sequence[str], passed: Sequence[int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in passed:
                with suppress(OSError):  # the one that listed them
                    os.close(descriptor)
        try:
            exec(arguments[-1], {})  # multiprocessing's own program, which ends with its last client
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", fork)
        forkserver.ensure_running()


if __name__ == "__main__":
    import faulthandler
    import importlib

    for imported in IMPORTED:
        importlib.import_module(imported)
    faulthandler.enable()
    spare_collector()
    _run(_serve())
