"""Names of original checkpoints: diffusers' own converters of whole checkpoints agree with them."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders import single_file_utils

from hf_bucketing.adapters.original_names import known_layers, original_layers
from tests.adapters.lora_cases import FAMILIES, REFUSED, make_model

CONVERTERS = {
    "wan": "convert_wan_transformer_to_diffusers",
    "wan-i2v": "convert_wan_transformer_to_diffusers",
    "ltx": "convert_ltx_transformer_checkpoint_to_diffusers",
    "ltx2": "convert_ltx2_transformer_to_diffusers",
    "hunyuan-video": "convert_hunyuan_video_transformer_to_diffusers",
    "flux2": "convert_flux2_transformer_checkpoint_to_diffusers",
    "qwen-image-2.1": "convert_qwen_image21_transformer_checkpoint_to_diffusers",
    "krea2": "convert_krea2_transformer_checkpoint_to_diffusers",
}
"""Functions of diffusers that read whole original checkpoints."""


@pytest.mark.parametrize("name", [name for name in CONVERTERS if name in FAMILIES])
def test_whole_checkpoints_under_these_names_become_the_modules(name: str) -> None:
    _, transformer = make_model(name)
    layers = original_layers(transformer)
    marks = {
        module: float(number) for number, module in enumerate(part for parts in layers.values() for part in parts)
    }
    checkpoint = {
        f"{layer}.weight": torch.cat([torch.full((rows, 1), marks[module]) for module, rows in parts.items()])
        for layer, parts in layers.items()
    }
    read = getattr(single_file_utils, CONVERTERS[name])(checkpoint)
    assert read.keys() == {f"{module}.weight" for module in marks}
    for module, mark in marks.items():
        assert len(read[f"{module}.weight"]) == transformer.get_submodule(module).out_features
        assert (read[f"{module}.weight"] == mark).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_projections_of_attention_have_names(name: str) -> None:
    _, transformer = make_model(name)
    named = {module for parts in original_layers(transformer).values() for module in parts}
    assert any(module.endswith(("to_q", "to_query")) for module in named)
    known = known_layers(transformer)
    for module in named:
        assert (
            known[module]
            == known[module.replace(".", "_")]
            == {module: transformer.get_submodule(module).out_features}
        )


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_not_proven_are_not_known(name: str) -> None:
    assert original_layers(make_model(name)[1]) == {}


def test_layers_of_several_modules_hold_their_rows_in_order() -> None:
    layers = original_layers(make_model("hunyuan-video")[1])
    assert list(layers["single_blocks.0.linear1"]) == [
        "single_transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.0.attn.to_k",
        "single_transformer_blocks.0.attn.to_v",
        "single_transformer_blocks.0.proj_mlp",
    ]
