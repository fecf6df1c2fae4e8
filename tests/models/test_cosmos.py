"""Cosmos: a timestep per frame in packs, EDM's objective, and pipelines without their guardrail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CosmosTextToWorldPipeline, EDMEulerScheduler

from hf_bucketing import BucketingError, PackingError, Size
from hf_bucketing.models import enable_packing
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.objectives import EDM
from hf_bucketing.models.registry import family_of, recipe_of
from hf_bucketing.packing import packed_forward
from tests.models.cases import CASES, Samples, assert_same_gradients, gradients
from tests.models.families.cosmos import Guardrail
from tests.models.recipe_cases import samples_of

each_model = pytest.mark.parametrize("name", ["cosmos", "cosmos rotary only"])


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[[str], Path]) -> dict[str, str]:
    return {name: str(tiny_folder(name)) for name in ("cosmos", "cosmos2-t2i", "cosmos2-v2w")}


def by_frame(samples: Samples) -> list[torch.Tensor]:
    """Return a timestep for each frame: near 0 for the first, the sample's own for the others."""
    timesteps = [
        timestep.repeat(len(x[0])).double() for x, timestep in zip(samples.latents, samples.timesteps, strict=True)
    ]
    for levels in timesteps:
        levels[0] = 1e-4
    return timesteps


def alone(model: Any, samples: Samples, timesteps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run each sample as the pipeline of video-to-world does, with timesteps `(1, 1, frames, 1, 1)`."""
    inputs = zip(samples.latents, timesteps, samples.text, samples.conditioning["fps"], strict=True)
    return [
        model(
            latent[None],
            timestep.view(1, 1, -1, 1, 1),
            text[None],
            fps=float(fps),
            padding_mask=latent.new_zeros(1, 1, *latent.shape[2:]),
        ).sample[0]
        for latent, timestep, text, fps in inputs
    ]


@each_model
@pytest.mark.parametrize("strip_length", [4, 64])
def test_a_timestep_per_frame_is_that_of_the_stock_model(name: str, strip_length: int) -> None:
    case = CASES[name]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    timesteps = by_frame(samples)
    expected = alone(model, samples, timesteps)
    assert (
        max(float((output - other).abs().max()) for output, other in zip(expected, samples.alone(model), strict=True))
        > 1e-3
    )
    wanted = gradients(model, samples.loss_of(expected))
    batch = samples.pack(enable_packing(model, strip_length=strip_length), timesteps=timesteps)
    outputs = batch.unpack(packed_forward(model, batch))
    for output, other in zip(expected, outputs, strict=True):
        assert float((output - other).abs().max()) <= 1e-11 * max(1.0, float(output.abs().max()))
    assert_same_gradients(wanted, gradients(model, samples.loss_of(outputs)), 1e-6)


@each_model
@torch.no_grad()
def test_a_sample_alone_takes_a_timestep_per_frame_but_none_per_token(name: str) -> None:
    case = CASES[name]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    timesteps, family = by_frame(samples), family_of(model)
    inputs = {"text": samples.text[0], "conditioning": {"fps": samples.conditioning["fps"][0]}}
    output = family.run_alone(model, samples.latents[0], timestep=timesteps[0], **inputs)
    assert torch.equal(output, alone(model, samples, timesteps)[0])
    with pytest.raises(PackingError, match="a timestep per frame"):
        family.run_alone(model, samples.latents[0], timestep=torch.arange(18.0), **inputs)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_the_output_of_edm_makes_the_clean_latent_with_the_scheduler(prediction_type: str) -> None:
    scheduler = EDMEulerScheduler(sigma_data=0.7, prediction_type=prediction_type)
    objective = EDM(sigma_data=0.7, prediction_type=prediction_type)
    clean = [torch.randn(4, 3, 2, 2, dtype=torch.float64) for _ in range(4)]
    noised = objective(clean, indices=range(4), epoch=0)
    for latent, shown, target, timestep in zip(clean, noised.latents, noised.targets, noised.timesteps, strict=True):
        sigma = (4 * timestep.double()).exp()
        noisy = shown / scheduler._get_conditioning_c_in(sigma)
        assert torch.allclose(scheduler.precondition_noise(sigma), timestep.double(), rtol=1e-6)
        assert torch.allclose(scheduler.precondition_outputs(noisy, target, sigma), 0.7 * latent, atol=1e-5)
    levels = objective.noise_levels(noised.timesteps)
    assert ((levels > 0) & (levels < 1)).all()


def test_edm_raises_the_noise_of_videos_by_the_root_of_their_frames(folders) -> None:
    recipe = recipe_of(folders["cosmos"]).load(folders["cosmos"], max_sequence_length=16)
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    assert objective == EDM(sigma_data=0.5, shift=objective.shift, seed=0)
    assert [objective.shift((frames, 4, 4)) for frames in (1, 4)] == [1.0, 2.0]
    for name, value in (("weighting_scheme", "uniform"), ("snr_gamma", 5.0)):
        options: dict[str, Any] = {"weighting_scheme": None, "snr_gamma": None, "seed": 0, name: value}
        with pytest.raises(BucketingError, match=f"trained by EDM.*`{name}`"):
            recipe.objective(**options)
    other = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0, shift="16x16:3,64x64:5")
    assert [other.shift((1, side, side)) for side in (2, 8)] == [3.0, 5.0]
    with pytest.raises(BucketingError, match="sigma_data must be positive"):
        EDM(sigma_data=0)
    with pytest.raises(BucketingError, match="'epsilon' or 'v_prediction' with EDM"):
        EDM(prediction_type="sample")


def test_samples_of_several_rates_and_long_ones_are_refused_by_name(folders, monkeypatch) -> None:
    recipe = recipe_of(folders["cosmos"]).load(folders["cosmos"], max_sequence_length=16)
    assert "one frame rate per batch" in recipe.refusal(samples_of(recipe, fps=[8.0, 16.0]))
    assert recipe.refusal(samples_of(recipe, fps=[8.0, 8.0])) is None
    with pytest.raises(BucketingError, match="statistics for 16 latent frames, and a sample has 17"):
        recipe.encode_latents(torch.zeros(1, 3, 65, 16, 16))
    recipe = replace(recipe, config={**recipe.config, "concat_padding_mask": True})
    monkeypatch.setattr("hf_bucketing.models.families.cosmos.is_torchvision_available", lambda: False)
    assert "install torchvision" in recipe.refusal(samples_of(recipe, fps=[8.0]))


def test_videos_are_refused_by_a_pipeline_that_renders_images(folders) -> None:
    recipe = recipe_of(folders["cosmos2-t2i"]).load(folders["cosmos2-t2i"], max_sequence_length=16)
    with pytest.raises(BucketingError, match="renders images, and a sample has 2 latent frames"):
        recipe.model_inputs(samples_of(recipe, torch.zeros(1, 4, 2, 4, 4), fps=[8.0]))


def test_a_pipeline_is_trained_without_its_guardrail_and_renders_with_it(folders, monkeypatch) -> None:
    folder = folders["cosmos"]
    assert json.loads((Path(folder) / "model_index.json").read_text())["safety_checker"] == [None, None]
    recipe = recipe_of(folder).load(folder, max_sequence_length=16, loading=Loading(parts=("trained", "vae")))
    assert recipe.pipeline.text_encoder is None
    assert recipe.pipeline.safety_checker is None
    recipe = recipe_of(folder).load(folder, max_sequence_length=16)
    call = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 16}
    with pytest.raises(BucketingError, match=r"without its guardrail.*pip install cosmos_guardrail"):
        recipe.render("red", Size(5, 32, 48), **call)
    module = "diffusers.pipelines.cosmos.pipeline_cosmos_text2world"
    monkeypatch.setattr(f"{module}.CosmosSafetyChecker", Guardrail)
    frames = recipe.render("red", Size(5, 32, 48), generator=torch.Generator().manual_seed(0), **call)
    assert frames.shape == (5, 32, 48, 3)
    stock = CosmosTextToWorldPipeline.from_pretrained(folder)
    call["generator"] = torch.Generator().manual_seed(0)
    expected = stock("red", height=32, width=48, num_frames=5, output_type="np", **call)
    assert np.array_equal(frames, expected.frames[0])
    with pytest.raises(ValueError, match="unsafe text"):
        recipe.render("unsafe", Size(5, 32, 48), **call)


def test_captions_of_anima_are_no_longer_than_what_its_conditioner_pads_them_to(
    tiny_folder: Callable[[str], Path],
) -> None:
    pytest.importorskip("diffusers.modular_pipelines.anima")
    folder = str(tiny_folder("anima"))
    with pytest.raises(BucketingError, match="pads captions to 512 tokens"):
        recipe_of(folder).load(folder, max_sequence_length=513)
    text = recipe_of(folder).load(folder, max_sequence_length=64).encode_text(["a square", ""])
    assert text.values.shape[:2] == (2, 512)
    assert text.values[0].any(1).sum() == len("a square") + 1, "bytes, and what ends them"
    assert not text.values[0, 64:].any()
