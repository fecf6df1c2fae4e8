"""Plans of memory for every training recipe: what the models hold, and forwards that read masks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError, Size
from hf_bucketing.adapters import AdapterConfig
from hf_bucketing.adapters.files import loads_lora
from hf_bucketing.adapters.lora import add_lora
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner import MemoryParts, PlanConfig, encoding, memory as planner, options, plan_memory
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.options import plan_options
from hf_bucketing.settings import changed, flatten
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline, tiny_pipelines
from hf_bucketing.synthetic.published import write_published_configs
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin

CASES = {case.tiny: case for case in RECIPES.values()}
FAST = ("mochi", "hunyuan-image")
"""Pipelines of models whose forward reads the values of masks."""


def test_every_tiny_pipeline_is_planned() -> None:
    assert set(CASES) == set(tiny_pipelines())


def settings(name: str, folder: Path) -> PlanConfig:
    """Return settings for samples of a size that a pipeline takes."""
    case, components = CASES[name], read_components(str(folder))
    frames = 1 if components.recipe.family.images_only else int(case.bucket_frames.split(",")[-1])
    height, width = (int(side) for side in case.buckets.split(";")[0].split(","))
    size = components.spec.snap(Size(frames, height, width))
    return PlanConfig.from_flat(
        sample_size=list(size),
        train_batch_size=2,
        device="cpu",
        mixed_precision="no",
        max_sequence_length=case.max_sequence_length,
    )


def bytes_of(*modules: torch.nn.Module) -> int:
    return sum(tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize("name", one_per_kin(CASES, fast=FAST, few=True))
def test_a_plan_counts_what_the_models_of_a_pipeline_hold(
    name: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder(name)
    recipe = recipe_of(str(pipeline)).load(str(pipeline))
    shutil.copytree(pipeline, tmp_path / "configs", ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    config = settings(name, tmp_path / "configs")
    plan = plan_memory(str(tmp_path / "configs"), config)
    check_holds(plan, recipe)
    assert plan.phases["optimizer"].text_encoder == pytest.approx(bytes_of(*recipe.modules("text_encoders")), rel=0.05)
    assert plan.phases["optimizer"].vae == pytest.approx(bytes_of(*recipe.modules("vae")), rel=0.05)
    assert plan.phases["text encoding"].text_encoder > plan.phases["optimizer"].text_encoder
    assert plan.phases["media encoding"].vae > plan.phases["optimizer"].vae + 12 * plan.shape.pixels
    adapters = AdapterConfig(lora_rank=4)
    with_adapters = changed(config, cached="all", **flatten(adapters))
    if not loads_lora(recipe.pipeline_type()):
        with pytest.raises(BucketingError, match="cannot load LoRA weights"):
            plan_memory(str(tmp_path / "configs"), with_adapters)
        return
    add_lora(recipe.pipeline, adapters)
    lora = plan_memory(str(tmp_path / "configs"), with_adapters)
    check_holds(lora, recipe)
    assert lora.peak.total < plan.peak.total


def check_holds(plan: planner.MemoryPlan, recipe: Recipe) -> None:
    trained = sum(parameter.nbytes for parameter in recipe.transformer.parameters() if parameter.requires_grad)
    held = plan.phases["optimizer"]
    assert held.weights == pytest.approx(bytes_of(recipe.transformer), rel=0.01)
    assert (held.gradients, plan.phases["forward"].optimizer) == (trained, 2 * trained)
    latents = recipe.spec.latent_size(plan.shape.size)
    inputs = 4 * plan.shape.samples * recipe.latent_channels * torch.Size(latents).numel()
    assert min(plan.phases[phase].activations for phase in ("forward", "backward")) > inputs


@pytest.mark.slow
def test_a_longer_text_takes_more_where_the_forward_reads_its_mask(tmp_path: Path) -> None:
    make_tiny_pipeline(tmp_path, family="mochi")
    config = changed(settings("mochi", tmp_path), cached="all", max_sequence_length=64)
    plans = [plan_memory(str(tmp_path), changed(config, max_sequence_length=length)) for length in (64, 128)]
    assert plans[0].peak.activations < plans[1].peak.activations


@pytest.mark.every
def test_a_plan_of_wan_animate_counts_the_character_and_the_size_of_faces(tmp_path: Path) -> None:
    make_tiny_pipeline(tmp_path, family="wan-animate")
    config = changed(settings("wan-animate", tmp_path), cached="all")
    plan, file = plan_memory(str(tmp_path), config), tmp_path / "transformer" / "config.json"
    assert plan.shape.tokens == 2 * (3 + 1) * 2 * 3, "two samples of nine frames"
    model = json.loads(file.read_text())
    model["motion_encoder_channel_sizes"] |= {"32": 8, "64": 8}
    file.write_text(json.dumps({**model, "motion_encoder_size": 64}))
    larger = plan_memory(str(tmp_path), config)
    faces = 2 * 3 * 9 * 4 * (64**2 - 16**2)  # bytes of the pixels of two faces
    assert larger.phases["forward"].activations > plan.phases["forward"].activations + faces


@pytest.mark.every
def test_several_samples_are_planned_where_the_forward_asks_whether_all_images_are_zero(
    tmp_path: Path,
) -> None:
    write_published_configs(tmp_path, "hunyuan-video-1.5")
    config = PlanConfig.from_flat(
        sample_size=[1, 480, 848],
        cached="all",
        gradient_checkpointing=True,
        mixed_precision="bf16",
        train_batch_size=1,
    )
    one, three = (plan_memory(str(tmp_path), changed(config, train_batch_size=count)) for count in (1, 3))
    assert one.phases["optimizer"].weights == pytest.approx(4 * 8.3e9, rel=0.01)
    assert three.phases["backward"].activations > 2 * one.phases["backward"].activations > 0


def test_latent_frames_that_a_recipe_repeats_are_not_encoded(tmp_path: Path, monkeypatch) -> None:
    make_tiny_pipeline(tmp_path, family="cogvideox-1.5")
    components, encoded, trace_call = read_components(str(tmp_path)), [], encoding.trace_call

    def record(component: object, call: object, media: torch.Tensor, **options: object) -> object:
        encoded.append(media.shape[2])
        return trace_call(component, call, media, **options)

    monkeypatch.setattr(encoding, "trace_call", record)
    size = Size(9, 32, 32)
    assert components.spec.latent_size(size)[0] == 4, "three of the VAE, and the first again"
    encoding.encode_media(components, settings("cogvideox-1.5", tmp_path), size=size, samples=1)
    assert encoded == [9]


@pytest.mark.slow
def test_options_that_a_model_cannot_have_are_no_rows_of_the_table(
    tiny_folder: Callable[[str], Path], monkeypatch
) -> None:
    pipeline = tiny_folder("pixart-sigma")
    plan = plan_memory(str(pipeline), settings("pixart-sigma", pipeline))
    less = (MemoryParts(weights=2**40 // number) for number in itertools.count(1))  # each option saves something
    monkeypatch.setattr(
        options, "plan_components", lambda *_: dataclasses.replace(plan, phases={"optimizer": next(less)})
    )
    monkeypatch.setattr(options, "largest_tokens", lambda *args, **limits: 0)
    rows = plan_options(str(pipeline), settings("pixart-sigma", pipeline), gpu_memory=0.01)
    names = [row.name for row in rows]
    assert "--optimizer adamw_8bit" in names
    assert not any("lora" in name or "quantize" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        pytest.param("flux", 11.9, marks=pytest.mark.every),
        ("hunyuan-video", 12.8),
        pytest.param("wan-animate", 17.3, marks=pytest.mark.every),
    ],
)
def test_a_published_model_with_several_kinds_of_blocks_has_its_published_weights(
    name: str, billions: float, tmp_path: Path
) -> None:
    write_published_configs(tmp_path, name)
    config = PlanConfig.from_flat(
        cached="all", lora_rank=16, gradient_checkpointing=True, mixed_precision="bf16", train_batch_size=1
    )
    plan = plan_memory(str(tmp_path), config)
    assert plan.phases["optimizer"].weights == pytest.approx(2e9 * billions, rel=0.01)
    offloaded = plan_memory(str(tmp_path), changed(config, offload_blocks=plan.blocks)).phases["optimizer"].weights
    assert 0 < offloaded < 0.15 * plan.phases["optimizer"].weights, "the largest block, and what is outside of blocks"
