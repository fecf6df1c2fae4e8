"""The tests of a device, as a program with a limit whose log is kept."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .measuring import Cases, Figures, Run

ROOT = Path(__file__).parents[3]
# With workers, pytest writes "[gw0] [ 49%] FAILED tests/…", and without them "tests/… FAILED [ 49%]".
WORKER = re.compile(r"^\[gw\d+\] .*?\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL) (tests/.*?) *$", re.MULTILINE)
ALONE = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)


def cases(run: Run) -> Cases:
    """Yield the tests that need a GPU; `tests.log` holds the outcome of each also where the limit ends them."""
    yield "pytest -m gpu", lambda: run_tests(run)


def run_tests(run: Run) -> Figures:
    parallel = importlib.util.find_spec("xdist") is not None and run.scale.on_gpu
    workers = ["-n", "8", "--dist", "worksteal"] if parallel else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "-p", "no:cacheprovider", *workers, run.scale.tests]
    log = run.folder / "tests.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with log.open("w") as lines:
        tests = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = tests.wait(run.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)  # with the workers of xdist
                tests.wait()
    return {"exit_code": code, **outcomes(log.read_text())}


def outcomes(log: str) -> Figures:
    """Return how many tests passed, failed and were skipped, by the lines of `pytest -v`, and which failed."""
    found = WORKER.findall(log) + [(outcome, name) for name, outcome in ALONE.findall(log)]
    counts = {outcome.lower(): number for outcome, number in Counter(outcome for outcome, _ in found).items()}
    return {**counts, "failures": sorted(name for outcome, name in found if outcome in ("FAILED", "ERROR"))}
