"""Frozen adapters: on in training, off in what is rendered and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, DOWN, LORA_WEIGHTS, UP
from hf_bucketing.adapters.kinds import merge_adapters
from hf_bucketing.adapters.loading import add_frozen, base_model, count_weights, switch_on, without_frozen
from hf_bucketing.adapters.lora import adapters_of, save_lora, start_adapters
from hf_bucketing.adapters.settings import Adapter, AdapterConfig
from hf_bucketing.command_line.config_file import write_config
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.runs.review import losses_of
from tests.adapters.lora_cases import drawn, peer_file
from tests.models.families import RECIPES
from tests.models.recipe_cases import stock_pipeline
from tests.training.conftest import reset
from tests.training.training_cases import STABLE, in_process, run

LORA = {"lora_rank": 2, "max_train_steps": 2}
Changes = Mapping[str, torch.Tensor]


def frozen_file(transformer: Any, path: Path, *, writer: str = "kohya", alpha: float | None = 2.0) -> Changes:
    """Write a file as a trainer does, and return the change of each layer by hand."""
    weights, changes = peer_file(transformer, writer=writer, alpha=alpha)
    save_file(weights, path)
    return changes


def draw(transformer: torch.nn.Module) -> Changes:
    """Draw the trained adapters' weights, and return the change of each layer by hand."""
    weights = adapters_of(transformer)
    for value in weights.values():
        value.data.copy_(drawn(*value.shape))
    layers = {name.removesuffix(DOWN) for name in weights if name.endswith(DOWN)}
    return {layer: (weights[layer + UP] @ weights[layer + DOWN]).detach() for layer in layers}


@torch.no_grad()
def predict(transformer: Any) -> torch.Tensor:
    config, generator = transformer.config, torch.Generator().manual_seed(0)
    latents = torch.randn(1, config.in_channels, 1, 4, 4, generator=generator, dtype=torch.float64)
    text = torch.randn(1, 5, config.text_dim, generator=generator, dtype=torch.float64)
    return transformer(latents, torch.tensor([500]), text, return_dict=False)[0]


@pytest.fixture
def wan(tiny_folder) -> Any:
    """Return a function that loads the tiny Wan pipeline."""
    torch.manual_seed(0)
    recipe = RECIPES["wan"]
    return lambda: stock_pipeline(tiny_folder(recipe.tiny), **recipe.components)


@pytest.mark.parametrize(("writer", "alpha"), [("kohya", 2.0), ("ai-toolkit", None)])
def test_they_are_on_in_training_and_below_the_base_model_and_off_elsewhere(wan, writer, alpha, tmp_path) -> None:
    pipeline = wan()
    transformer = pipeline.transformer.double()
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    frozen = [frozen_file(transformer, file, writer=writer, alpha=alpha) for file in files]
    original = {name: layer.weight.detach().clone() for name, layer in linears(transformer).items()}
    add_frozen(pipeline, [Adapter(str(files[0]), 0.5), Adapter(str(files[1]), -1.0)])
    start_adapters(pipeline, AdapterConfig(lora_rank=2, lora_alpha=2), dtype=torch.float64)
    switch_on(transformer)
    trained = draw(transformer)
    assert {name for name, value in transformer.named_parameters() if value.requires_grad} == {
        name for name, _ in transformer.named_parameters() if ".default." in name
    }

    def predicted() -> torch.Tensor:
        return predict(transformer)

    def by_hand(*changes: Changes) -> torch.Tensor:
        """Predict without any adapter, the changes in the weights themselves."""
        plain = wan().transformer.double()
        for name, weight in original.items():
            plain.get_submodule(name).weight.data.copy_(weight + sum(change.get(name, 0) for change in changes))
        return predict(plain)

    half = {layer: 0.5 * value for layer, value in frozen[0].items()}
    below = {layer: -value for layer, value in frozen[1].items()}
    in_training, of_base, rendered = by_hand(half, below, trained), by_hand(half, below), by_hand(trained)
    torch.testing.assert_close(predicted(), in_training, rtol=0, atol=1e-6)
    with base_model(transformer):
        torch.testing.assert_close(predicted(), of_base, rtol=0, atol=1e-6)
    with without_frozen(transformer):
        torch.testing.assert_close(predicted(), rendered, rtol=0, atol=1e-6)
        with base_model(transformer):
            torch.testing.assert_close(predicted(), of_base, rtol=0, atol=1e-6)
    torch.testing.assert_close(predicted(), in_training, rtol=0, atol=1e-6)
    assert min(float((one - in_training).abs().max()) for one in (of_base, rendered)) > 1e-3


def linears(transformer: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: layer for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)}


def test_saved_files_hold_the_trained_adapters_alone(wan, tmp_path: Path) -> None:
    saved = []
    for frozen in (False, True):
        pipeline = wan()
        if frozen:
            frozen_file(pipeline.transformer, tmp_path / "frozen.safetensors")
            add_frozen(pipeline, [Adapter(str(tmp_path / "frozen.safetensors"))])
        start_adapters(pipeline, AdapterConfig(lora_rank=2))
        switch_on(pipeline.transformer)
        torch.manual_seed(1)
        draw(pipeline.transformer)
        save_lora(pipeline, tmp_path / str(frozen), lora_format="both")
        saved.append([load_file(tmp_path / str(frozen) / name) for name in (LORA_WEIGHTS, COMFYUI_WEIGHTS)])
    for without, beside in zip(*saved, strict=True):
        assert without.keys() == beside.keys()
        assert all(torch.equal(value, beside[name]) for name, value in without.items())


@pytest.fixture
def frozen(pipeline_dir: Path, tmp_path: Path) -> Path:
    """Return a file of LoRA of the tiny Wan pipeline."""
    path = tmp_path / "frozen.safetensors"
    frozen_file(stock_pipeline(pipeline_dir).transformer, path)
    return path


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_run_learns_what_it_learns_from_a_pipeline_into_which_they_were_merged(
    batching: str, pipeline_dir: Path, prepared_dir: Path, frozen: Path, tmp_path: Path
) -> None:
    """Also where the base model's predictions are targets."""
    pipeline = stock_pipeline(pipeline_dir)
    merge_adapters(type(pipeline), pipeline.transformer, frozen)
    pipeline.save_pretrained(tmp_path / "merged")
    packs = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 1}
    settings = {**LORA, **STABLE, "preservation": "prior", "preservation_share": 0.5, "slider": ["a red square|blue"]}
    settings |= packs if batching == "pack" else {}
    losses = []
    for source, more in (
        (tmp_path / "merged", {}),
        (pipeline_dir, {"frozen_adapters": [str(frozen)]}),
        (pipeline_dir, {}),
    ):
        reset()
        losses.append(run(in_process(source, prepared_dir, tmp_path / f"out{len(losses)}", **settings, **more)))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] != pytest.approx(losses[0], abs=1e-4)


@pytest.mark.slow
def test_a_run_resumes_on_the_same_file_alone(pipeline_dir, prepared_dir, frozen: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {**LORA, "frozen_adapters": [f"{frozen}=0.5"], "checkpointing_steps": 1}
    whole = run(in_process(pipeline_dir, prepared_dir, out, **settings))
    reset()
    resumed = {**settings, "resume_from_checkpoint": "checkpoint-1"}
    run(in_process(pipeline_dir, prepared_dir, out, **resumed))
    assert losses_of(out) == whole
    reset()
    with pytest.raises(BucketingError, match="frozen_adapters was"):
        run(in_process(pipeline_dir, prepared_dir, out, **{**resumed, "frozen_adapters": [str(frozen)]}))
    reset()
    save_file({name: 2 * value for name, value in load_file(frozen).items()}, frozen)
    with pytest.raises(BucketingError, match="transformer frozen_0 had fingerprint"):
        run(in_process(pipeline_dir, prepared_dir, out, **resumed))


@pytest.mark.slow
def test_prompts_are_rendered_without_them(pipeline_dir, prepared_dir, frozen: Path, tmp_path: Path) -> None:
    settings = {**LORA, "max_train_steps": 1, "learning_rate": 1e-30, "validation_prompts": ["red"]}
    settings |= {"validation_steps": 1, "validation_inference_steps": 1, "validation_sizes": "1,32,64"}
    pictures = []
    for more in ({}, {"frozen_adapters": [f"{frozen}=4"]}):
        reset()
        run(in_process(pipeline_dir, prepared_dir, tmp_path / f"out{len(pictures)}", **settings, **more))
        (file,) = (tmp_path / f"out{len(pictures)}").rglob("*red.png")
        pictures.append(np.asarray(Image.open(file)))
    assert np.array_equal(*pictures)
    assert losses_of(tmp_path / "out0") != losses_of(tmp_path / "out1")


@pytest.mark.slow
def test_plans_count_their_weights(pipeline_dir: Path, frozen: Path) -> None:
    numbers = count_weights(frozen)
    assert numbers > sum(value.numel() for value in load_file(frozen).values() if value.ndim == 2) > 0
    common = {"lora_rank": 2, "sample_size": [1, 32, 64], "cached": "all", "mixed_precision": "bf16"}
    without = plan_memory(str(pipeline_dir), PlanConfig.from_flat(**common))
    beside = plan_memory(str(pipeline_dir), PlanConfig.from_flat(**common, frozen_adapters=[f"{frozen}=0.5"]))
    assert {
        name: beside.phases[name].weights - phase.weights for name, phase in without.phases.items()
    } == dict.fromkeys(without.phases, 2 * numbers)


def test_what_cannot_be_is_refused_by_name(wan, tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="`frozen_adapters` is a setting of adapters"):
        AdapterConfig(frozen_adapters=["a.safetensors"])
    with pytest.raises(BucketingError, match='Omit `frozen_adapters`, which are LoRA, or `adapter="lokr"`'):
        AdapterConfig(adapter="lokr", lora_rank=4, frozen_adapters=["a.safetensors"])
    with pytest.raises(BucketingError, match=r"nothing\.safetensors does not exist"):
        add_frozen(wan(), [Adapter(str(tmp_path / "nothing.safetensors"))])
    pair = {"of.another.lora_A.weight": torch.ones(2, 4), "of.another.lora_B.weight": torch.ones(4, 2)}
    save_file(pair, tmp_path / "other.safetensors")
    with pytest.raises(BucketingError, match=r"other\.safetensors must hold plain LoRA"):
        add_frozen(wan(), [Adapter(str(tmp_path / "other.safetensors"))])


def test_files_of_settings_name_them_by_their_whole_path(frozen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(frozen.parent)
    settings = {"frozen_adapters": [frozen.name, f"{frozen.name}=0.5", "nothing=2"]}
    assert yaml.safe_load(write_config(settings)) == {"frozen_adapters": [str(frozen), f"{frozen}=0.5", "nothing=2"]}
