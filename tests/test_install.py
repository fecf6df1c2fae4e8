"""The README's install, from a clone as git makes it: where it can be imported from, and with the newest versions."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, run

pytestmark = pytest.mark.slow

CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
ALONE = {"PYTHONPATH": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
CORE = ["test_import.py", "test_media.py", "test_metadata.py", "test_video.py"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder named hf_bucketing, with the changes of the working tree."""
    folder = tmp_path_factory.mktemp("home") / "hf_bucketing"
    listed = run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def beside(clone: Path) -> Path:
    """A Python with an editable install of the clone, and all else from the running one."""
    python = make_venv(clone.parent / "venv", Path(sys.executable))
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", clone], env=ALONE)
    (site_packages,) = (clone.parent / "venv" / "lib").glob("python*/site-packages")
    (site_packages / "zz_running.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture(scope="module")
def newest(clone: Path) -> Path:
    """The newest Python at hand that setup.cfg names, with the newest versions that it allows.

    Only torch is pinned, as in constraints.txt, so that a CPU build that is at hand is taken. PyPI has none for Linux:
    elsewhere this downloads about 3 GB and fills 6 GB.
    """
    if shutil.disk_usage(clone.parent).free < 12 * 2**30:
        pytest.skip(f"torch with CUDA needs 12 GiB of free disk at {clone.parent}")
    python = make_venv(clone.parent / "newest", newest_python())
    (torch,) = re.findall(r"^torch==.+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    packages = [f"{clone}[train]", torch, "pytest", "hypothesis", "psutil"]
    run([python, "-m", "pip", "install", "--quiet", "--no-compile", "--editable", *packages], env=ALONE, timeout=1500)
    return python


def make_venv(folder: Path, python: Path) -> Path:
    run([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def pythons() -> Iterator[Path]:
    """Yield the Pythons on PATH and in pyenv's folder, working or not."""
    yield Path(sys.executable)
    for folder in os.get_exec_path():
        yield from Path(folder).glob("python3.*[0-9]")
    yield from Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin/python3")


def newest_python() -> Path:
    named = re.findall(r"Python :: 3\.(\d+)", CONFIG["metadata"]["classifiers"])
    found = {}
    for path in pythons():
        code = "import sys, venv, ensurepip; print(sys.version_info[1])"
        tried = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if tried.returncode == 0 and tried.stdout.strip() in named:
            found[int(tried.stdout)] = path
    return found[max(found)]


def test_beside_the_clone_the_package_is_imported_and_not_the_folder(clone: Path, beside: Path) -> None:
    code = "import hf_bucketing; from hf_bucketing import LatentSpec; print(hf_bucketing.__file__)"
    for cwd in (clone.parent, clone, clone.parent.parent):
        imported = run([beside, "-c", code], cwd=cwd, env=ALONE).stdout.strip()
        assert imported == str(clone / "hf_bucketing" / "__init__.py")


def test_new_files_of_the_clone_need_no_new_install(clone: Path, beside: Path) -> None:
    added = clone / "hf_bucketing" / "added.py"
    added.write_text("number = 7")
    code = "import hf_bucketing.added as added; print(added.number)"
    assert run([beside, "-c", code], cwd=clone.parent, env=ALONE).stdout == "7\n"
    added.unlink()


def test_type_checkers_see_the_types_of_an_editable_install(clone: Path, beside: Path, tmp_path: Path) -> None:
    (clone.parent / "own.py").write_text("from hf_bucketing import LatentSpec\nreveal_type(LatentSpec.num_tokens)\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", beside, "--cache-dir", tmp_path, "own.py"]
    result = run([*command, "--follow-imports", "silent"], cwd=clone.parent, env=ALONE, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r'Revealed type is "def \(.*\) -> .*int', result.stdout), result.stdout


def test_the_newest_versions_prepare_and_train(clone: Path, newest: Path, tmp_path: Path) -> None:
    media, pipeline, prepared, trained = (tmp_path / name for name in ("media", "tiny-wan", "prepared", "trained"))
    for script, *arguments in (
        ("make_demo_dataset.py", "--output_dir", media, "--num_samples", 12),
        ("make_tiny_pipeline.py", "--output_dir", pipeline),
        (
            *("prepare_dataset.py", "--dataset", media, "--output_dir", prepared, "--target_fps", 8),
            *("--pretrained_model_name_or_path", pipeline),
            *("--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25"),
        ),
        (
            *("train_text_to_video.py", "--dataset_dir", prepared, "--output_dir", trained, "--batching", "pack"),
            *("--pretrained_model_name_or_path", pipeline, "--max_tokens", 640, "--strip_length", 16),
            *("--max_sequence_length", 64, "--max_train_steps", 2),
        ),
    ):
        run(
            [newest, clone / "scripts" / script, *arguments],
            cwd=clone.parent,
            env={**ALONE, "ACCELERATE_USE_CPU": "true"},
        )
    assert (trained / "model_index.json").exists()


def test_the_newest_versions_pass_the_core_tests(clone: Path, newest: Path) -> None:
    pass_core_tests(clone, newest, env=ALONE)


def test_the_oldest_pyav_passes_the_core_tests(clone: Path, newest: Path, tmp_path: Path) -> None:
    (oldest,) = re.findall(r"^av>=([\d.]+)", CONFIG["options"]["install_requires"], re.MULTILINE)
    command = [newest, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, f"av=={oldest}.*"]
    run(command, env=ALONE)
    env = {**ALONE, "PYTHONPATH": str(tmp_path)}
    assert run([newest, "-c", "import av; print(av.__version__)"], cwd=clone, env=env).stdout.startswith(oldest)
    pass_core_tests(clone, newest, env=env)


def pass_core_tests(clone: Path, python: Path, *, env: dict[str, str]) -> None:
    command = [python, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *(f"tests/{name}" for name in CORE)]
    result = run(command, cwd=clone, env=env, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 100
