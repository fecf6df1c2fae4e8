"""Checkpoints and pipelines that a run writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from hf_bucketing import BucketingError
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.checkpoint import gather_weights, save_pipeline
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process


def load(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


def test_a_checkpoint_that_is_not_there_is_an_error(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", resume_from_checkpoint="checkpoint-9")
    with pytest.raises(BucketingError, match="checkpoint-9 is no complete checkpoint"):
        Trainer(config)


def test_a_sharded_model_is_saved_with_the_gathered_weights(pipeline_dirs, tmp_path: Path) -> None:
    recipe = load(pipeline_dirs["wan"])
    weights = {name: torch.full_like(value, 0.5) for name, value in recipe.transformer.state_dict().items()}
    assert gather_weights(Accelerator(cpu=True), recipe.transformer) is None
    save_pipeline(recipe, tmp_path, source=Path(pipeline_dirs["wan"]), weights=weights)
    saved = load(tmp_path).transformer
    assert all((value == 0.5).all() for value in saved.state_dict().values())
