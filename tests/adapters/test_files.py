"""LoRA files: every layer has the strength that it was trained or saved with, or the file is refused."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import (
    COMFYUI_WEIGHTS,
    DOWN,
    LORA_WEIGHTS,
    UP,
    Adapters,
    difference,
    read_lora,
    strength,
    write_comfyui,
    write_diffusers,
)
from hf_bucketing.adapters.lora import ADAPTER, adapters_of, add_lora, save_lora, start_adapters
from hf_bucketing.adapters.original_names import original_layers
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.models.registry import family_of
from tests.adapters.lora_cases import ALPHA, FAMILIES, RANK, REFUSED, change, draw_adapters, drawn, empty
from tests.conftest import run_script_here
from tests.models.families import RECIPES

STARTS = ("wan", "ltx", "ltx2", "flux2", "qwen-image", "z-image")
"""Tiny pipelines that other trainers' adapters are loaded into."""


@pytest.fixture
def load(tiny_folder: Callable[[str], Path]) -> Callable[[str], DiffusionPipeline]:
    """Return a function that loads the tiny pipeline of a family."""
    PartialState()  # what is logged is logged by the main process
    return lambda name: DiffusionPipeline.from_pretrained(tiny_folder(RECIPES[name].tiny), **RECIPES[name].components)


def trained(pipeline: DiffusionPipeline, *, alpha: int = ALPHA) -> DiffusionPipeline:
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


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}


@pytest.mark.parametrize("name", FAMILIES)
def test_diffusers_reads_the_same_change_from_a_file_for_comfyui(
    name: str, tiny_folder: Callable, tmp_path: Path
) -> None:
    pipeline_class, transformer = empty(name, tiny_folder)
    torch.manual_seed(0)
    adapters = draw_adapters(transformer, tmp_path / COMFYUI_WEIGHTS)
    write_comfyui(pipeline_class, transformer, adapters, base_model="lab/model")
    file = load_file(adapters.path)
    prefix = family_of(transformer).original_prefix
    assert all(key.startswith(prefix) and key.endswith((DOWN, UP)) for key in file)
    assert len({len(value) for key, value in file.items() if key.endswith(DOWN)}) == 1
    assert header_of(adapters.path)["base_model"] == "lab/model"

    read = pipeline_class.lora_state_dict(file)
    read = read[0] if isinstance(read, tuple) else read
    found = {
        key.removesuffix(DOWN): (read[key], read[key.removesuffix(DOWN) + UP]) for key in read if key.endswith(DOWN)
    }
    for layer in adapters.layers:
        scale = ALPHA / len(adapters.weights[layer + DOWN])
        by_hand = scale * change((adapters.weights[layer + DOWN], adapters.weights[layer + UP]))
        assert float((change(found.pop(f"transformer.{layer}")) - by_hand).abs().max()) == 0.0
    assert not any(float(change(pair).abs().max()) for pair in found.values())  # rows of modules without adapters

    again = read_lora(pipeline_class, transformer, tmp_path).folded()
    assert again.keys() == adapters.layers
    for layer, pair in adapters.folded().items():
        assert all(torch.equal(value, other) for value, other in zip(pair, again[layer], strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_not_proven_are_refused(name: str, tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = empty(name, tiny_folder)
    adapters = draw_adapters(transformer, tmp_path / COMFYUI_WEIGHTS)
    with pytest.raises(BucketingError, match=r"the name of \S+to_q in the original checkpoint .* is not proven"):
        write_comfyui(pipeline_class, transformer, adapters, base_model="lab/model")
    assert not adapters.path.exists()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "hunyuan-video"])
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


@pytest.mark.parametrize("name", ["wan", "flux2"])
def test_stock_transformers_predict_the_same_with_either_file(name: str, load, tmp_path: Path) -> None:
    save_lora(trained(load(name)), tmp_path, lora_format="both")
    images = []
    for file in (None, LORA_WEIGHTS, COMFYUI_WEIGHTS):
        pipeline = load(name)
        if file is not None:
            pipeline.load_lora_weights(str(tmp_path), weight_name=file)
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 48, "num_inference_steps": 1, **RECIPES[name].render}
        call = pipeline(prompt="a dog", generator=torch.Generator().manual_seed(0), output_type="latent", **size)
        images.append(call.frames if hasattr(call, "frames") else call.images)
    assert float((images[1] - images[0]).abs().max()) > 1e-3
    torch.testing.assert_close(images[2], images[1], rtol=0, atol=1e-6)


def peer_file(transformer: torch.nn.Module, *, writer: str, alpha: float | None) -> tuple[dict, dict]:
    """Return a file as a trainer writes it, and the change of each module by hand.

    kohya and musubi-tuner flatten names and write alphas, ai-toolkit and the LTX-2 trainer write none, SimpleTuner
    writes them beside peft's names, DiffSynth writes bare names. All train fused layers as one.
    """
    down_end, up_end = (".lora_down.weight", ".lora_up.weight") if writer == "kohya" else (DOWN, UP)
    if writer == "bare":
        down_end, up_end = ".lora_A.default.weight", ".lora_B.default.weight"
    file, changes = {}, {}
    for layer, parts in original_layers(transformer).items():
        inputs = transformer.get_submodule(next(iter(parts))).in_features
        down, up = drawn(RANK, inputs), drawn(sum(parts.values()), RANK)
        stem = {"kohya": f"lora_unet_{layer.replace('.', '_')}", "bare": layer}.get(writer, f"diffusion_model.{layer}")
        file |= {stem + down_end: down, stem + up_end: up}
        if alpha is not None:
            file[f"{stem}.alpha"] = torch.tensor(alpha)
        whole = (1 if alpha is None else alpha / RANK) * (up.double() @ down.double())
        changes |= dict(zip(parts, whole.split(list(parts.values())), strict=True))
    return file, changes


@pytest.mark.parametrize("alpha", [None, 1.0, 16.0])
@pytest.mark.parametrize("writer", ["kohya", "prefixed", "bare"])
@pytest.mark.parametrize("name", ["wan-i2v", "ltx", "ltx2", "flux2", "qwen-image", "z-image", "hunyuan-video"])
def test_files_of_other_trainers_are_read_at_their_strength(
    name: str, writer: str, alpha: float | None, tiny_folder: Callable, tmp_path: Path
) -> None:
    pipeline_class, transformer = empty(name, tiny_folder)
    torch.manual_seed(0)
    file, changes = peer_file(transformer, writer=writer, alpha=alpha)
    save_file(file, tmp_path / "peer.safetensors")
    read = read_lora(pipeline_class, transformer, tmp_path / "peer.safetensors").folded()
    assert read.keys() == changes.keys()
    for layer, by_hand in changes.items():
        assert float((change(read[layer]) - by_hand).abs().max()) == 0.0


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


def test_what_only_the_pipeline_reads_keeps_its_strength(tiny_folder: Callable, tmp_path: Path) -> None:
    """Kohya's names of Flux are those of its own checkpoint, which this library has no table of."""
    pipeline_class, transformer = empty("flux", tiny_folder)
    layer = transformer.get_submodule("transformer_blocks.0.attn.to_out.0")
    down, up = drawn(RANK, layer.in_features), drawn(layer.out_features, RANK)
    stem = "lora_unet_double_blocks_0_img_attn_proj"
    file = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up, f"{stem}.alpha": torch.tensor(2.0)}
    save_file(file, tmp_path / "kohya.safetensors")
    read = read_lora(pipeline_class, transformer, tmp_path / "kohya.safetensors").folded()
    assert list(read) == ["transformer_blocks.0.attn.to_out.0"]
    assert float((change(read["transformer_blocks.0.attn.to_out.0"]) - change((down, up)) / 2).abs().max()) == 0.0


WAN = "transformer.blocks.0.attn1.to_q"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({WAN + DOWN: None, f"{WAN}.alpha": torch.tensor(1.0)}, "scales no pair of LoRA matrices"),
        ({"transformer.blocks.0.nothing.alpha": torch.tensor(1.0)}, "scales no pair of LoRA matrices"),
        ({WAN + DOWN: None}, "LoRA weights"),
        ({"text_encoder.lora_A.weight": torch.ones(4, 4)}, "LoRA weights"),
        ({f"{WAN}.diff_b": torch.ones(4)}, r"nothing else: transformer\.blocks\.0\.attn1\.to_q\.diff_b is in it"),
        ({f"{WAN}.lokr_w1": torch.ones(4, 4)}, r"nothing else: transformer\.blocks\.0\.attn1\.to_q\.lokr_w1 is in it"),
        ({f"{WAN}.dora_scale": torch.ones(4, 1)}, r"nothing else: .*dora_scale is in it"),
        ({WAN + UP: torch.ones(5, RANK)}, r"nothing else: .*attn1\.to_q"),
        (
            {f"transformer.blocks.7.attn1.to_q{end}": torch.ones(RANK, RANK) for end in (DOWN, UP)},
            r"nothing else: transformer\.blocks\.7\.attn1\.to_q\.lora_A\.weight is in it",
        ),
    ],
)
def test_what_is_left_over_is_refused_by_name(
    added: dict, message: str, tiny_folder: Callable, tmp_path: Path
) -> None:
    pipeline_class, transformer = empty("wan", tiny_folder)
    adapters = draw_adapters(transformer, tmp_path / "lora.safetensors")
    weights = {f"transformer.{key}": value for key, value in adapters.weights.items()}
    weights = {key: value for key, value in {**weights, **added}.items() if value is not None}
    save_file(weights, adapters.path)
    with pytest.raises(BucketingError, match=message):
        read_lora(pipeline_class, transformer, adapters.path)


def test_a_file_with_two_scales_is_refused(tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = empty("wan", tiny_folder)
    adapters = draw_adapters(transformer, tmp_path / "lora.safetensors")
    file = {f"transformer.{key}": value for key, value in adapters.weights.items()} | {
        f"{WAN}.alpha": torch.tensor(1.0)
    }
    save_file(file, adapters.path, metadata={"lora_adapter_metadata": '{"transformer.lora_alpha": 4}'})
    with pytest.raises(BucketingError, match="has two scales"):
        read_lora(pipeline_class, transformer, adapters.path)


def test_patterns_of_ranks_and_alphas_are_multiplied_in(tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = empty("wan", tiny_folder)
    adapters = draw_adapters(transformer, tmp_path / LORA_WEIGHTS)
    layers = sorted(adapters.layers)
    for rooted in (False, True):
        config = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=layers,
            rank_pattern={layer: len(adapters.weights[layer + DOWN]) for layer in layers},
            alpha_pattern={"attn2.to_q": 2},
            use_rslora=rooted,
        )
        write_diffusers(pipeline_class, adapters, config)
        read = read_lora(pipeline_class, transformer, adapters.path).folded()
        for layer in layers:
            rank = len(adapters.weights[layer + DOWN])
            scale = (2 if layer.endswith("attn2.to_q") else ALPHA) / (rank**0.5 if rooted else rank)
            by_hand = scale * change((adapters.weights[layer + DOWN], adapters.weights[layer + UP]))
            torch.testing.assert_close(change(read[layer]), by_hand, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["wan", "flux2", "hunyuan-video"])
def test_adapters_of_several_ranks_are_written_for_diffusers(name: str, tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = empty(name, tiny_folder)
    for alpha in (None, ALPHA):
        adapters = draw_adapters(transformer, tmp_path / LORA_WEIGHTS, alpha=alpha)
        write_diffusers(pipeline_class, adapters)
        read = read_lora(pipeline_class, transformer, tmp_path).folded()
        for layer, pair in adapters.folded().items():
            torch.testing.assert_close(change(read[layer]), change(pair), rtol=0, atol=0)


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
    pipeline_class, transformer = empty("flux2", tiny_folder)
    file, changes = peer_file(transformer, writer="kohya", alpha=16.0)
    source, output = tmp_path / "kohya.safetensors", tmp_path / "diffusers.safetensors"
    save_file(file, source)
    convert(source, output, "--to", "diffusers", "--pretrained_model_name_or_path", tiny_folder("flux2"))
    read = read_lora(pipeline_class, transformer, output).folded()
    for layer, by_hand in changes.items():
        assert float((change(read[layer]) - by_hand).abs().max()) == 0.0


def test_strength_is_the_norm_of_the_change() -> None:
    torch.manual_seed(0)
    one, other = ((torch.randn(3, 7), torch.randn(5, 3)) for _ in range(2))
    assert strength(one) == pytest.approx(float(change(one).norm()))
    assert difference(one, other) == pytest.approx(float((change(one) - change(other)).norm()))
    assert difference(one, one) < 1e-12


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


def test_the_header_names_the_ranks_of_fused_modules(tiny_folder: Callable, tmp_path: Path) -> None:
    pipeline_class, transformer = empty("hunyuan-video", tiny_folder)
    adapters = draw_adapters(transformer, tmp_path / COMFYUI_WEIGHTS)
    write_comfyui(pipeline_class, transformer, adapters, base_model=str(tmp_path))
    header = header_of(adapters.path)
    assert header["base_model"] == tmp_path.name  # no folder of this machine
    ranks = json.loads(header["lora_ranks"])["single_blocks.0.linear1"]
    layers = original_layers(transformer)["single_blocks.0.linear1"]
    assert ranks == [len(adapters.weights[part + DOWN]) if part in adapters.layers else 0 for part in layers]


def test_adapters_in_half_precision_are_folded_in_float32() -> None:
    weights = {"q" + DOWN: torch.ones(3, 2, dtype=torch.bfloat16), "q" + UP: torch.ones(2, 3, dtype=torch.bfloat16)}
    _, up = replace(Adapters(path=Path(), weights=weights, alpha=None), alpha=1).folded()["q"]
    assert torch.equal(up, torch.ones(2, 3) * (1 / 3))
