"""The parts of a run that stand alone: adapters and optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from hf_bucketing import BucketingError
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from tests.models.recipe_cases import samples_of


def load(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_adapters_are_saved_as_stock_diffusers_loads_them(family: str, pipeline_dirs, tmp_path: Path) -> None:
    recipe = load(pipeline_dirs[family])
    add_lora(recipe.pipeline, AdapterConfig(lora_rank=3, lora_alpha=6))
    trained = {name for name, parameter in recipe.transformer.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in recipe.transformer.named_parameters():
        if name in trained:
            torch.nn.init.normal_(parameter)
    save_lora(recipe.pipeline, tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dirs[family])
    plain = dataclasses.replace(recipe, pipeline=DiffusionPipeline.from_pretrained(pipeline_dirs[family]))
    pipeline.load_lora_weights(str(tmp_path))
    loaded = dataclasses.replace(recipe, pipeline=pipeline)
    samples = samples_of(recipe, torch.randn(1, 4, 2, 4, 6), timesteps=[7.0], captions=["red"], fps=[8.0])
    with torch.no_grad():
        outputs = [
            part.predict(part.transformer, samples, part.model_inputs(samples)) for part in (recipe, loaded, plain)
        ]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


def test_adapters_that_cannot_be_are_errors(pipeline_dirs) -> None:
    with pytest.raises(BucketingError, match="LattePipeline cannot load LoRA"):
        add_lora(load(pipeline_dirs["latte"]).pipeline, AdapterConfig(lora_rank=4))
    with pytest.raises(BucketingError, match=r"`lora_targets`, \['nothing'\]"):
        add_lora(load(pipeline_dirs["wan"]).pipeline, AdapterConfig(lora_rank=4, lora_targets="nothing"))
