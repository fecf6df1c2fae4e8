"""Uploads to the hub against a local server, and the card that every run leaves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from PIL import Image

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, LORA_WEIGHTS, read_lora
from hf_bucketing.buckets.assignment import count_rejections
from hf_bucketing.columns import PreparedDataset, column_array
from hf_bucketing.errors import HubError
from hf_bucketing.training import HubConfig
from hf_bucketing.training.card import Run, open_repository, upload, without_folders, write_card
from hf_bucketing.training.loop import Trainer
from tests.conftest import TRAINING_SCRIPT, as_flags, launch, run_script_here
from tests.training.hub_server import TOKEN, Hub, serving
from tests.training.training_cases import in_process, run_card


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub()) as hub:
        yield hub


@pytest.fixture
def reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server as the hub of this process, and of processes that it starts."""
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return hub


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"push_to_hub": True, "hub_model_id": "someone/"}, r"`hub_model_id` is 'someone/'; expected \"name\" or"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "`hub_model_id` is 'a/b/c'"),
        ({"hub_model_id": "clips"}, "Omit `hub_model_id`: no effect without `push_to_hub`"),
        ({"hub_private_repo": True}, "Omit `hub_private_repo`"),
    ],
)
def test_a_repository_without_a_name_or_a_purpose_is_refused(settings, message) -> None:
    with pytest.raises(BucketingError, match=message):
        HubConfig(**settings)


def test_the_repository_is_created_and_tried_before_training_and_nothing_is_uploaded(reached, tmp_path) -> None:
    assert open_repository(HubConfig(push_to_hub=True), folder=tmp_path / "clips") == "someone/clips"
    config = HubConfig(push_to_hub=True, hub_model_id="lab/wan", hub_private_repo=True)
    assert open_repository(config, folder=tmp_path) == "lab/wan"
    assert reached.created.keys() == {"someone/clips", "lab/wan"}
    private = [{"private", "visibility"} & {*wanted, *wanted.values()} for wanted in reached.created.values()]
    assert [bool(fields) for fields in private] == [False, True]
    assert "/api/models/lab/wan/preupload/main" in reached.requests
    assert not reached.files
    assert not reached.objects


def test_a_token_that_is_refused_is_an_error_that_names_flags(reached, tmp_path, pipeline_dir, prepared_dir) -> None:
    reached.accepted = None
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "run", push_to_hub=True, hub_model_id="someone/clips")
    with pytest.raises(
        HubError, match=r"someone/clips cannot be written on http.*401.*Log in with `hf auth"
    ) as caught:
        Trainer(config)
    assert TOKEN not in str(caught.value)
    assert "train without --push_to_hub" in caught.value.in_flags({"push_to_hub": "--push_to_hub"})
    assert not (tmp_path / "run" / "logs").exists()


def test_offline_it_is_an_error_and_a_folder_that_cannot_name_a_repository_too(reached, tmp_path, monkeypatch) -> None:
    with pytest.raises(HubError, match=r"my--clips cannot name a repository.*give `hub_model_id`"):
        open_repository(HubConfig(push_to_hub=True), folder=tmp_path / "my--clips")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="OfflineModeIsEnabled"):
        open_repository(HubConfig(push_to_hub=True), folder=tmp_path / "clips")


def test_a_failed_upload_says_that_the_result_is_safe_and_gives_a_command_that_repeats_it(reached, tmp_path) -> None:
    reached.commits = 500
    for file in ("README.md", "transformer/config.json", "logs/losses.jsonl", "checkpoint-1/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    with pytest.raises(HubError, match=r"result is complete in .*500.*Repeat the upload alone") as caught:
        upload(tmp_path, "someone/clips", ["transformer", "README.md"])
    reached.commits = 200
    command = shlex.split(str(caught.value).partition("alone with: ")[2])
    assert command[:5] == ["hf", "upload", "someone/clips", str(tmp_path), "."]
    assert command[5:] == ["--include", "transformer/*", "--include", "README.md"]
    assert "Uploaded to" in upload(tmp_path, "someone/clips", ["transformer", "README.md"])
    assert reached.files["someone/clips"].keys() == {"README.md", "transformer/config.json"}


def test_a_dry_run_creates_no_repository(reached, pipeline_dir, prepared_dir, tmp_path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path, push_to_hub=True, hub_model_id="clips", dry_run=True)
    Trainer(config).release()
    assert not reached.requests


def test_every_run_leaves_a_card_and_keeps_one_that_it_did_not_write(media_dir, pipeline_dir, tmp_path) -> None:
    prepared, output = tmp_path / "prepared", tmp_path / "run"
    run_script_here(
        "prepare_dataset.py",
        dataset=media_dir,
        pretrained_model_name_or_path=pipeline_dir,
        target_fps=8,
        buckets="64,96;96,64",
        bucket_frames="9",
        output_dir=prepared,
    )
    trainer = Trainer(in_process(pipeline_dir, prepared, output, max_train_steps=1))
    trainer.run()
    card = ModelCard.load(output / "README.md")
    assert (card.data.pipeline_tag, card.data.library_name) == ("text-to-video", "diffusers")
    assert "<Gallery />" not in card.text  # nothing was rendered
    assert "loss.png" not in card.text  # a single step
    assert str(tmp_path) not in str(card)
    dataset = PreparedDataset.load(prepared).dataset
    rejected = {f"rejected: {reason}": count for reason, count in count_rejections(dataset["rejection"][:]).items()}
    kept = {"kept, per epoch": len(dataset) - sum(rejected.values()), "repeated to fill steps, per epoch": 0}
    assert rejected
    assert counts_in(card, "rows") == {"in the data set": 20, **rejected, **kept}
    assert sum(counts_in(card, "bucket").values()) == kept["kept, per epoch"]

    finished = Run(trainer.config, trainer.recipe, trainer.data, None, {})
    line = {"batch": 1, "epoch": 0, "step": 1, "bucket_id": 0, "index": [4, 5, 6], "loss": [1.0] * 3}
    with (output / "logs" / "samples-0.jsonl").open("a") as file:
        file.write(json.dumps({**line, "planned": [1, 5, 2]}) + "\n")
    (output / "logs" / "unreadable.jsonl").write_text("{}\n" * 9)  # of workers that read ahead, or before a resume
    write_card(output, finished)
    card = ModelCard.load(output / "README.md")
    assert counts_in(card, "rows")["unreadable and replaced, in all epochs"] == 2
    (output / "README.md").write_text("my own text")
    assert write_card(output, finished)[0] == ["README.md"]
    assert (output / "README.md").read_text() == "my own text"


def test_paths_are_shown_by_their_last_part(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    values = [str(tmp_path / "a.png"), "~/b", "clips", "./clips/..", "Wan-AI/Wan2.1", {"control": "/c/d"}, 0.5, None]
    assert without_folders(values) == [
        "a.png",
        "b",
        "clips",
        tmp_path.name,
        "Wan-AI/Wan2.1",
        {"control": "d"},
        0.5,
        None,
    ]


def flags(pipeline: Path, prepared: Path, output: Path, *others: object) -> list[object]:
    common = as_flags(
        pretrained_model_name_or_path=pipeline,
        dataset_dir=prepared,
        output_dir=output,
        max_sequence_length=32,
        dataloader_num_workers=0,
        report_to="none",
        train_batch_size=2,
        max_train_steps=10,
        checkpointing_steps=5,
        validation_prompts=["a red circle", "blue"],
        validation_sizes="5,32,48",
        validation_steps=4,
        validation_inference_steps=1,
        push_to_hub=True,
    )
    return [*common, *others]


def counts_in(card: ModelCard, title: str) -> dict[str, int]:
    """Return the first two cells of each row of a table in a card: names and counts."""
    table = card.text.partition(f"| {title}")[2].partition("\n\n")[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    return {row[0]: int(row[1]) for row in rows}


@pytest.mark.slow
def test_the_code_of_a_card_loads_adapters_that_are_saved_for_comfyui_alone(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    Trainer(in_process(pipeline_dir, prepared_dir, output, lora_rank=2, lora_format="comfyui")).run()
    os.symlink(pipeline_dir, tmp_path / pipeline_dir.name)
    monkeypatch.chdir(tmp_path)
    transformer = run_card(output)["pipeline"].transformer
    saved = read_lora(diffusers.WanPipeline, transformer, output / COMFYUI_WEIGHTS).folded()
    loaded = dict(transformer.named_parameters())
    for layer, pair in saved.items():
        for value, matrix in zip(pair, "AB", strict=True):
            (name,) = [name for name in loaded if name.startswith(f"{layer}.lora_{matrix}.")]
            assert torch.equal(loaded[name], value.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapters", [pytest.param(False, id="pipeline", marks=pytest.mark.every), pytest.param(True, id="lora")]
)
def test_the_script_uploads_what_it_saved_with_a_card_whose_code_loads_it(
    adapters: bool, reached: Hub, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    output = tmp_path / "wan-clips"
    others = ("--lora_rank", 2) if adapters else ("--hub_private_repo", "--hub_model_id", "lab/wan")
    arguments = flags(pipeline_dir, prepared_dir, output, *others)
    repository = "someone/wan-clips" if adapters else "lab/wan"
    if adapters:
        result = run_script_here(TRAINING_SCRIPT.name, *arguments)
    else:
        result = launch(TRAINING_SCRIPT, *arguments, num_processes=2, forked=False)  # the hub's address is read once
        assert f"Uploaded to {reached.endpoint}/{repository}" in result.stderr
    files = reached.files[repository]
    renders = {f"validation/step-10/5x32x48-{words}.mp4" for words in ("a-red-circle", "blue")}
    card_files = {"README.md", "loss.png", *renders}
    if adapters:
        assert files.keys() == {LORA_WEIGHTS, COMFYUI_WEIGHTS, *card_files}
    else:
        saved = {path.relative_to(pipeline_dir).as_posix() for path in pipeline_dir.rglob("*") if path.is_file()}
        assert saved | card_files == files.keys()
    for name, content in files.items():
        assert (output / name).read_bytes() == content
        assert TOKEN.encode() not in content
        assert str(tmp_path).encode() not in content
    for path in output.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
    assert TOKEN not in result.stdout + result.stderr

    copy = tmp_path / "elsewhere" / repository
    for name, content in files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    assert Image.open(copy / "loss.png").width > 500
    card = ModelCard.load(copy / "README.md")
    assert ("lora" in card.data.tags) == adapters
    assert {entry["output"]["url"]: entry["text"] for entry in card.data.widget} == dict(
        zip(sorted(renders), ("a red circle", "blue"), strict=True)
    )
    dataset = PreparedDataset.load(prepared_dir).dataset
    buckets = counts_in(card, "bucket")
    assert sum(buckets.values()) == (column_array(dataset, "bucket_id") >= 0).sum()
    assert counts_in(card, "rows")["in the data set"] == 20
    (settings,) = re.findall(r"```yaml\n(.*?)```", card.text, re.DOTALL)
    shown_settings = yaml.safe_load(settings)
    assert shown_settings["dataset_dir"] == prepared_dir.name
    assert shown_settings["max_train_steps"] == 10
    assert "output_dir" not in shown_settings
    os.symlink(pipeline_dir, tmp_path / "elsewhere" / pipeline_dir.name)
    monkeypatch.chdir(tmp_path / "elsewhere")
    ((frames, path, fps),) = run_card(copy)["written"]
    assert (np.shape(frames), path, fps) == ((17, 64, 112, 3), "video.mp4", 8)


@pytest.mark.every
def test_an_upload_that_fails_at_the_end_leaves_the_result_and_exits_with_an_error(
    reached: Hub, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    reached.commits = 500
    arguments = flags(pipeline_dir, prepared_dir, tmp_path / "out", "--hub_model_id", "lab/wan", "--lora_rank", 2)
    result = run_script_here(TRAINING_SCRIPT.name, *arguments, check=False)
    assert result.returncode == 1
    said = result.stderr.strip().splitlines()[-1]
    assert f"result is complete in {tmp_path / 'out'}" in said
    assert (tmp_path / "out" / LORA_WEIGHTS).is_file()
    reached.commits = 200
    command = shlex.split(said.partition("alone with: ")[2])
    subprocess.run([Path(sys.executable).with_name("hf"), *command[1:]], check=True, capture_output=True)
    assert {LORA_WEIGHTS, "README.md", "loss.png"} <= reached.files["lab/wan"].keys()
    assert not [name for name in reached.files["lab/wan"] if name.startswith(("logs", "checkpoint-"))]
