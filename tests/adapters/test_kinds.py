"""Every kind of adapter: what it changes, its files, the stock pipeline with it, and merging."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, LORA_WEIGHTS, PEFT_FILES
from hf_bucketing.adapters.kinds import adapters_of, load_exact, read_exact
from hf_bucketing.adapters.lora import add_lora, save_lora, start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.placement.conflicts import Combination, conflicts
from hf_bucketing.placement.settings import MemoryConfig
from tests.conftest import run_script_here
from tests.models.recipe_cases import samples_of

PATTERNS = {"lora_rank_pattern": r"blocks\.0\..*=2", "lora_alpha_pattern": "to_q=8 to_v=0.5"}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "lora_rslora": True, **PATTERNS},
    "dora": {"adapter": "dora", "lora_rslora": True, **PATTERNS},
    "loha": {"adapter": "loha", **PATTERNS},
    "lokr": {"adapter": "lokr", **PATTERNS},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Recipe:
    PartialState()  # for logs
    return recipe_of(str(folder)).load(
        str(folder), loading=Loading(parts=("trained", "text_encoders"), trained_dtype=dtype)
    )


def settings(kind: str) -> AdapterConfig:
    return AdapterConfig(lora_rank=3, lora_alpha=6, **KINDS[kind])


def trained(folder: Path, kind: str) -> Recipe:
    """Return a pipeline with adapters of random weights."""
    recipe = load(folder)
    add_lora(recipe.pipeline, settings(kind))
    for name, value in adapters_of(recipe.transformer).items():
        if name.endswith("magnitude_vector"):
            value.data.mul_(1.3)
        else:
            torch.nn.init.normal_(value, std=0.3)
    return recipe


def outputs(recipes: list[Recipe]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    samples = samples_of(recipes[0], torch.randn(1, 4, 2, 4, 6), timesteps=[7.0], captions=["red"], fps=[8.0])
    inputs = recipes[0].model_inputs(samples)
    with torch.no_grad():
        return [recipe.predict(recipe.transformer.eval(), samples, inputs) for recipe in recipes]


@kinds
def test_each_kind_is_saved_as_a_stock_pipeline_loads_it_and_merged(
    kind: str, pipeline_dir: Path, tmp_path: Path
) -> None:
    recipe, folder, merged = trained(pipeline_dir, kind), tmp_path / "adapters", tmp_path / "merged"
    folder.mkdir()
    (folder / COMFYUI_WEIGHTS).touch()
    save_lora(recipe.pipeline, folder, component="transformer")
    files = set(PEFT_FILES if kind in ("loha", "lokr") else [LORA_WEIGHTS])
    assert {file.name for file in folder.iterdir()} == files, "what an earlier run left is removed"
    stock = load(pipeline_dir)
    if kind in ("loha", "lokr"):
        PeftModel.from_pretrained(stock.transformer, folder)
    else:
        stock.pipeline.load_lora_weights(str(folder))
    said = run_script_here("merge_lora.py", pipeline_dir, folder, merged)
    layers = [layer for layer in recipe.transformer.modules() if isinstance(layer, BaseTunerLayer)]
    assert f"Merged the adapters of {len(layers)} layers" in said.stdout
    pipeline = DiffusionPipeline.from_pretrained(merged)
    assert not any(isinstance(layer, BaseTunerLayer) for layer in pipeline.transformer.modules())
    whole = dataclasses.replace(recipe, pipeline=pipeline)
    expected, loaded, added, plain = outputs([recipe, stock, whole, load(pipeline_dir)])
    assert torch.allclose(loaded, expected, atol=1e-6)
    assert torch.allclose(added, expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-2)


def test_ranks_and_scales_follow_their_patterns(pipeline_dir: Path) -> None:
    transformer = trained(pipeline_dir, "lora").transformer
    layers = {name: transformer.get_submodule(name) for name in ("blocks.0.attn1.to_q", "blocks.1.attn1.to_k")}
    assert [layer.r["default"] for layer in layers.values()] == [2, 3]
    assert [layer.scaling["default"] for layer in layers.values()] == pytest.approx([8 / 2**0.5, 6 / 3**0.5])


@kinds
def test_new_adapters_change_nothing_also_of_weights_in_half_precision(kind: str, pipeline_dir: Path) -> None:
    recipe, plain = (load(pipeline_dir, dtype=torch.bfloat16) for _ in range(2))
    start_adapters(recipe.pipeline, settings(kind))
    assert {value.dtype for value in adapters_of(recipe.transformer).values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = outputs([recipe, plain])
    assert torch.allclose(found, expected, atol=1e-2)
    if kind == "dora":
        layer = recipe.transformer.blocks[0].attn1.to_q
        norms = layer.base_layer.weight.float().norm(dim=1)
        assert torch.equal(layer.lora_magnitude_vector["default"].weight, norms)


@kinds
def test_another_run_starts_from_adapters_of_each_kind_as_they_were(
    kind: str, pipeline_dir: Path, tmp_path: Path
) -> None:
    first = trained(pipeline_dir, kind)
    save_lora(first.pipeline, tmp_path)
    again = load(pipeline_dir)
    config = start_adapters(
        again.pipeline, dataclasses.replace(settings(kind), lora_alpha=None, init_from_adapters=str(tmp_path))
    )
    assert config.lora_alpha == 6
    for (name, expected), found in zip(
        adapters_of(first.transformer).items(), adapters_of(again.transformer).values(), strict=True
    ):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize(
    ("saved", "changes", "message"),
    [
        ("loha", {"adapter": "lokr"}, "peft_type .*LOHA and not .*LOKR"),
        ("dora", {"lora_rslora": False}, "use_rslora True and not False"),
        ("lokr", {"lora_rank": 2}, "r 3 and not 2"),
        ("lora", {"lora_alpha_pattern": None}, "alpha_pattern {'to_q': 8, 'to_v': 0.5} and not {}"),
        ("dora", {"lora_targets": "to_q"}, "to_k.*, which no layer has"),
    ],
)
def test_adapters_of_another_kind_scale_or_layer_are_refused(
    saved: str, changes: dict[str, Any], message: str, pipeline_dir: Path, tmp_path: Path
) -> None:
    save_lora(trained(pipeline_dir, saved).pipeline, tmp_path)
    recipe = load(pipeline_dir)
    add_lora(recipe.pipeline, dataclasses.replace(settings(saved), **changes))
    with pytest.raises(BucketingError, match=message):
        load_exact(recipe.transformer, read_exact(tmp_path))


def test_dropout_acts_in_training_alone(pipeline_dir: Path) -> None:
    for kind in KINDS:
        recipe = load(pipeline_dir)
        add_lora(recipe.pipeline, dataclasses.replace(settings(kind), lora_dropout=0.5))
        for value in adapters_of(recipe.transformer).values():
            torch.nn.init.normal_(value, mean=0.5, std=0.1)
        layer = recipe.transformer.blocks[0].attn1.to_q
        inputs = torch.randn(2, layer.in_features)
        assert not torch.equal(layer.train()(inputs), layer(inputs)), kind
        assert torch.equal(layer.eval()(inputs), layer(inputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": None}, "`adapter` is a setting of adapters; give their rank too"),
        ({"lora_rslora": True}, 'Omit `lora_rslora`, a scale of LoRA and DoRA, or `adapter="loha"`'),
        ({"lora_dropout": 1.0}, "`lora_dropout` must be at least 0 and less than 1, got 1.0"),
        ({"lora_rank_pattern": "to_q"}, "Expected PATTERN=NUMBER, a regular expression, got 'to_q'"),
        ({"lora_rank_pattern": "to_(q=2"}, "regular expression, got 'to_\\(q=2': missing \\)"),
        ({"lora_alpha": 0}, "`lora_alpha` must be more than 0, got 0"),
        ({"lora_rank_pattern": "to_q=0.5"}, "must be a whole number, got 0.5"),
        ({"lora_alpha_pattern": "to_q=0"}, "with a positive number, got 'to_q=0'"),
        ({"adapter": "lore"}, "lore"),
    ],
)
def test_settings_that_adapters_do_not_have_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        AdapterConfig(**{"adapter": "loha", "lora_rank": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": "dora", "lora_format": "comfyui"},
            '`adapter="dora"` is not written for ComfyUI.*bucketing merge',
        ),
        ({"kind": "lokr", "memory": MemoryConfig(quantize_base="nf4")}, '`adapter="lokr"` needs weights of the shape'),
        ({"kind": "loha", "lora_plus": True}, 'Omit `lora_plus_ratio`.*`adapter="loha"` has others'),
        ({"adapters": False, "lora_plus": True}, "Omit `lora_plus_ratio`.*train adapters"),
        ({"optimizer": "prodigyopt:Prodigy", "sharding": "fsdp2"}, "Omit `optimizer=prodigyopt:Prodigy`, or use DDP"),
    ],
)
def test_what_kinds_and_optimizers_do_not_go_with_is_refused(changes: dict[str, Any], message: str) -> None:
    memory = MemoryConfig()
    whole = {"memory": memory, "adapters": True, "mixed_precision": "bf16", **changes}
    assert re.search(message, "\n".join(conflicts(Combination(**whole))))


@pytest.mark.parametrize("sharding", ["fsdp", "deepspeed"])
def test_flat_shares_are_no_matrices_for_muon(sharding: str) -> None:
    run = Combination(
        memory=MemoryConfig(), adapters=False, mixed_precision="bf16", sharding=sharding, optimizer="torch.optim:Muon"
    )
    assert any("Version 2 of FSDP takes torch's own" in str(conflict) for conflict in conflicts(run))


def test_torchs_optimizers_and_lora_plus_go_with_shards() -> None:
    whole = {"memory": MemoryConfig(), "adapters": True, "mixed_precision": "bf16", "sharding": "fsdp2"}
    for optimizer in ("adamw", "torch.optim:Muon"):
        assert not list(conflicts(Combination(**whole, optimizer=optimizer, lora_plus=True, kind="dora")))
