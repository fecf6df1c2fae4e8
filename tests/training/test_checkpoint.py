"""Checkpoints and pipelines that a run writes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch.utils.data import DataLoader

import hf_bucketing
from hf_bucketing import BucketBatchSampler, BucketingError, BucketTable, Size, resume
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS
from hf_bucketing.command_line.environment import describe_environment
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.checkpoint import (
    PROGRESS,
    Progress,
    find_checkpoint,
    gather_weights,
    load_state,
    save_checkpoint,
    save_pipeline,
)
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run


def load(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


def test_a_checkpoint_that_is_not_there_is_an_error(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", resume_from_checkpoint="checkpoint-9")
    with pytest.raises(BucketingError, match="checkpoint-9 is no complete checkpoint"):
        Trainer(config)


def test_a_checkout_that_is_not_installed_saves_its_run(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout on PYTHONPATH has no metadata, and comes without the packages that draw pages and cards."""
    found = importlib.metadata.Distribution.from_name

    def without_metadata(name: str) -> importlib.metadata.Distribution:
        if name.replace("-", "_") == "hf_bucketing":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", without_metadata)
    settings = {"lora_rank": 2, "checkpointing_steps": 1, "max_train_steps": 2, "lora_format": "both"}
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings)
    run(config)
    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "out"):
        with safe_open(folder / COMFYUI_WEIGHTS, framework="pt") as file:
            assert file.metadata()["hf_bucketing"] == hf_bucketing.__version__
    assert f"hf_bucketing {hf_bucketing.__version__}" in (tmp_path / "out" / "README.md").read_text()
    assert f"- hf_bucketing {hf_bucketing.__version__}" in describe_environment()

    spec_of = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "jinja2" else spec_of(name, *of)
    )
    with pytest.raises(BucketingError, match="draws its page and its card with jinja2, which is missing"):
        Trainer(config)


def test_a_sharded_model_is_saved_with_the_gathered_weights(pipeline_dirs, tmp_path: Path) -> None:
    recipe = load(pipeline_dirs["wan"])
    weights = {name: torch.full_like(value, 0.5) for name, value in recipe.transformer.state_dict().items()}
    assert gather_weights(Accelerator(cpu=True), recipe.transformer) is None
    save_pipeline(recipe, tmp_path, source=Path(pipeline_dirs["wan"]), weights=weights)
    saved = load(tmp_path).transformer
    assert all((value == 0.5).all() for value in saved.state_dict().values())


def progress(step: int) -> Progress:
    return Progress(global_step=step, log={}, settings={}, weights={})


def test_only_folders_that_a_run_writes_are_its_checkpoints(tmp_path: Path, monkeypatch) -> None:
    accelerator = Accelerator(cpu=True)
    for step in (4, 10):
        save_checkpoint(accelerator, tmp_path, progress(step), limit=None)
    copies = ["checkpoint-4-20261126", "checkpoint-best", "checkpoint-010", "checkpoint-11-2", "checkpoint-5 (copy)"]
    for copy in copies:
        shutil.copytree(tmp_path / "checkpoint-4", tmp_path / copy)
    shutil.move(tmp_path / "checkpoint-4", tmp_path / "moved")
    (tmp_path / "checkpoint-4").symlink_to(tmp_path / "moved")
    latest = find_checkpoint(tmp_path, "latest")
    assert latest is not None
    assert latest.path.name == "checkpoint-10"
    for step in (12, 14):
        save_checkpoint(accelerator, tmp_path, progress(step), limit=1)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*copies, "checkpoint-4", "moved", "checkpoint-14"}, "copies and links are their owner's"
    best = find_checkpoint(tmp_path, "checkpoint-best")
    assert best is not None
    assert best.progress.global_step == 4
    (tmp_path / "checkpoint-best").rename(tmp_path / "checkpoint-20")
    with pytest.raises(BucketingError, match="was saved after optimizer step 4 and renamed since"):
        find_checkpoint(tmp_path, "latest")


def test_a_damaged_or_missing_file_of_a_checkpoint_is_an_error_that_names_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    table = BucketTable(sizes=(Size(1, 64, 64),))
    loader = DataLoader([0, 1], batch_sampler=BucketBatchSampler([0, 0], table=table, batch_size=1))
    *_, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.ConstantLR(optimizer))
    resume(accelerator, loader)
    for step in (2, 4):
        save_checkpoint(accelerator, tmp_path, progress(step), limit=None)
    saved = tmp_path / "checkpoint-4"
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "custom_checkpoint_1.pkl"} < set(files)
    for name, content in files.items():
        for damaged in (content[: len(content) // 2], b"", bytes(len(content)), content[:-20], None):
            (saved / name).unlink() if damaged is None else (saved / name).write_bytes(damaged)
            # accelerate looks for pytorch_model.bin then; the last file that is written makes a checkpoint complete.
            missing = {"model.safetensors": "no pytorch_model.bin", PROGRESS: "no complete"}.get(name, f"no {name}")
            with pytest.raises(BucketingError, match=missing if damaged is None else name):
                load_state(accelerator, find_checkpoint(tmp_path, saved.name).path)
            (saved / name).write_bytes(content)
    load_state(accelerator, saved)
    (saved / "optimizer.bin").write_bytes(b"")
    with pytest.raises(BucketingError, match=r"optimizer.bin is damaged .* another checkpoint \(checkpoint-2\)"):
        load_state(accelerator, saved)
    model.weight = torch.nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(RuntimeError, match="size mismatch"):  # no damage, so the error of torch says more
        load_state(accelerator, tmp_path / "checkpoint-2")
