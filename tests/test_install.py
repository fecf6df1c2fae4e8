"""The README's install from a clone: the folders it can be imported from, and the newest versions it allows."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, as_flags, made_once, run
from tests.docs.pages import PAGES, call_of
from tests.messy import write_messy
from tests.test_messy_files import ANIMATIONS, COMMANDS, check_results

pytestmark = pytest.mark.slow

CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
ALONE = {
    "PYTHONPATH": "",
    "PYTEST_XDIST_WORKER": "",
    "PYTHONDONTWRITEBYTECODE": "",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
TEST_TOOLS = ["pytest", "hypothesis", "psutil"]
MEDIA_TESTS = ["media/test_media.py", "media/test_video.py", "media/test_colours.py", "columns/test_metadata.py"]
MODEL_TESTS = [
    "models/test_families.py",
    "models/test_recipes.py",
    "packing/test_packing.py",
    "adapters/test_files.py",
    "adapters/test_original_names.py",
]
CORE_TESTS = [*MEDIA_TESTS, "buckets/test_sizes.py", "columns/test_map_columns.py", "plans/test_epoch_plans.py"]
"""Where versions of hosts show: media, columns, and a plan's arithmetic in numpy."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder named hf_bucketing, with the uncommitted changes of the working tree."""

    def copy(home: Path) -> None:
        listed = run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                copied = home / "hf_bucketing" / name
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copied)

    return made_once(tmp_path_factory, "home", copy) / "hf_bucketing"


@pytest.fixture(scope="module")
def editable_install(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with an editable install of the clone and all other packages of the running one."""

    def make(folder: Path) -> None:
        pip_install(make_venv(folder, Path(sys.executable)), "--no-deps", "--editable", clone)
        find_running_packages(folder)

    return made_once(tmp_path_factory, "beside", make) / "bin" / "python"


@pytest.fixture(scope="module")
def without_torch(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest Python at hand that setup.cfg names, with the newest versions of all that columns need: no torch.

    PyPI has torch for Linux only with CUDA, several gigabytes, and a CPU build at hand may be for one Python alone.
    """

    def make(folder: Path) -> None:
        python = make_venv(folder, newest_python())
        packages = [requirement(name) for name in ("av", "datasets", "lazy_loader", "numpy", "pillow")]
        pip_install(python, *packages, *TEST_TOOLS)
        pip_install(python, "--no-deps", "--editable", clone)

    return made_once(tmp_path_factory, "without_torch", make) / "bin" / "python"


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the clone."""

    def build(folder: Path) -> None:
        run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, clone])

    (built,) = made_once(tmp_path_factory, "wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="module")
def newest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The running Python with a wheel and the newest versions that setup.cfg allows."""

    def make(folder: Path) -> None:
        install_wheel(make_venv(folder, Path(sys.executable)), wheel)

    return made_once(tmp_path_factory, "newest", make) / "bin" / "python"


@pytest.fixture(scope="module")
def lowest(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The running Python with the lowest versions that setup.cfg promises, but for torch, and else those at hand."""

    def make(folder: Path) -> None:
        python = make_venv(folder, Path(sys.executable))
        promised = CONFIG["options"]["install_requires"] + CONFIG["options.extras_require"]["train"]
        bounds = re.findall(r"^([\w-]+)>=([\w.]+)", promised, re.MULTILINE)
        find_running_packages(folder)
        pip_install(python, *(f"{name}=={version}" for name, version in bounds if name != "torch"))
        pip_install(python, "--no-deps", "--editable", clone)

    return made_once(tmp_path_factory, "lowest", make) / "bin" / "python"


def find_running_packages(venv: Path) -> None:
    """Let a virtual environment find what it lacks among the packages of the running one."""
    (site_packages,) = (venv / "lib").glob("python*/site-packages")
    (site_packages / "zz_running.pth").write_text(sysconfig.get_path("purelib"))


def requirement(name: str) -> str:
    """Return a requirement of setup.cfg by the name of its package."""
    (found,) = re.findall(rf"^{name}[<>=~!].*", CONFIG["options"]["install_requires"], re.MULTILINE)
    return found


def pip_install(python: Path, *arguments: object) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--no-compile", *arguments], env=ALONE)


def install_wheel(python: Path, wheel: Path) -> None:
    """Install a wheel for training.

    Only torch is pinned, as in constraints.txt, so that a CPU build that is at hand is taken. Where there is none for
    this Python, this downloads about 3 GB and fills 6 GB.
    """
    if shutil.disk_usage(wheel.parent).free < 12 * 2**30:
        pytest.skip(f"torch with CUDA needs 12 GiB of free disk at {wheel.parent}")
    pinned = re.findall(r"^torch==.+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pip_install(python, f"{wheel}[train]", *pinned)


def make_venv(folder: Path, python: Path) -> Path:
    run([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def pythons() -> Iterator[Path]:
    """Yield the Pythons on PATH and in pyenv's folder, whether they work or not."""
    yield Path(sys.executable)
    for folder in os.get_exec_path():
        yield from Path(folder).glob("python3.*[0-9]")
    yield from Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin/python3")


def python_of(minor: int) -> Path:
    """Return a Python 3 of a minor version that is at hand; the running one is preferred."""
    for path in pythons():
        code = "import sys, venv, ensurepip; print(sys.version_info[1])"
        tried = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if tried.returncode == 0 and tried.stdout.strip() == str(minor):
            return path
    pytest.skip(f"there is no Python 3.{minor}")


def newest_python() -> Path:
    named = re.findall(r"Python :: 3\.(\d+)", CONFIG["metadata"]["classifiers"])
    found = {}
    for path in pythons():
        code = "import sys, venv, ensurepip; print(sys.version_info[1])"
        tried = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if tried.returncode == 0 and tried.stdout.strip() in named:
            found[int(tried.stdout)] = path
    return found[max(found)]


def test_beside_the_clone_the_package_is_imported_and_not_the_folder(clone: Path, editable_install: Path) -> None:
    code = "import hf_bucketing; from hf_bucketing import LatentSpec; print(hf_bucketing.__file__)"
    for cwd in (clone.parent, clone, clone.parent.parent):
        imported = run([editable_install, "-c", code], cwd=cwd, env=ALONE).stdout.strip()
        assert imported == str(clone / "hf_bucketing" / "__init__.py")


def test_new_files_of_the_clone_need_no_new_install(clone: Path, editable_install: Path) -> None:
    added = clone / "hf_bucketing" / "added.py"
    added.write_text("number = 7")
    code = "import hf_bucketing.added as added; print(added.number)"
    assert run([editable_install, "-c", code], cwd=clone.parent, env=ALONE).stdout == "7\n"
    added.unlink()


def test_type_checkers_see_the_types_of_an_editable_install(
    clone: Path, editable_install: Path, tmp_path: Path
) -> None:
    (clone.parent / "own.py").write_text("from hf_bucketing import LatentSpec\nreveal_type(LatentSpec.num_tokens)\n")
    (clone.parent / "own.ini").write_text(
        "[mypy]\nfollow_imports = skip\n[mypy-hf_bucketing.*]\nfollow_imports = silent\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        editable_install,
        "--cache-dir",
        tmp_path,
        "own.py",
    ]
    result = run([*command, "--config-file", "own.ini"], cwd=clone.parent, env=ALONE, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r'Revealed type is "def \(.*\) -> .*int', result.stdout), result.stdout


PREPARE_WITHOUT_TORCH = """
import sys
from pathlib import Path
from hf_bucketing import AssignmentRule, BucketColumns, LatentSpec, MediaMetadata, load_source, map_columns
from hf_bucketing import open_table, token_ladder
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.report import describe_assignment

from hf_bucketing.synthetic.media import make_media_dataset

folder = Path(sys.argv[1])
make_media_dataset(folder / "media", num_samples=18)
spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
table = token_ladder(spec, [60, 110, 150], frames=[1, 9, 17, 25])
loaded = load_source(str(folder / "media"))
dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, target_fps=8, root=loaded.root))
dataset = map_columns(dataset, BucketColumns(table, spec))
prepared = PreparedDataset(
    dataset=dataset, table=table, open_table=open_table(spec), column=loaded.column, caption_column="caption",
    root=loaded.root,
)
prepared.save(folder / "prepared")
columns = PreparedDataset.load(folder / "prepared").dataset.with_format("numpy")[:]
print(describe_assignment(columns, table=table, spec=spec, rule=AssignmentRule(), name_rows=prepared.file_names))
assert "torch" not in sys.modules
"""


@pytest.mark.every
def test_the_newest_python_prepares_a_data_set_without_torch(clone: Path, without_torch: Path, tmp_path: Path) -> None:
    """Covers the newest Python and PyAV: media, columns, tables, prepared folders, reports, and a clean exit."""
    command = [without_torch, "-c", PREPARE_WITHOUT_TORCH, tmp_path]
    result = run(command, cwd=clone.parent, env=ALONE)
    assert "18 of 18 rows assigned" in result.stdout
    assert (tmp_path / "prepared" / "bucketing.json").exists()


@pytest.mark.every
def test_the_newest_python_passes_the_core_tests_without_torch(clone: Path, without_torch: Path) -> None:
    pass_tests(CORE_TESTS, clone, without_torch, env=ALONE)


@pytest.mark.every
def test_the_oldest_pyav_passes_the_media_tests(clone: Path, without_torch: Path, tmp_path: Path) -> None:
    (oldest,) = re.findall(r"^av>=([\d.]+)", requirement("av"))
    pip_install(without_torch, "--no-deps", "--target", tmp_path, f"av=={oldest}.*")
    env = {**ALONE, "PYTHONPATH": str(tmp_path)}
    version = run([without_torch, "-c", "import av; print(av.__version__)"], cwd=clone, env=env).stdout
    assert version.startswith(oldest)
    pass_tests(MEDIA_TESTS, clone, without_torch, env=env)


@pytest.mark.every
def test_the_newest_versions_prepare_and_train(
    clone: Path, newest: Path, media_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    prepared, trained = tmp_path / "prepared", tmp_path / "trained"
    preparing = as_flags(
        dataset=media_dir,
        output_dir=prepared,
        target_fps=8,
        bucket_tokens="60,110,150",
        bucket_frames="1,9,17,25",
    )
    training = as_flags(
        dataset_dir=prepared,
        output_dir=trained,
        batching="pack",
        max_tokens=640,
        strip_length=16,
        max_sequence_length=64,
        max_train_steps=2,
    )
    for script, flags in {"prepare_dataset.py": preparing, "train_text_to_video.py": training}.items():
        run(
            [newest, clone / "scripts" / script, *flags, "--pretrained_model_name_or_path", pipeline_dir],
            cwd=clone.parent,
            env={**ALONE, "ACCELERATE_USE_CPU": "true"},
        )
    assert (trained / "model_index.json").exists()


@pytest.mark.every
def test_a_wheel_alone_trains_and_samples_by_its_commands(newest: Path, tmp_path: Path) -> None:
    run_getting_started(newest, tmp_path)


@pytest.mark.every
def test_a_wheel_alone_takes_messy_files_to_both_pages_and_a_lora(newest: Path, tmp_path: Path) -> None:
    env = {**ALONE, "ACCELERATE_USE_CPU": "true", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    write_messy(tmp_path / "clips")
    for text in ("demo pipeline --output_dir tiny", *COMMANDS):
        run([newest, newest.with_name("hf_bucketing"), *text.split()], cwd=tmp_path, env=env)
    check_results(tmp_path, unread=(*ANIMATIONS, "phone.heic"))  # which needs the extra `heic`


@pytest.mark.every
@pytest.mark.parametrize("minor", sorted({10, 13} - {sys.version_info[1]}))
def test_a_wheel_trains_and_samples_with_other_pythons(minor: int, wheel: Path, tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", python_of(minor))
    install_wheel(python, wheel)
    run_getting_started(python, tmp_path)
    shutil.rmtree(tmp_path / "venv")  # of some gigabytes


def run_getting_started(python: Path, folder: Path) -> None:
    """Do what Getting started does, on ten clips, without the clone."""
    env = {**ALONE, "ACCELERATE_USE_CPU": "true", "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    (folder / "work").mkdir()
    program = [python, python.with_name("hf_bucketing")]  # whose first line names a Python that has moved since
    called = []
    for command in PAGES["docs/getting-started.md"].commands():
        name, words = call_of(shlex.split(command)) or ("", [])
        if name and not any("wan" in word.lower() for word in words):
            words = ["10" if word == "20" else word for word in words]
            command_line = [*program, *name.split(), *words]
            run(command_line, cwd=folder / "work", env=env)
            called.append(name)
    assert [*dict.fromkeys(called)] == [
        "demo data",
        "demo pipeline",
        "prepare",
        "report buckets",
        "train",
        "sample",
        "report run",
    ]
    assert (folder / "work" / "trained" / "pytorch_lora_weights.safetensors").is_file()
    listed = run([*program, "--help"], cwd=folder / "work", env=env).stdout
    assert "  prepare " in listed


@pytest.mark.every
def test_the_newest_versions_pass_the_core_tests(clone: Path, newest: Path, tmp_path: Path) -> None:
    """Those of the clone, whose package they import."""
    pip_install(newest, "--target", tmp_path, *TEST_TOOLS)
    pass_tests(CORE_TESTS, clone, newest, env={**ALONE, "PYTHONPATH": str(tmp_path)})


@pytest.mark.every
def test_the_lowest_versions_pass_the_core_tests(clone: Path, lowest: Path) -> None:
    """The lowest torch was tried by hand: its wheels on PyPI bring CUDA, three gigabytes."""
    for name in ("datasets", "diffusers"):
        (promised,) = re.findall(rf"^{name}>=([\d.]+)", requirement(name))
        installed = run([lowest, "-c", f"import {name}; print({name}.__version__)"], env=ALONE).stdout
        assert installed.startswith(promised)
    pass_tests([*CORE_TESTS, *MODEL_TESTS], clone, lowest, env=ALONE)


def pass_tests(names: list[str], clone: Path, python: Path, *, env: dict[str, str]) -> None:
    paths = [f"tests/{name}" for name in names]
    command = [python, "-m", "pytest", "-m", "not slow and not every", "-p", "no:cacheprovider", *paths]
    result = run(command, cwd=clone, env=env, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) > 60
