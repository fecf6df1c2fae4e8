"""Twenty files as people bring them: every fault is told at once by the file's name, and the others train."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from hf_bucketing.columns import PreparedDataset
from hf_bucketing.runs.review import losses_of
from tests.messy import FAULTY, GOOD, write_messy
from tests.processes import run_forked

PREPARE = "prepare --dataset clips --output_dir prepared --pretrained_model_name_or_path tiny --target_fps 8"
PREPARE += " --bucket_tokens 60,110 --bucket_frames 1,9,17"
KEPT = " --on_error reject --on_caption_error reject --max_upscale 1.5"
COMMANDS = (
    PREPARE + KEPT,
    "report data prepared --html data.html",
    "cache --dataset_dir prepared --cache_dir cache --output_dir cached --pretrained_model_name_or_path tiny",
    "train --dataset_dir cached --output_dir trained --pretrained_model_name_or_path tiny --lora_rank 4"
    " --max_train_steps 3 --train_batch_size 2 --validation_prompts red"
    " --validation_sizes 9,48,80 --validation_inference_steps 1 --validation_steps 3",
    "report run trained --html run.html",
)
ANIMATIONS = ("wave.gif", "dance.webp")
"""Animations are named, and what to do with them: a picture of several frames is neither a picture nor a video."""


@pytest.fixture(scope="module")
def messy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `clips` and a tiny pipeline."""
    folder = tmp_path_factory.mktemp("messy")
    write_messy(folder / "clips")
    command(folder, "demo pipeline --output_dir tiny")
    return folder


def command(folder: Path, text: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    return run_forked(["-m", "hf_bucketing", *text.split()], [env], cwd=folder, check=check)


@pytest.mark.slow
def test_there_are_twenty_files(messy: Path) -> None:
    assert (
        len([path for path in (messy / "clips").iterdir() if path.suffix != ".txt"]) == 20 == len(GOOD) + len(FAULTY)
    )


@pytest.mark.slow
def test_every_fault_is_told_at_once_by_the_name_of_its_file(messy: Path) -> None:
    refused = command(messy, PREPARE, check=False)
    assert refused.returncode == 1
    message = refused.stderr[refused.stderr.index("RowsError:") :]
    assert all(name in message for name in (*FAULTY, *ANIMATIONS))
    assert not [name for name in GOOD if name in message and name not in ANIMATIONS]
    assert "--on_error reject" in message
    assert "--on_caption_error reject" in message


@pytest.mark.slow
def test_five_commands_lead_to_both_pages_and_a_lora(messy: Path) -> None:
    for text in COMMANDS:
        command(messy, text)
    check_results(messy)


def check_results(folder: Path, *, unread: Sequence[str] = ANIMATIONS) -> None:
    """Check what the commands leave, where these of the good files cannot be read."""
    prepared = PreparedDataset.load(folder / "prepared")
    names = prepared.file_names(range(len(prepared.dataset)))
    columns = [prepared.dataset[name][:] for name in ("num_tokens", "height", "width")]
    sizes = {name: size for name, tokens, *size in zip(names, *columns, strict=True) if tokens}
    assert sizes.keys() == {*GOOD} - {*unread}
    assert sizes["IMG_0001.MOV"] == sizes["turned.jpg"] == [96, 64], "as they are shown, and not as they are stored"
    page = "".join(path.read_text() for path in (folder / "data_files").glob("rows-*.js"))
    assert all(json.dumps(name) in page for name in (*FAULTY, "Hündchen.mp4"))
    assert len(losses_of(folder / "trained")) == 3
    assert re.search(r"<(video|img)[^>]+data:", (folder / "run.html").read_text()), "the run's page shows a result"
    for name in ("pytorch_lora_weights.safetensors", "comfyui_lora_weights.safetensors"):
        assert (folder / "trained" / name).is_file()
