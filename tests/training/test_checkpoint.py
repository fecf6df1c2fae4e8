"""Checkpoints and pipelines that a run writes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open

import hf_bucketing
from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS
from hf_bucketing.command_line.environment import describe_environment
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.checkpoint import gather_weights, save_pipeline
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
