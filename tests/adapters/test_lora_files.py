"""LoRA files of other trainers: every layer starts at the strength that the file has, or the file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.lora import ADAPTER, adapters_of, add_lora, start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from tests.models.families import RECIPES

RANK, ALPHA = 4, 16
FAMILIES = {
    "wan": "transformer",
    "ltx": "diffusion_model",
    "ltx2": "diffusion_model",
    "flux2": "transformer",
    "qwen-image": "diffusion_model",
    "z-image": "diffusion_model",
    "hunyuan-video": "transformer",
}
"""Prefix of names in the file, for each family; readers of diffusers take both where names are the same."""


@pytest.fixture
def load(tiny_folder: Callable[[str], Path]) -> Callable[[str], DiffusionPipeline]:
    """Return a function that loads the tiny pipeline of a family."""
    return lambda name: DiffusionPipeline.from_pretrained(tiny_folder(RECIPES[name].tiny), **RECIPES[name].components)


def strengths(pipeline: DiffusionPipeline) -> dict[str, torch.Tensor]:
    """Return the change that the adapters make to the weight of each layer."""
    weights, alpha = adapters_of(pipeline.transformer), pipeline.transformer.peft_config[ADAPTER].lora_alpha
    layers = [name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")]
    pairs = {layer: (weights[f"{layer}.lora_A.weight"], weights[f"{layer}.lora_B.weight"]) for layer in layers}
    return {layer: alpha / len(down) * up @ down for layer, (down, up) in pairs.items()}


@pytest.fixture
def written(request: pytest.FixtureRequest, load, tmp_path: Path) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """A family, a file of its adapters with alphas, and the changes that they make."""
    PartialState()  # what is logged is logged by the main process
    name = request.param
    pipeline = load(name)
    torch.manual_seed(0)
    add_lora(pipeline, AdapterConfig(lora_rank=RANK, lora_alpha=ALPHA))
    file = {}
    for key, value in adapters_of(pipeline.transformer).items():
        torch.nn.init.normal_(value)
        file[f"{FAMILIES[name]}.{key}"] = value.detach().contiguous()
        if key.endswith(".lora_A.weight"):
            layer = key.removesuffix(".lora_A.weight")
            file[f"{FAMILIES[name]}.{layer}.alpha"] = torch.tensor(float(ALPHA))
    save_file(file, tmp_path / "lora.safetensors")
    return name, tmp_path / "lora.safetensors", {layer: one.detach() for layer, one in strengths(pipeline).items()}


@pytest.mark.parametrize("written", FAMILIES, indirect=True)
def test_layers_start_at_the_strength_of_alpha_tensors(written: tuple, load, tmp_path: Path) -> None:
    name, path, expected = written
    pipeline = load(name)
    start_adapters(pipeline, AdapterConfig(lora_rank=RANK, init_from_adapters=str(path)))
    found = strengths(pipeline)
    assert found.keys() == expected.keys()
    for layer, change in expected.items():
        assert float(change.detach().norm()) > 0
        torch.testing.assert_close(found[layer], change, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer.blocks.0.attn1.to_q.lora_A.weight": None}, "scales no pair of LoRA matrices"),
        ({"transformer.blocks.0.nothing.alpha": torch.tensor(1.0)}, "scales no pair of LoRA matrices"),
        ({"text_encoder.lora_A.weight": torch.ones(4, 4)}, "must hold plain LoRA weights of a transformer"),
    ],
)
@pytest.mark.parametrize("written", ["wan"], indirect=True)
def test_what_is_left_over_is_refused_by_name(
    written: tuple, load, change: dict, message: str, tmp_path: Path
) -> None:
    name, path, _ = written
    weights = {key: value for key, value in {**load_file(path), **change}.items() if value is not None}
    save_file(weights, path)
    with pytest.raises(BucketingError, match=message):
        start_adapters(load(name), AdapterConfig(lora_rank=RANK, init_from_adapters=str(path)))


@pytest.mark.parametrize("written", ["wan"], indirect=True)
def test_a_file_with_two_scales_is_refused(written: tuple, load, tmp_path: Path) -> None:
    name, path, _ = written
    save_file(load_file(path), path, metadata={"lora_adapter_metadata": '{"transformer.lora_alpha": 4}'})
    with pytest.raises(BucketingError, match="has two scales"):
        start_adapters(load(name), AdapterConfig(lora_rank=RANK, init_from_adapters=str(path)))
