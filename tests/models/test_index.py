"""The index of a pipeline, in both of its forms, and what of a modular pipeline is loaded and saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import ModularPipeline

from hf_bucketing import BucketingError
from hf_bucketing.models.index import MODULAR_INDEX, copy_index, read_index
from hf_bucketing.models.loading import Loading, empty_transformer, read_config
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner.components import read_components
from hf_bucketing.training.card import result_parts
from hf_bucketing.training.checkpoint import save_pipeline


@pytest.fixture
def modular(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of a modular pipeline whose text encoder lies in another repository, beside what no run calls."""
    folder, other = tmp_path / "flux3", tmp_path / "other"
    shutil.copytree(tiny_folder("flux3"), folder)
    shutil.move(folder / "text_encoder", other / "encoder")
    values = json.loads((folder / MODULAR_INDEX).read_text())
    values["text_encoder"][2] |= {"pretrained_model_name_or_path": str(other), "subfolder": "encoder"}
    rewriter = {"pretrained_model_name_or_path": str(tmp_path / "none"), "subfolder": "prompt_upsampler"}
    values["prompt_upsampler"][2] |= rewriter
    (folder / MODULAR_INDEX).write_text(json.dumps(values))
    return folder


def test_both_kinds_of_index_name_class_and_components(modular: Path, pipeline_dir: Path) -> None:
    index = read_index(str(modular))
    assert (index.class_name, index.is_modular) == ("Flux3ModularPipeline", True)
    assert set(index.components) == {"transformer", "vae", "text_encoder", "tokenizer", "prompt_upsampler"}
    assert index.absent == ("prompt_upsampler_processor",)
    encoder, transformer = (index.components[name] for name in ("text_encoder", "transformer"))
    assert (encoder.name_or_path, encoder.subfolder) == (str(modular.parent / "other"), "encoder")
    assert (transformer.name_or_path, transformer.class_name) == (str(modular), "Flux3Transformer2DModel")
    assert transformer.is_below(modular)
    assert not encoder.is_below(modular)
    stock = read_index(str(pipeline_dir))
    assert (stock.class_name, stock.is_modular) == ("WanPipeline", False)
    assert stock.components["transformer"].library == "diffusers"
    assert "transformer_2" in stock.absent


def test_configurations_come_from_where_the_index_says(modular: Path) -> None:
    assert read_config(str(modular), "text_encoder")["model_type"] == "qwen3_vl"
    assert read_config(str(modular), "transformer")["joint_attention_dim"] == 128
    assert next(empty_transformer(str(modular), "transformer").parameters()).is_meta
    components = read_components(str(modular))
    assert [encoder.class_name for encoder in components.text_encoders] == ["Qwen3VLForConditionalGeneration"]
    assert components.others == (), "the model that rewrites prompts is not called"
    with pytest.raises(BucketingError, match="comes without a text_encoder_2"):
        read_config(str(modular), "text_encoder_2")


def test_a_run_loads_the_parts_that_it_calls(modular: Path) -> None:
    recipe = recipe_of(str(modular))
    part = recipe.load(str(modular), loading=Loading(parts=("trained", "vae"), trained_dtype=torch.bfloat16))
    assert part.pipeline.text_encoder is None
    assert not hasattr(part.pipeline, "prompt_upsampler")
    assert part.transformer.dtype == torch.bfloat16
    assert part.pipeline.vae.dtype == torch.float32
    whole = recipe.load(str(modular), loading=Loading(empty=True, dtype=torch.bfloat16))
    assert next(whole.transformer.parameters()).is_meta
    assert whole.pipeline.text_encoder.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in whole.pipeline.text_encoder.parameters())


def test_a_result_loads_in_the_stock_pipeline(modular: Path, tmp_path: Path) -> None:
    recipe = recipe_of(str(modular)).load(str(modular), loading=Loading(parts=("trained",)))
    with torch.no_grad():
        recipe.transformer.proj_out.weight.fill_(0.5)
    out = tmp_path / "out"
    save_pipeline(recipe, out, source=modular)
    assert result_parts(out, adapters=False) == ["tokenizer", "transformer", "vae", MODULAR_INDEX]
    stock = ModularPipeline.from_pretrained(str(out))
    stock.load_components(["transformer", "vae", "tokenizer", "text_encoder"])
    assert type(stock).__name__ == "Flux3ModularPipeline"
    assert bool((stock.transformer.proj_out.weight == 0.5).all())
    assert None not in (stock.vae, stock.tokenizer, stock.text_encoder)
    assert stock.get_component_spec("transformer").pretrained_model_name_or_path == str(out)
    copy_index(out, out, place="owner/name")
    entries = json.loads((out / MODULAR_INDEX).read_text())
    places = {name: entries[name][2]["pretrained_model_name_or_path"] for name in ("transformer", "text_encoder")}
    assert places == {"transformer": "owner/name", "text_encoder": str(tmp_path / "other")}


def test_what_is_no_pipeline_is_refused(modular: Path, tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="is no diffusers pipeline"):
        recipe_of(str(tmp_path))
    shutil.rmtree(modular / "transformer")
    with pytest.raises(BucketingError, match="no folder"):
        recipe_of(str(modular)).load(str(modular))
    values = json.loads((modular / MODULAR_INDEX).read_text())
    values["transformer"][2]["pretrained_model_name_or_path"] = None
    values["_class_name"] = "Flux3DistilledModularPipeline"
    (modular / MODULAR_INDEX).write_text(json.dumps(values))
    with pytest.raises(BucketingError, match="has no transformer to train"):
        empty_transformer(str(modular), "transformer")
    with pytest.raises(BucketingError, match="which cannot be trained: its transformer is distilled to a flow map"):
        recipe_of(str(modular))
