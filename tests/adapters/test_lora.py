"""LoRA of pipelines: what training saves and starts from, and what the script converts."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from accelerate import PartialState, init_empty_weights
from diffusers import DiffusionPipeline
from diffusers.training_utils import cast_training_params
from packaging.version import Version
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import (
    COMFYUI_WEIGHTS,
    DOWN,
    LORA_WEIGHTS,
    UP,
    read_lora,
    strength,
    write_diffusers,
)
from hf_bucketing.adapters.kinds import merge_adapters
from hf_bucketing.adapters.lora import ADAPTER, adapters_of, add_adapters, add_lora, save_lora, start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models.loading import empty_transformer
from hf_bucketing.models.registry import family_of
from tests.adapters.lora_cases import ALPHA, FAMILIES, RANK, change, drawn, header_of, peer_file
from tests.conftest import run_script_here
from tests.models.cases import CASES, Samples
from tests.models.families import RECIPES
from tests.models.recipe_cases import stock_pipeline
from tests.packing.test_costs import Operations

TOO_NEW = ("ltx2", "qwen-image", "kandinsky5") if Version(diffusers.__version__) < Version("0.40") else ()
"""Tiny pipelines whose components need a newer diffusers, or the newer transformers that comes with it."""
LOADED = [name for name in FAMILIES if name not in ("hunyuan-video", *TOO_NEW)]
STARTS = [name for name in ("wan", "ltx", "ltx2", "flux2", "qwen-image", "z-image") if name not in TOO_NEW]
"""Tiny pipelines that adapters are loaded into."""


@pytest.fixture
def load(tiny_folder: Callable[[str], Path]) -> Callable[[str], DiffusionPipeline]:
    """Return a function that loads the tiny pipeline of a family."""
    PartialState()  # what is logged is logged by the main process
    return lambda name: stock_pipeline(tiny_folder(RECIPES[name].tiny), **RECIPES[name].components)


def trained(pipeline: DiffusionPipeline, *, alpha: float = ALPHA) -> DiffusionPipeline:
    """Add adapters as training does, and draw their weights."""
    torch.manual_seed(0)
    add_lora(pipeline, AdapterConfig(lora_rank=RANK, lora_alpha=alpha))
    for value in adapters_of(pipeline.transformer).values():
        value.data.copy_(drawn(*value.shape))
    return pipeline


def strengths(pipeline: DiffusionPipeline) -> dict[str, torch.Tensor]:
    """Return the change that the adapters make to the weight of each layer."""
    weights, alpha = adapters_of(pipeline.transformer), pipeline.transformer.peft_config[ADAPTER].lora_alpha
    layers = [name.removesuffix(DOWN) for name in weights if name.endswith(DOWN)]
    pairs = {layer: (weights[layer + DOWN].detach(), weights[layer + UP].detach()) for layer in layers}
    return {layer: alpha / len(down) * up @ down for layer, (down, up) in pairs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADED)
def test_stock_pipelines_have_the_same_weights_with_either_file(name: str, load, tmp_path: Path) -> None:
    save_lora(trained(load(name)), tmp_path, lora_format="both")
    fused = []
    for file in (LORA_WEIGHTS, COMFYUI_WEIGHTS):
        pipeline = load(name)
        before = {key: value.clone() for key, value in pipeline.transformer.state_dict().items()}
        pipeline.load_lora_weights(str(tmp_path), weight_name=file)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        fused.append({key: value - before[key] for key, value in pipeline.transformer.state_dict().items()})
    assert fused[0].keys() == fused[1].keys()
    assert any(float(value.abs().max()) > 0.1 for value in fused[0].values())
    for key, value in fused[0].items():
        torch.testing.assert_close(fused[1][key], value, rtol=0, atol=1e-6)


@torch.no_grad()
def as_wide_as_published(pipeline: DiffusionPipeline) -> DiffusionPipeline:
    """Give HunyuanVideo its width of 3,072, at which diffusers' reader of other names splits any model's layers."""
    if isinstance(pipeline, diffusers.HunyuanVideoPipeline):
        tiny = pipeline.transformer
        width = {"num_attention_heads": 24, "attention_head_dim": 128, "rope_axes_dim": (16, 56, 56)}
        depth = dict.fromkeys(("num_layers", "num_single_layers", "num_refiner_layers"), 1)
        with init_empty_weights():
            wide = type(tiny).from_config({**tiny.config, **width, **depth, "mlp_ratio": 0.1})
        torch.manual_seed(0)
        for value in wide.to_empty(device="cpu").parameters():
            value.uniform_(-0.03, 0.03)
        pipeline.register_modules(transformer=wide.eval())
    return pipeline


@pytest.mark.cases(fast=("wan", "flux2"))
@pytest.mark.parametrize("name", ["wan", "flux2", "hunyuan-video"])
def test_stock_transformers_predict_the_same_with_either_file(name: str, load, tmp_path: Path) -> None:
    def rendered(pipeline: DiffusionPipeline) -> torch.Tensor:
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 48, "num_inference_steps": 1, **RECIPES[name].render}
        call = pipeline(prompt="a dog", generator=torch.Generator().manual_seed(0), output_type="latent", **size)
        return call.frames if hasattr(call, "frames") else call.images

    pipeline = trained(as_wide_as_published(load(name)))
    save_lora(pipeline, tmp_path, lora_format="both")
    expected = rendered(pipeline)
    pipeline = as_wide_as_published(load(name))
    assert float((rendered(pipeline) - expected).abs().max()) > 1e-3
    for file in (LORA_WEIGHTS, COMFYUI_WEIGHTS):
        pipeline.load_lora_weights(str(tmp_path), weight_name=file)
        torch.testing.assert_close(rendered(pipeline), expected, rtol=1e-5, atol=1e-6)
        pipeline.unload_lora_weights()


@pytest.mark.parametrize("prefix", ["transformer.", "diffusion_model.", "lora_unet_"])
@pytest.mark.parametrize("name", STARTS)
def test_layers_start_at_the_strength_of_alpha_tensors(name: str, prefix: str, load, tmp_path: Path) -> None:
    pipeline = trained(load(name))
    expected, file = strengths(pipeline), {}
    flat = prefix == "lora_unet_"
    for key, value in adapters_of(pipeline.transformer).items():
        layer, end = (
            (key.removesuffix(DOWN), ".lora_down.weight")
            if key.endswith(DOWN)
            else (key.removesuffix(UP), ".lora_up.weight")
        )
        stem = prefix + (layer.replace(".", "_") if flat else layer)
        file[stem + end if flat else prefix + key] = value.detach().contiguous()
        file[f"{stem}.alpha"] = torch.tensor(float(ALPHA))
    save_file(file, tmp_path / "lora.safetensors")
    pipeline = load(name)
    config = start_adapters(
        pipeline, AdapterConfig(lora_rank=RANK, init_from_adapters=str(tmp_path / "lora.safetensors"))
    )
    assert config.lora_alpha == RANK
    found = strengths(pipeline)
    assert found.keys() == expected.keys()
    for layer, by_hand in expected.items():
        assert float(by_hand.norm()) > 0
        torch.testing.assert_close(found[layer], by_hand, rtol=1e-6, atol=1e-6)


def convert(*arguments: object, check: bool = True):
    return run_script_here("convert_lora.py", *arguments, check=check)


@pytest.mark.parametrize("name", ["wan", "flux2"])
def test_converting_there_and_back_is_the_identity(name: str, load, tiny_folder: Callable, tmp_path: Path) -> None:
    save_lora(trained(load(name), alpha=RANK), tmp_path)
    base = ("--pretrained_model_name_or_path", tiny_folder(RECIPES[name].tiny))
    there, back, again = (tmp_path / f"{step}.safetensors" for step in ("there", "back", "again"))
    result = convert(tmp_path, there, "--to", "comfyui", "--layers", *base)
    (largest,) = re.findall(r"largest difference after converting (\S+) of it", result.stdout)
    assert float(largest) < 1e-12
    read = read_lora(type(load(name)), load(name).transformer, tmp_path).folded()
    for layer, pair in read.items():
        number = f"{strength(pair):.6g}"
        assert any(line.split() == [number, number, layer] for line in result.stdout.splitlines())
    convert(there, back, "--to", "diffusers", *base)
    convert(back, again, "--to", "comfyui", *base)
    for one, other in ((tmp_path / LORA_WEIGHTS, back), (there, again)):
        first, second = load_file(one), load_file(other)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert header_of(there) == header_of(again)
    refused = convert(back, again, "--to", "comfyui", *base, check=False)
    assert refused.returncode == 1
    assert "exists; name a new file" in refused.stderr


def test_fused_layers_of_other_trainers_are_converted(tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = diffusers.Flux2Pipeline, empty_transformer(str(tiny_folder("flux2")), "transformer")
    file, changes = peer_file(transformer, writer="kohya", alpha=16.0)
    source, output = tmp_path / "kohya.safetensors", tmp_path / "diffusers.safetensors"
    save_file(file, source)
    convert(source, output, "--to", "diffusers", "--pretrained_model_name_or_path", tiny_folder("flux2"))
    read = read_lora(pipeline_class, transformer, output).folded()
    for layer, by_hand in changes.items():
        assert float((change(read[layer]) - by_hand).abs().max()) == 0.0


def test_fractional_alphas_keep_their_strength_from_file_to_file(
    load, tiny_folder: Callable, monkeypatch, tmp_path: Path
) -> None:
    source, base = tmp_path / LORA_WEIGHTS, tiny_folder("wan")
    pipeline = trained(load("wan"), alpha=0.5)
    save_lora(pipeline, tmp_path, lora_format="diffusers")
    assert json.loads(header_of(source)["lora_adapter_metadata"])["transformer.lora_alpha"] == 0.5
    again = load("wan")
    config = start_adapters(again, AdapterConfig(lora_rank=RANK, init_from_adapters=str(source)))
    assert config.lora_alpha == 0.5
    run_script_here("merge_lora.py", base, source, tmp_path / "merged")
    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged").transformer
    for to in ("diffusers", "comfyui"):
        convert(source, tmp_path / f"{to}.safetensors", "--to", to, "--pretrained_model_name_or_path", base)
    read = [read_lora(type(pipeline), pipeline.transformer, tmp_path / f"{to}.safetensors").folded()
            for to in ("diffusers", "comfyui")]  # fmt: skip
    started, plain = strengths(again), load("wan").transformer
    for layer, expected in strengths(pipeline).items():
        assert float(expected.norm()) > 0
        found = merged.get_submodule(layer).weight - plain.get_submodule(layer).weight
        for value in (started[layer], found, *(change(pairs[layer]).float() for pairs in read)):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)

    def cut(pipeline_class, adapters) -> None:
        write_diffusers(pipeline_class, replace(adapters, alpha=1))

    monkeypatch.setattr("hf_bucketing.adapters.files.write_diffusers", cut)
    options = ("--to", "diffusers", "--pretrained_model_name_or_path", base)
    wrong = convert(source, tmp_path / "wrong.safetensors", *options, check=False)
    assert wrong.returncode == 1
    assert "which is more than rounding" in wrong.stderr
    assert not (tmp_path / "wrong.safetensors").exists()


def test_changes_that_a_merged_weight_cannot_hold_are_refused(load, tmp_path: Path) -> None:
    pipeline = trained(load("wan"), alpha=10**7)
    save_lora(pipeline, tmp_path, lora_format="diffusers")
    with pytest.raises(BucketingError, match=r"attn1\.to_\w+.* reaches .*which torch.float16 cannot hold"):
        merge_adapters(type(pipeline), load("wan").transformer.half(), tmp_path)


def test_saving_for_one_program_removes_the_file_for_the_other(load, tmp_path: Path) -> None:
    pipeline = trained(load("wan"))
    for lora_format, files in (
        ("both", {LORA_WEIGHTS, COMFYUI_WEIGHTS}),
        ("comfyui", {COMFYUI_WEIGHTS}),
        ("diffusers", {LORA_WEIGHTS}),
    ):
        save_lora(pipeline, tmp_path, lora_format=lora_format)
        assert {path.name for path in tmp_path.iterdir()} == files


def test_wrong_names_are_found_when_they_are_read_back(load, monkeypatch, tmp_path: Path) -> None:
    pipeline = trained(load("wan"))
    family = family_of(pipeline.transformer)
    swapped = {"self_attn.q": "self_attn.k", "self_attn.k": "self_attn.q"}
    names = [(module, f"blocks.*.{swapped.get(layer[9:], layer[9:])}") for module, layer in family.original_names]
    monkeypatch.setattr(type(family), "original_names", tuple(names))
    with pytest.raises(BucketingError, match=r"diffusers reads blocks\.0\.attn1\.to_[qk] back differently"):
        save_lora(pipeline, tmp_path, lora_format="both")
    assert not list(tmp_path.iterdir())


def test_runs_save_for_diffusers_alone_where_names_are_not_proven(load, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        config = start_adapters(load("mochi"), AdapterConfig(lora_rank=RANK))
    assert config.lora_format == "diffusers"
    assert caplog.text.count("cannot be saved for ComfyUI") == 1
    with pytest.raises(BucketingError, match=r"cannot be saved for ComfyUI: .* `lora_format=diffusers`"):
        start_adapters(load("mochi"), AdapterConfig(lora_rank=RANK, lora_format="comfyui"))
    assert start_adapters(load("wan"), AdapterConfig(lora_rank=RANK)).lora_format == "both"


def test_the_text_refiner_of_hunyuan_video_has_adapters_only_on_request(load) -> None:
    for targets, refined in ((None, False), ("to_q", True)):
        pipeline = load("hunyuan-video")
        add_lora(pipeline, AdapterConfig(lora_rank=RANK, lora_targets=targets))
        layers = adapters_of(pipeline.transformer)
        assert any("single_transformer_blocks.0.attn.to_q" in layer for layer in layers)
        assert any(layer.startswith("context_embedder.") for layer in layers) == refined


def test_casts_that_autocast_repeats_are_left_out_and_change_no_bit() -> None:
    results = []
    for casts in (None, True):  # as the package leaves it, and as peft does
        model = CASES["wan"].model(torch.bfloat16)
        add_adapters(model, AdapterConfig(lora_rank=4))
        cast_training_params(model, torch.float32)
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            for weight in (*layer.lora_A.values(), *layer.lora_B.values()):
                torch.nn.init.normal_(weight.weight, std=0.1, generator=torch.Generator().manual_seed(1))
            if casts is not None:
                layer.cast_input_dtype_enabled = casts
        with torch.autocast("cpu", torch.bfloat16), Operations() as ran:
            output = torch.cat([part.flatten() for part in Samples().alone(model)])
        output.float().square().mean().backward()
        slopes = [weight.grad for weight in model.parameters() if weight.requires_grad]
        results.append((output, slopes, ran.names["aten::_to_copy"]))
        with torch.no_grad():
            Samples(torch.bfloat16).alone(model)  # without autocast peft still casts
    (output, slopes, fewer), (other, others, more) = results
    assert torch.equal(output, other)
    assert all(torch.equal(slope, reference) for slope, reference in zip(slopes, others, strict=True))
    assert all(bool(slope.any()) for slope in slopes)
    assert fewer < more
