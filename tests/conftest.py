"""Shared fixtures: generated media, tiny pipelines, a prepared data set, and programs run as a user runs them."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from filelock import FileLock

from tests.browser import browser  # noqa: F401  (a fixture of the session: playwright starts once)
from tests.processes import kill_forked_when, launch_forked, launched_environments, run, run_forked, spare_collector

if TYPE_CHECKING:
    from tests.devices import Device

# Results of an earlier run in datasets' cache must not hide what this run would compute.
_cache = tempfile.TemporaryDirectory(prefix="hf_bucketing_cache_")
os.environ["HF_DATASETS_CACHE"] = _cache.name

# Models of a few thousand weights run no faster on more threads, and sums over more threads round differently.
os.environ["OMP_NUM_THREADS"] = "1"

os.environ["HF_HUB_OFFLINE"] = "1"

# Scripts that fail in tests keep no error in the user's folder.
os.environ["HF_HOME"] = f"{_cache.name}/home"

# Started processes keep the compiled modules, which saves each later one half a second; so do runs of pytest, whose
# rewritten tests take each process of the next run five seconds less.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No test depends on speed, and CI must not fail by chance.
hypothesis.settings.register_profile("hf_bucketing", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("hf_bucketing")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_search() -> None:
    """A run that ends collects garbage: half of the time of a small one, among the objects of all imported modules."""
    spare_collector()


NO_SUCH_CASE = pytest.StashKey[str]()
"""Why the tests of a file fail: a pattern of `@pytest.mark.cases` in it is that of no case."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of tests with `@pytest.mark.cases(fast=(...), slow=(...))`, patterns of what runs more often."""
    named: defaultdict[tuple[Path, str], bool] = defaultdict(bool)
    for item in items:
        mark = item.get_closest_marker("cases")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        tier = "every"
        for name in ("slow", "fast"):
            for pattern in mark.kwargs.get(name, ()):
                matches = fnmatchcase(item.callspec.id, pattern)
                named[item.path, f"{item.originalname}[{pattern}]"] |= matches
                tier = name if matches else tier
        if tier != "fast":
            item.add_marker(tier)
    unused = dict(name for name, matches in named.items() if not matches)
    if unused and not any("::" in argument for argument in config.args) and _has_all_models():
        for item in items:
            if item.path in unused:
                item.stash[NO_SUCH_CASE] = f"No test is called {unused[item.path]}."


def _has_all_models() -> bool:
    """Return whether the installed diffusers has all models that tests have cases of."""
    import diffusers
    from packaging.version import Version

    from hf_bucketing.synthetic.pipelines import NEWEST

    return Version(diffusers.__version__) >= NEWEST


def pytest_runtest_setup(item: pytest.Item) -> None:
    if NO_SUCH_CASE in item.stash:
        pytest.fail(item.stash[NO_SUCH_CASE])
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that tests compute on, in float32 where that is said."""
    import torch

    from tests.devices import CUDA, PRETENDED

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # unlike that of matmul, on by default
    return {"pretended": PRETENDED, "cuda": CUDA}[request.param]


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import bitsandbytes, which `make test` installs in a folder of its own."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "bitsandbytes")


@pytest.fixture
def hooks_that_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hooks of tests, which change nothing, look at the blocks of models that run packs."""
    from hf_bucketing.packing import unchanged

    monkeypatch.setattr(unchanged, "_KNOWN", unchanged._KNOWN | {"tests"})


@pytest.fixture(scope="session")
def media_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty videos and images of nine sizes."""
    from hf_bucketing.synthetic.media import make_media_dataset

    folder = tmp_path_factory.mktemp("media") / "clips"
    make_media_dataset(folder, num_samples=20)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a pipeline of small random weights, by its name; tests read it and write elsewhere."""
    from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

    return lambda name: made_once(
        tmp_path_factory, f"tiny-{name}", lambda folder: make_tiny_pipeline(folder, family=name)
    )


@pytest.fixture(scope="session")
def pipeline_dir(tiny_folder: Callable[[str], Path]) -> Path:
    """A WanPipeline of small random weights."""
    return tiny_folder("wan")


@pytest.fixture(scope="session")
def pipeline_dirs(tiny_folder: Callable[[str], Path]) -> dict[str, Path]:
    """A pipeline of small random weights for each training recipe."""
    return {family: tiny_folder(family) for family in ("wan", "ltx", "latte")}


@pytest.fixture(scope="session")
def prepared_dir(media_dir: Path, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The media prepared by hf_bucketing prepare."""
    folder = tmp_path_factory.mktemp("prepared") / "prepared"
    run_script_here(
        "prepare_dataset.py",
        dataset=media_dir,
        pretrained_model_name_or_path=pipeline_dir,
        output_dir=folder,
        target_fps=8,
        bucket_tokens="60,110,150",
        bucket_frames="1,9,17,25",
    )
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills once in a run of pytest, for all processes of pytest-xdist."""
    folder = factory.getbasetemp() / name
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = factory.getbasetemp().parent / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture
def files_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let data sets name local files anywhere."""
    monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", "/")


@pytest.fixture
def column_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Record how columns of data sets are read; fail if one is read row by row, which takes seconds per million."""
    from datasets.arrow_dataset import Column

    from hf_bucketing.buckets import arrays

    read, get, each, stored = [], Column.__getitem__, Column.__iter__, arrays.stored_column
    monkeypatch.setattr(arrays, "stored_column", lambda rows, name: read.append(name) or stored(rows, name))
    monkeypatch.setattr(Column, "__getitem__", lambda column, key: read.append(key) or get(column, key))
    monkeypatch.setattr(Column, "__iter__", lambda column: read.append(0) or each(column))
    yield read
    assert not [key for key in read if isinstance(key, int)]


def as_flags(**settings: object) -> list[object]:
    """Return the flags of a script for settings: True is a flag alone, a list a flag with several values."""
    flags: list[object] = []
    for name, value in settings.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        flags += [f"--{name}", *values]
    return flags


def run_script(name: str, *args: object, check: bool = True, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a script of this repository, with settings as flags before the arguments, in a process of its own."""
    return run_forked([ROOT / "scripts" / name, *as_flags(**settings), *args], [dict(os.environ)], check=check)


def run_script_here(
    name: str, *args: object, check: bool = True, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run a script as [`run_script`] does, but in this process, whose imports are already paid for."""
    path = ROOT / "scripts" / name
    command = [str(path), *map(str, [*as_flags(**settings), *args])]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        return _run_here(command, lambda: runpy.run_path(command[0], run_name="__main__"), check=check)


def run_command_here(*words: object, check: bool = True, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `hf_bucketing` in this process, with settings as flags after its words."""
    from hf_bucketing.__main__ import main

    return _run_here(["hf_bucketing", *map(str, [*words, *as_flags(**settings)])], main, check=check)


def _run_here(command: list[str], main: Callable[[], object], *, check: bool) -> subprocess.CompletedProcess[str]:
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", command)
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            if isinstance(end.code, str):
                print(end.code, file=stderr)
    if check and code:
        pytest.fail(f"{' '.join(command)} exited with {code}:\n{stderr.getvalue()[-4000:]}")
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


TRAINING_SCRIPT = ROOT / "scripts" / "train_text_to_video.py"


def launch_training(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the training script as [`launch`] does."""
    return launch(TRAINING_SCRIPT, *args, **options)


def kill_training_when(done: Callable[[], bool], *args: object, num_processes: int) -> None:
    """Run the training script as [`launch`] does, and kill all its processes at once when something is done."""
    launched = launched_environments(launch_flags(num_processes), num_processes)
    each = [{**environment, "ACCELERATE_USE_CPU": "true"} for environment in launched]
    kill_forked_when(done, [TRAINING_SCRIPT, *args], each)


def launch(
    script: Path, *args: object, num_processes: int = 2, check: bool = True, forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script under `accelerate launch`, on CPU processes, or in forked processes of the same environment."""
    env = {"ACCELERATE_USE_CPU": "true"}
    if forked:
        flags = launch_flags(num_processes)
        return launch_forked(flags, [script, *args], num_processes=num_processes, env=env, check=check)
    return run(_launch_command(script, *args, num_processes=num_processes), check=check, env=env)


def launch_flags(num_processes: int) -> list[object]:
    """Return the flags of `accelerate launch` for CPU processes of one machine."""
    return [
        *as_flags(num_machines=1, mixed_precision="no", dynamo_backend="no", num_processes=num_processes),
        "--multi_gpu" if num_processes > 1 else "--cpu",
    ]


def _launch_command(script: Path, *args: object, num_processes: int) -> list[object]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", 0]
    return [*launcher, *launch_flags(num_processes), script, *args]


@pytest.fixture
def in_fresh_interpreter() -> Callable[[str], str]:
    """Run code in a new interpreter and return what it printed."""
    return lambda code: run([sys.executable, "-c", code]).stdout
