"""Bria 3.2: its null text, and what its pipeline reads though a run does not call it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hf_bucketing.models.loading import Loading
from hf_bucketing.models.registry import recipe_of


def test_a_pipeline_without_weights_of_the_transformer_encodes_the_null_text_as_stock(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = str(tiny_folder("bria"))
    recipe = recipe_of(folder).load(folder, loading=Loading(parts=("text_encoders",)), max_sequence_length=16)
    assert {parameter.device.type for parameter in recipe.transformer.parameters()} == {"meta"}
    embeds, without, _ = recipe.pipeline.encode_prompt("red", device="cpu", max_sequence_length=16)
    assert torch.equal(recipe.encode_text(["red"]).values, embeds)
    assert torch.equal(recipe.encode_null().values, without)
    assert not without.any()
