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
from hf_bucketing.optimizers.adamw import make_optimizer, make_schedule
from hf_bucketing.optimizers.settings import OptimizerConfig
from tests.models.recipe_cases import samples_of

ADAMW = OptimizerConfig(learning_rate=1e-3, adam_beta2=0.99, adam_weight_decay=0.1)
EIGHT_BIT = dataclasses.replace(ADAMW, optimizer="adamw_8bit")


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


def test_the_optimizer_takes_what_is_trained_and_says_what_is_missing(monkeypatch) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model.parameters(), ADAMW)
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == [id(model.weight)]
    assert optimizer.defaults["weight_decay"] == 0.1
    with pytest.raises(BucketingError, match="nothing would be trained"):
        make_optimizer([model.bias], ADAMW)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(BucketingError, match=r"pip install .hf_bucketing\[8bit\]"):
        make_optimizer(model.parameters(), EIGHT_BIT)


def test_the_optimizer_and_its_schedule_have_the_given_settings() -> None:
    settings = OptimizerConfig(learning_rate=0.5, adam_beta1=0.5, adam_beta2=0.75, adam_weight_decay=2.0,
                               adam_epsilon=0.1)  # fmt: skip
    parameters = [torch.nn.Parameter(torch.ones(1))]
    defaults = make_optimizer(parameters, settings).defaults
    assert {name: defaults[name] for name in ("lr", "betas", "weight_decay", "eps")} == {
        "lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 2.0, "eps": 0.1,
    }  # fmt: skip

    def rates(kind: str, **more: int) -> list[float]:
        config = dataclasses.replace(settings, lr_scheduler=kind, **more)
        schedule = make_schedule(make_optimizer(parameters, config), config, num_training_steps=4)
        return [0.5 * schedule.lr_lambdas[0](step) for step in range(5)]

    assert rates("constant") == [0.5] * 5
    assert rates("linear") == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert rates("constant_with_warmup", lr_warmup_steps=2) == [0.0, 0.25, 0.5, 0.5, 0.5]
    assert rates("cosine")[::2] == pytest.approx([0.5, 0.25, 0.0])


def test_the_8_bit_optimizer_holds_bytes_and_takes_nearly_the_same_steps() -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50", reason="older ones take no steps on a CPU")
    inputs, weights = torch.randn(32, 64), []
    for config in (ADAMW, EIGHT_BIT):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 128, bias=False)
        first = model.weight.detach().clone()
        optimizer = make_optimizer(model.parameters(), config)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
        weights.append(model.weight.detach() - first)
    state = optimizer.state[model.weight]
    assert (state["state1"].dtype, state["state2"].dtype) == (torch.uint8, torch.uint8)
    difference = float((weights[1] - weights[0]).norm() / weights[0].norm())
    assert 0 < difference < 0.05, difference
