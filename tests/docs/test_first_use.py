"""No command of README.md and of Getting started ends in an error, on clips of 3 to 40 seconds.

The commands run in the order of the page, as they stand there but for `REPLACEMENTS`: a model of random weights in
place of that of the hub, and sizes that a CPU computes in seconds. The largest bucket fills the budget of packs as
81×480×832 fills that of Wan.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from hf_bucketing.columns import PreparedDataset
from hf_bucketing.command_line.config_file import read_config_file, write_config
from hf_bucketing.media import write_video
from hf_bucketing.runs.logs import Logs
from hf_bucketing.synthetic.media import Clip, render
from tests.conftest import launch_flags
from tests.docs.pages import PAGES, call_of
from tests.processes import launch_forked, run_forked

REPLACEMENTS = {
    "wan-1.3b/24gb-lora": "preset.yaml",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": "tiny",
    "--bucket_tokens 8190,32760": "--bucket_tokens 126,504",  # 504 tokens are 81×64×96 pixels
    "--max_tokens 32768": "--max_tokens 512",  # as many whole strips of 64 tokens as hold 504
    "--height 480 --width 832 --num_frames 81": "--height 64 --width 96 --num_frames 17",
    "--num_train_epochs 20": "--num_train_epochs 4",  # in which the loss falls by less than the pages say
    "--output_dir clips": "--output_dir demo-clips",  # the folder `clips` is there
}
PRESET = {
    "pretrained_model_name_or_path": "tiny",
    "bucket_tokens": [126, 504],
    "bucket_frames": [1, 33, 81],
    "max_tokens": 1000,
    "num_train_epochs": 1,
}
"""Smaller values of some settings of the preset."""
OTHER_TESTS = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "python -m venv .venv": "tests/test_install.py",
    "source .venv/bin/activate": "tests/test_install.py",
    "pip install": "tests/test_install.py",
}
"""Beginnings of commands that install or run everything, and where they are run."""

PAGES_RUN = ("README.md", "docs/getting-started.md")
FPS = 24
CLIPS = {3: (64, 96), 4.5: (96, 64), 5: (48, 80), 6: (64, 96), 8: (96, 64), 13: (48, 80), 21: (64, 64), 40: (64, 96)}
"""Height and width of the clip of each number of seconds."""


def is_elsewhere(command: str) -> bool:
    return any(command.startswith(beginning) for beginning in OTHER_TESTS)


def here(command: str) -> list[str]:
    """Return a command of a page as it is run here."""
    for original, replacement in REPLACEMENTS.items():
        command = command.replace(original, replacement)
    return shlex.split(command, comments=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `clips`: videos and an image with a caption beside each, as the pages begin."""
    (tmp_path / "clips").mkdir()
    for seconds, (height, width) in CLIPS.items():
        clip = Clip(frames=round(seconds * FPS), height=height, width=width, fps=FPS)
        frames = render(clip, shape="circle", color="red", direction="right")
        write_video(tmp_path / "clips" / f"{seconds}s.mp4", frames, fps=FPS)
        (tmp_path / "clips" / f"{seconds}s.txt").write_text(f"a red circle moving right for {seconds} seconds")
    Image.new("RGB", (256, 192)).save(tmp_path / "clips" / "still.png")
    (tmp_path / "clips" / "still.txt").write_text("a dark picture")
    return tmp_path


def run_here(words: list[str], folder: Path) -> str:
    """Run a command of a page, and return what it printed; it fails the test if it fails."""
    if words[0] == "cp":
        shutil.copy(folder / words[1], folder / words[2])
        return ""
    name, arguments = call_of(words) or pytest.fail(f"{words} is no command")
    command = ["-m", "hf_bucketing", *name.split(), *arguments]
    if words[1] != "launch":
        return run_forked(command, [{**os.environ, "ACCELERATE_USE_CPU": "true"}], cwd=folder).stdout
    assert words[1:4] == ["launch", "--num_processes", "1"]
    return launch_forked(
        launch_flags(1), command, num_processes=1, env={"ACCELERATE_USE_CPU": "true"}, cwd=folder
    ).stdout


def commands(name: str) -> Iterator[list[str]]:
    for command in PAGES[name].commands():
        if not is_elsewhere(command):
            yield here(command)


def test_every_replacement_and_every_exception_is_in_a_page() -> None:
    shown = "\n".join(command for name in PAGES_RUN for command in PAGES[name].commands())
    assert not [original for original in REPLACEMENTS if original not in shown]
    assert not [beginning for beginning in OTHER_TESTS if f"\n{beginning}" not in f"\n{shown}"]


@pytest.mark.cases(slow=("README.md",))
@pytest.mark.parametrize("name", PAGES_RUN)
def test_the_commands_of_a_page_run_on_clips_of_3_to_40_seconds(name: str, folder: Path) -> None:
    if name == "README.md":
        run_here(["hf_bucketing", "demo", "pipeline", "--output_dir", "tiny"], folder)
        preset = read_config_file("wan-1.3b/24gb-lora").plain()
        (folder / "preset.yaml").write_text(write_config({**preset, **PRESET}))
        (folder / "ComfyUI" / "models" / "loras").mkdir(parents=True)
    for words in commands(name):
        run_here(words, folder)
    end = "" if name == "README.md" else "-wan"
    prepared = PreparedDataset.load(folder / f"prepared{end}")
    assert prepared.dataset["rejection"][:] == ["none"] * (len(CLIPS) + 1)
    assert max(prepared.dataset["num_frames"]) == 40 * 16
    plan = Logs(folder / f"trained{end}").first_plans[0]
    held_out = 1 if name == "README.md" else 0  # by the preset
    assert plan["kept"] == len(CLIPS) + 1 - held_out
    assert (folder / f"trained{end}" / "pytorch_lora_weights.safetensors").is_file()


def spans_of(name: str, beginning: str) -> str:
    (span,) = [span for span in PAGES[name].spans if span.startswith(beginning)]
    return span


@pytest.mark.every
def test_packs_in_place_of_buckets_take_the_same_clips(folder: Path) -> None:
    """Getting started names the flags of packs, to give "instead of" those of buckets."""
    name = "docs/getting-started.md"
    packs, buckets = spans_of(name, "--batching pack"), spans_of(name, "--train_batch_size")
    *before, train = [
        command for command in PAGES[name].commands() if re.search(r" pipeline| prepare | train ", command)
    ][:3]
    assert buckets in train
    for command in (*before, f"{train.replace(buckets, packs)} --dry_run"):
        printed = run_here(here(command), folder)
    assert f"{len(CLIPS) + 1} kept, 0 repeated" in printed
