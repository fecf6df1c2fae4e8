"""The parts of a run that stand alone: adapters, optimizers, estimates, validation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.adapters.lora import add_lora, save_lora
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.media import MediaSource, probe
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.checkpoint import gather_weights, save_pipeline
from hf_bucketing.training.estimate import find_max_tokens
from hf_bucketing.training.settings.validation import ValidationConfig
from hf_bucketing.training.validation import Validation, parse_sizes
from tests.models.recipe_cases import samples_of

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def load(folder: Path) -> Recipe:
    return recipe_of(str(folder)).load(str(folder))


@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_adapters_are_saved_as_stock_diffusers_loads_them(family: str, pipeline_dirs, tmp_path: Path) -> None:
    recipe = load(pipeline_dirs[family])
    add_lora(recipe.pipeline, AdapterConfig(lora_rank=3, lora_alpha=6))
    trained = {name for name, parameter in recipe.transformer.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in recipe.transformer.named_parameters():
        if name in trained:
            torch.nn.init.normal_(parameter)
    save_lora(recipe.pipeline, tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(pipeline_dirs[family])
    plain = dataclasses.replace(recipe, pipeline=DiffusionPipeline.from_pretrained(pipeline_dirs[family]))
    pipeline.load_lora_weights(str(tmp_path))
    loaded = dataclasses.replace(recipe, pipeline=pipeline)
    samples = samples_of(recipe, torch.randn(1, 4, 2, 4, 6), timesteps=[7.0], captions=["red"], fps=[8.0])
    with torch.no_grad():
        outputs = [one.predict(one.transformer, samples, one.model_inputs(samples)) for one in (recipe, loaded, plain)]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


def test_adapters_that_cannot_be_are_errors(pipeline_dirs) -> None:
    with pytest.raises(BucketingError, match="LattePipeline cannot load LoRA"):
        add_lora(load(pipeline_dirs["latte"]).pipeline, AdapterConfig(lora_rank=4))
    with pytest.raises(BucketingError, match=r"`lora_targets`, \['nothing'\]"):
        add_lora(load(pipeline_dirs["wan"]).pipeline, AdapterConfig(lora_rank=4, lora_targets="nothing"))


@pytest.mark.slow
def test_max_tokens_is_the_largest_number_that_fits() -> None:
    tried = []

    def try_step(max_tokens: int) -> None:
        tried.append(max_tokens)
        if max_tokens > 700:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert find_max_tokens(try_step, largest=1000, smallest=100) == 656
    assert tried == [1000, 900, 810, 729, 656]
    with pytest.raises(BucketingError, match="largest sample takes 800"):
        find_max_tokens(try_step, largest=1000, smallest=800)

    def broken(max_tokens: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        find_max_tokens(broken, largest=1000, smallest=1)


def test_validation_sizes_are_read_and_checked() -> None:
    assert parse_sizes("1,64,64; 9,64,112", WAN) == [Size(1, 64, 64), Size(9, 64, 112)]
    with pytest.raises(BucketingError, match="frames,height,width"):
        parse_sizes("64x64", WAN)
    with pytest.raises(BucketingError, match="nearest"):
        parse_sizes("8,64,64", WAN)


@pytest.mark.parametrize(("family", "frames"), [("wan", 5), ("ltx", 5), ("latte", 16)])
def test_prompts_are_rendered_to_files_and_to_the_tracker(family, frames, pipeline_dirs, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    shown = {}

    class Tracker:
        name = "tensorboard"

        def log_images(self, values, step, dataformats):
            shown.update({(name, step, dataformats): images for name, images in values.items()})

    accelerator.trackers = [Tracker()]
    recipe = load(pipeline_dirs[family])
    recipe.transformer.train()
    validation = Validation(
        config=ValidationConfig(
            validation_prompts=["a red square!"],
            validation_inference_steps=2,
            validation_guidance_scale=2.0,
            validation_fps=8,
        ),
        images=[()],
        sizes=[Size(frames, 32, 64)],
        seed=0,
        folder=tmp_path,
    )
    validation.render(recipe, accelerator, step=3)
    name = f"{frames}x32x64-a-red-square"
    info = probe(MediaSource.from_cell(str(tmp_path / "step-3" / f"{name}.mp4")))
    assert (info.num_frames, info.height, info.width, info.fps) == (frames, 32, 64, 8.0)
    first = shown.pop((name, 3, "NHWC"))
    assert first.shape == (min(frames, 8), 32, 64, 3)
    assert not shown
    assert recipe.transformer.training
    validation.render(recipe, accelerator, step=4)
    assert np.abs(first.astype(int) - shown[name, 4, "NHWC"]).max() <= 1, "the same noise"


def test_prompts_that_begin_alike_are_rendered_to_files_of_their_own(tmp_path: Path) -> None:
    size, prompts = Size(1, 32, 64), ["a dog " * 20, "a dog " * 30, "a cat", "a dog " * 20]
    config = ValidationConfig(validation_prompts=prompts)
    validation = Validation(config=config, images=[()] * 4, sizes=[size], seed=0, folder=tmp_path)
    files = [validation.file_of(number, size, step=1) for number in range(4)]
    assert len({*files}) == 4
    assert files[2].name == "1x32x64-a-cat.png"
    assert files[3].stem == f"{files[0].stem}-3"


def test_a_sharded_model_is_saved_with_the_gathered_weights(pipeline_dirs, tmp_path: Path) -> None:
    recipe = load(pipeline_dirs["wan"])
    weights = {name: torch.full_like(value, 0.5) for name, value in recipe.transformer.state_dict().items()}
    assert gather_weights(Accelerator(cpu=True), recipe.transformer) is None
    save_pipeline(recipe, tmp_path, source=Path(pipeline_dirs["wan"]), weights=weights)
    saved = load(tmp_path).transformer
    assert all((value == 0.5).all() for value in saved.state_dict().values())
