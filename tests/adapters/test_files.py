"""LoRA files: every layer has the strength that it was trained or saved with, or the file is refused."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import (
    COMFYUI_WEIGHTS,
    DOWN,
    LORA_WEIGHTS,
    PEFT_FILES,
    UP,
    Adapters,
    difference,
    fold_alpha,
    read_lora,
    strength,
    write_comfyui,
    write_diffusers,
)
from hf_bucketing.adapters.original_names import original_layers
from hf_bucketing.models.registry import family_of
from tests.adapters.lora_cases import (
    ALPHA,
    FAMILIES,
    RANK,
    REFUSED,
    change,
    draw_adapters,
    drawn,
    header_of,
    make_model,
    peer_file,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_diffusers_reads_the_same_change_from_a_file_for_comfyui(name: str, tmp_path: Path) -> None:
    pipeline_class, transformer = make_model(name)
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
        assert torch.equal(change(found.pop(f"transformer.{layer}")), by_hand)
    assert not any(float(change(pair).abs().max()) for pair in found.values())  # rows of modules without adapters

    again = read_lora(pipeline_class, transformer, tmp_path).folded()
    assert again.keys() == adapters.layers
    for layer, pair in adapters.folded().items():
        assert all(torch.equal(value, other) for value, other in zip(pair, again[layer], strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_not_proven_are_refused(name: str, tmp_path: Path) -> None:
    pipeline_class, transformer = make_model(name)
    adapters = draw_adapters(transformer, tmp_path / COMFYUI_WEIGHTS)
    with pytest.raises(BucketingError, match=r"the name of \S+to_q in the original checkpoint .* is not proven"):
        write_comfyui(pipeline_class, transformer, adapters, base_model="lab/model")
    assert not adapters.path.exists()


WRITERS = list(itertools.product(["kohya", "prefixed", "bare"], [None, 1.0, 16.0]))
WIDE = [
    pytest.param("hunyuan-video", "kohya", 1.0),
    pytest.param("hunyuan-video", "prefixed", None, marks=pytest.mark.slow),
    pytest.param("hunyuan-video", "bare", 16.0, marks=pytest.mark.slow),
]
"""Enough for HunyuanVideo, whose layers have their real width."""


@pytest.mark.parametrize(
    ("name", "writer", "alpha"),
    [
        *(
            (name, *case)
            for name in ("wan-i2v", "ltx", "ltx2", "flux2", "qwen-image", "z-image")
            if name in FAMILIES
            for case in WRITERS
        ),
        *WIDE,
    ],
)
def test_files_of_other_trainers_are_read_at_their_strength(
    name: str, writer: str, alpha: float | None, tmp_path: Path
) -> None:
    pipeline_class, transformer = make_model(name)
    torch.manual_seed(0)
    file, changes = peer_file(transformer, writer=writer, alpha=alpha)
    save_file(file, tmp_path / "peer.safetensors")
    read = read_lora(pipeline_class, transformer, tmp_path / "peer.safetensors").folded()
    assert read.keys() == changes.keys()
    for layer, by_hand in changes.items():
        assert torch.equal(change(read[layer]), by_hand)


def test_what_only_the_pipeline_reads_keeps_its_strength(tmp_path: Path) -> None:
    """Kohya's names of Flux are those of its own checkpoint, which this library has no table of."""
    pipeline_class, transformer = make_model("flux")
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
        ({f"{WAN}.diff_b": torch.ones(4)}, r"nothing else: transformer\.blocks\.0\.attn1\.to_q\.diff_b has no module"),
        (
            {f"{WAN}.lokr_w1": torch.ones(4, 4)},
            r"nothing else: .*lokr_w1 has no module",
        ),
        ({f"{WAN}.dora_scale": torch.ones(4, 1)}, r"nothing else: .*dora_scale has no module"),
        ({WAN + UP: torch.ones(5, RANK)}, r"nothing else: .*attn1\.to_q"),
        (
            {f"transformer.blocks.7.attn1.to_q{end}": torch.ones(RANK, RANK) for end in (DOWN, UP)},
            r"nothing else: transformer\.blocks\.7\.attn1\.to_q\.lora_A\.weight has no module",
        ),
    ],
)
def test_what_is_left_over_is_refused_by_name(added: dict, message: str, tmp_path: Path) -> None:
    pipeline_class, transformer = make_model("wan")
    adapters = draw_adapters(transformer, tmp_path / "lora.safetensors")
    weights = {f"transformer.{key}": value for key, value in adapters.weights.items()}
    weights = {key: value for key, value in {**weights, **added}.items() if value is not None}
    save_file(weights, adapters.path)
    with pytest.raises(BucketingError, match=message):
        read_lora(pipeline_class, transformer, adapters.path)


def test_a_file_with_two_scales_is_refused(tmp_path: Path) -> None:
    pipeline_class, transformer = make_model("wan")
    adapters = draw_adapters(transformer, tmp_path / "lora.safetensors")
    file = {f"transformer.{key}": value for key, value in adapters.weights.items()} | {
        f"{WAN}.alpha": torch.tensor(1.0)
    }
    save_file(file, adapters.path, metadata={"lora_adapter_metadata": '{"transformer.lora_alpha": 4}'})
    with pytest.raises(BucketingError, match="has two scales"):
        read_lora(pipeline_class, transformer, adapters.path)


def test_patterns_of_ranks_and_alphas_are_multiplied_in(tmp_path: Path) -> None:
    pipeline_class, transformer = make_model("wan")
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


LAYERS = ("blocks.0.attn1.to_q", "blocks.0.attn1.to_k", "blocks.1.attn2.to_q")
HEADERS: list[dict[str, Any]] = [
    {"lora_alpha": 0.5},
    {"lora_alpha": 1.5},
    {"lora_alpha": 16.0},
    {"lora_alpha": 0.0},
    {"lora_alpha": 0.5, "use_rslora": True},
    {"lora_alpha": 0.5, "alpha_pattern": {"attn2.to_q": 2.5, "to_k": 0.25}},
    {"lora_alpha": 2.5, "rank_pattern": {"blocks.1.attn2.to_q": 2}},
]


def header_file(path: Path, transformer: Any, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a file with settings of peft in its header; return the change of each layer as diffusers loads it."""
    config = {**LoraConfig(r=RANK, target_modules=list(LAYERS)).to_dict(), **settings, "target_modules": list(LAYERS)}
    torch.manual_seed(0)
    weights = {}
    for layer in LAYERS:
        module, rank = transformer.get_submodule(layer), settings.get("rank_pattern", {}).get(layer, RANK)
        weights[f"transformer.{layer}{DOWN}"] = drawn(rank, module.in_features)
        weights[f"transformer.{layer}{UP}"] = drawn(module.out_features, rank)
    named = {f"transformer.{name}": value for name, value in config.items()}
    save_file(weights, path, metadata={"lora_adapter_metadata": json.dumps(named, default=str)})
    stock = copy.deepcopy(transformer)
    stock.load_lora_adapter(weights, metadata=named)
    return {layer: stock.get_submodule(layer).get_delta_weight("default_0").detach() for layer in LAYERS}


def test_headers_mean_what_diffusers_makes_of_them(tmp_path: Path) -> None:
    pipeline_class, transformer = make_model("wan")
    for number, settings in enumerate(HEADERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        changes = header_file(folder / "lora.safetensors", transformer, settings)
        adapters = read_lora(pipeline_class, transformer, folder / "lora.safetensors")
        written = replace(adapters, path=folder / "written.safetensors")
        write_diffusers(pipeline_class, written)
        again = read_lora(pipeline_class, transformer, written.path)
        written = replace(adapters, path=folder / "comfyui.safetensors")  # old safetensors map files that they read
        write_comfyui(pipeline_class, transformer, written, base_model="lab/model")
        comfyui = read_lora(pipeline_class, transformer, written.path)
        for layer, expected in changes.items():
            for read in (adapters, again, comfyui):
                found = change(read.folded()[layer]) if layer in read.layers else torch.zeros_like(expected)
                torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6, msg=f"{settings} {layer}")


def test_scales_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """A file of peft has its scale beside it, and one without would be read at another strength."""
    pipeline_class, transformer = make_model("wan")
    adapters = draw_adapters(transformer, tmp_path / "lora.safetensors", alpha=None)
    file = {f"transformer.{key}": value for key, value in adapters.weights.items()}
    save_file(file, adapters.path, metadata={"lora_adapter_metadata": '{"transformer.lora_alpha": "much"}'})
    with pytest.raises(
        BucketingError, match=r"lora_alpha of .*lora\.safetensors` must be a finite number, got 'much'"
    ):
        read_lora(pipeline_class, transformer, adapters.path)
    save_file({f"base_model.model.{key}": value for key, value in adapters.weights.items()}, tmp_path / PEFT_FILES[0])
    with pytest.raises(BucketingError, match=r"has its scale in adapter_config\.json beside it"):
        read_lora(pipeline_class, transformer, tmp_path / PEFT_FILES[0])
    (tmp_path / PEFT_FILES[1]).write_text(json.dumps({"r": RANK, "lora_alpha": 0.5}))
    read = read_lora(pipeline_class, transformer, tmp_path / PEFT_FILES[0]).folded()
    for layer, pair in replace(adapters, alpha=0.5).folded().items():
        assert torch.equal(change(read[layer]), change(pair))


def test_scales_of_half_precision_are_multiplied_in_float32() -> None:
    ends = {"q" + DOWN: torch.ones(3, 2), "q" + UP: torch.full((2, 3), 1e-7)}
    half = {name: value.half() for name, value in ends.items()}
    folded = fold_alpha({**half, "q.alpha": torch.tensor(0.5).half()})
    assert torch.equal(folded["q" + UP], half["q" + UP].float() * (0.5 / 3))


@pytest.mark.parametrize("name", [name for name in ("wan", "flux2", "hunyuan-video") if name in FAMILIES])
def test_adapters_of_several_ranks_are_written_for_diffusers(name: str, tmp_path: Path) -> None:
    pipeline_class, transformer = make_model(name)
    for alpha in (None, ALPHA):
        adapters = draw_adapters(transformer, tmp_path / LORA_WEIGHTS, alpha=alpha)
        write_diffusers(pipeline_class, adapters)
        read = read_lora(pipeline_class, transformer, tmp_path).folded()
        for layer, pair in adapters.folded().items():
            torch.testing.assert_close(change(read[layer]), change(pair), rtol=0, atol=0)


def test_strength_is_the_norm_of_the_change() -> None:
    torch.manual_seed(0)
    one, other = ((torch.randn(3, 7), torch.randn(5, 3)) for _ in range(2))
    assert strength(one) == pytest.approx(float(change(one).norm()))
    assert difference(one, other) == pytest.approx(float((change(one) - change(other)).norm()))
    assert difference(one, one) < 1e-12


def test_the_header_names_the_ranks_of_fused_modules(tmp_path: Path) -> None:
    pipeline_class, transformer = make_model("hunyuan-video")
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
