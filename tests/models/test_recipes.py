"""The recipes: latents, texts, shifts and predictions are those of the pipelines themselves."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.losses import batch_vlb, masked_mse
from hf_bucketing.models.loading import strides_of
from hf_bucketing.models.objectives import Denoising, FlowMatching
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of, recipes as recipes_by_class
from hf_bucketing.models.samples import Samples
from hf_bucketing.models.texts import TextEmbeddings
from tests.models.recipe_cases import samples_of

SPECS = {
    "wan": LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)),
    "ltx": LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 1, 1)),
    "latte": LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2)),
}
FRAMES = {"wan": 5, "ltx": 5, "latte": 16}
families = pytest.mark.parametrize("family", SPECS)
OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


@pytest.fixture(scope="module")
def recipes(pipeline_dirs: dict[str, Path]) -> dict[str, Recipe]:
    return {name: recipe_of(str(path)).load(str(path)) for name, path in pipeline_dirs.items()}


@families
def test_the_spec_is_read_from_the_configurations(family: str, pipeline_dirs) -> None:
    folder = str(pipeline_dirs[family])
    assert recipe_of(folder).read_spec(folder) == SPECS[family]


@families
def test_only_the_transformer_is_trained(family: str, recipes) -> None:
    pipeline = recipes[family].pipeline
    trained = {name for name in ("vae", "text_encoder", "transformer") for p in getattr(pipeline, name).parameters()
               if p.requires_grad}  # fmt: skip
    assert trained == {"transformer"}


@families
def test_latents_have_the_mean_the_deviation_and_the_size_that_pipeline_and_spec_say(family: str, recipes) -> None:
    recipe, spec = recipes[family], SPECS[family]
    coarse = torch.rand(4, 3, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    clips = torch.nn.functional.interpolate(coarse, size=(FRAMES[family], 64, 96), mode="trilinear")
    latents = recipe.encode_latents(clips)
    assert latents.shape == (4, 4, (FRAMES[family] - 1) // spec.temporal_stride + 1, 8, 12)
    assert 0.5 < float(latents.std()) < 2
    if family != "latte":  # an image VAE has a scale, but no mean
        assert abs(float(latents.mean())) < 0.5


def test_ltx_normalises_as_its_pipeline(recipes) -> None:
    recipe = recipes["ltx"]
    clips = torch.rand(2, 3, 5, 32, 32) * 2 - 1
    vae = recipe.pipeline.vae
    raw = vae.encode(clips).latent_dist.mode()
    expected = recipe.pipeline._normalize_latents(raw, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    assert torch.equal(recipe.encode_latents(clips), expected)


def test_latte_scales_as_its_pipeline_decodes(recipes) -> None:
    recipe = recipes["latte"]
    clips = torch.rand(2, 3, 3, 32, 32) * 2 - 1
    expected = recipe.pipeline.vae.encode(clips[1, :, 2][None]).latent_dist.mode()[0]
    latents = recipe.encode_latents(clips)[1, :, 2]
    assert torch.allclose(latents / recipe.pipeline.vae.config.scaling_factor, expected, atol=1e-5)


def test_latte_cuts_text_as_its_pipeline_does_for_one_prompt(recipes) -> None:
    recipe = recipes["latte"]
    values, mask, _ = recipe.encode_text(["A Red Square ", "x"])
    for row, caption in enumerate(["A Red Square ", "x"]):
        alone, _ = recipe.pipeline.encode_prompt(caption, do_classifier_free_guidance=False, negative_prompt=None)
        assert torch.allclose(values[row, : int(mask[row].sum())], alone[0], atol=1e-6)


@families
def test_a_stack_predicts_what_its_samples_alone_do(family: str, recipes) -> None:
    recipe = recipes[family]
    latents = torch.randn(2, 4, {"latte": 16}.get(family, 2), 4, 6)
    captions, timesteps = ["red", "a large blue circle on grey"], [7.0, 900.0]

    def predict(samples: Samples) -> torch.Tensor:
        return recipe.predict(recipe.transformer, samples, recipe.model_inputs(samples))

    with torch.no_grad():
        together = predict(samples_of(recipe, latents, timesteps=timesteps, captions=captions, fps=[8.0, 8.0]))
        for row in range(2):
            rows = slice(row, row + 1)
            samples = samples_of(recipe, latents[rows], timesteps=timesteps[rows], captions=captions[rows], fps=[8.0])
            if samples.text.mask is not None:  # without its padding
                length = int(samples.text.mask.sum())
                words = TextEmbeddings(samples.text.values[:, :length], samples.text.mask[:, :length])
                samples = replace(samples, text=words)
            assert torch.allclose(together[row], predict(samples)[0], atol=1e-5)
    assert together.shape == (2, 8 if family == "latte" else 4, *latents.shape[2:])


def test_latte_stacks_only_its_own_duration(recipes) -> None:
    recipe = recipes["latte"]
    samples = samples_of(recipe, torch.randn(1, 4, 5, 4, 4), fps=[1.0])
    with pytest.raises(BucketingError, match='batching="pack"'):
        recipe.predict(recipe.transformer, samples, recipe.model_inputs(samples))


@torch.no_grad()
def test_ltx_stacks_samples_of_several_frame_rates(recipes) -> None:
    recipe, latents, rates = recipes["ltx"], torch.randn(2, 4, 2, 4, 4), [8.0, 15.0]

    def predict(*rows: int) -> torch.Tensor:
        samples = samples_of(recipe, latents[list(rows)], fps=[rates[row] for row in rows])
        return recipe.predict(recipe.transformer, samples, recipe.model_inputs(samples))

    together = predict(0, 1)
    for row in range(2):
        assert torch.allclose(together[row], predict(row)[0], atol=1e-5)
    assert not torch.allclose(together[1], predict(0)[0], atol=1e-3)


def test_ltx_shifts_noise_levels_as_its_scheduler_does_for_that_many_tokens(recipes) -> None:
    recipe = recipes["ltx"]
    latent = torch.randn(4, 3, 10, 12)
    objective = recipe.objective(**OPTIONS)
    plain = FlowMatching(seed=0)([latent], indices=[3], epoch=0).timesteps / 1000
    config = recipe.pipeline.scheduler.config
    mu = calculate_shift(3 * 10 * 12, config.base_image_seq_len, config.max_image_seq_len, config.base_shift,
                         config.max_shift)  # fmt: skip
    expected = recipe.pipeline.scheduler.time_shift(mu, 1.0, plain)
    assert torch.allclose(objective([latent], indices=[3], epoch=0).timesteps / 1000, expected, atol=1e-5)
    assert float(expected) > float(plain)


def test_ltx_conditioning_is_what_its_pipeline_passes(recipes) -> None:
    samples = samples_of(recipes["ltx"], fps=[8.0, 16.0])
    values = recipes["ltx"].conditioning(samples)["rope_interpolation_scale"]
    assert values.tolist() == [[4 / 8, 8, 8], [4 / 16, 8, 8]]


def test_latte_adds_noise_as_its_scheduler_and_trains_mean_and_variance(recipes) -> None:
    recipe = recipes["latte"]
    objective = recipe.objective(**OPTIONS)
    assert isinstance(objective, Denoising)
    latents = [torch.randn(4, 2, 4, 4) for _ in range(3)]
    noised = objective(latents, indices=[4, 5, 6], epoch=1)
    again = objective(latents[::-1], indices=[6, 5, 4], epoch=1)
    assert torch.equal(noised.timesteps, again.timesteps.flip(0))
    assert noised.timesteps.dtype == torch.int64
    expected = recipe.pipeline.scheduler.add_noise(torch.stack(latents), torch.stack(noised.targets), noised.timesteps)
    assert torch.allclose(torch.stack(noised.latents), expected, atol=1e-5)
    prediction = torch.randn(3, 8, 2, 4, 4, requires_grad=True)
    values = objective.losses(prediction, noised)
    bound = batch_vlb(
        prediction, noised=expected, clean=torch.stack(latents), timesteps=noised.timesteps,
        posterior=objective.posterior,
    )  # fmt: skip
    assert torch.allclose(values, masked_mse(prediction[:, :4], torch.stack(noised.targets)) + bound, rtol=1e-4)
    weighted = recipe.objective(**{**OPTIONS, "snr_gamma": 1e-3}).losses(prediction, noised)
    assert (weighted <= values).all()
    assert not torch.equal(weighted, values)
    with pytest.raises(BucketingError, match="the noise levels of a flow"):
        recipe.objective(**{**OPTIONS, "weighting_scheme": "uniform"})


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_denoising_targets_are_those_of_the_prediction_type(prediction_type: str) -> None:
    from diffusers import DDPMScheduler

    from hf_bucketing.losses import GaussianPosterior

    scheduler = DDPMScheduler(prediction_type=prediction_type)
    objective = Denoising(posterior=GaussianPosterior.from_scheduler(scheduler))
    latents = [torch.randn(4, 1, 4, 4) for _ in range(5)]
    noised = objective(latents, indices=range(5), epoch=0)
    epsilon = Denoising(posterior=GaussianPosterior(betas=scheduler.betas))(latents, indices=range(5), epoch=0)
    noise = torch.stack(epsilon.targets)
    expected = {
        "epsilon": noise,
        "sample": torch.stack(latents),
        "v_prediction": scheduler.get_velocity(torch.stack(latents), noise, noised.timesteps),
    }[prediction_type]
    assert torch.allclose(torch.stack(noised.targets), expected, atol=1e-5)
    with pytest.raises(BucketingError, match="channels"):
        objective.losses(torch.zeros(5, 3, 1, 4, 4), noised)


def test_an_unknown_pipeline_is_refused_with_the_names_of_those_known(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "InventedPipeline"}))
    known = ", ".join(sorted(recipes_by_class()))
    with pytest.raises(BucketingError, match=f"InventedPipeline; there are training recipes for {known}"):
        recipe_of(str(tmp_path))
    with pytest.raises(BucketingError, match="no folder"):
        recipe_of(str(tmp_path / "nowhere"))


def test_tiny_pipelines_are_in_modules_named_as_those_of_the_families() -> None:
    from hf_bucketing.models import families
    from hf_bucketing.synthetic import pipelines

    modules = [{module.name for module in pkgutil.iter_modules(package.__path__)} for package in (pipelines, families)]
    assert modules[0] - {"components"} == modules[1]


def test_an_unknown_tiny_family_is_an_error(tmp_path: Path) -> None:
    from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

    with pytest.raises(BucketingError, match=r"latte, .*ltx, .*wan"):
        make_tiny_pipeline(tmp_path / "x", family="invented")


@pytest.mark.parametrize(("pipeline", "expected"), [
    ("WanPipeline", {"height": 64, "width": 96, "num_frames": 5}),
    ("LattePipeline", {"height": 64, "width": 96, "video_length": 5}),
    ("FluxPipeline", {"height": 64, "width": 96}),
    ("FluxKontextPipeline", {"height": 64, "width": 96, "max_area": 64 * 96}),
    ("Cosmos2TextToImagePipeline", {"height": 64, "width": 96}),
    ("CogVideoXFunControlPipeline", {"height": 64, "width": 96}),
    ("ChronoEditPipeline", {"height": 64, "width": 96}),
    ("HunyuanVideo15ImageToVideoPipeline", {"num_frames": 5}),
])  # fmt: skip
def test_a_pipeline_is_called_with_what_it_takes_of_a_size(pipeline: str, expected: dict[str, int]) -> None:
    if pipeline.startswith("HunyuanVideo15") and not hasattr(transformers, "Qwen2_5_VLTextModel"):
        pytest.skip("diffusers imports it with a newer transformers")
    assert recipes_by_class()[pipeline].size_arguments(Size(frames=5, height=64, width=96)) == expected


@pytest.mark.parametrize(("vae", "strides"), [
    ({"temporal_compression_ratio": 8, "spatial_compression_ratio": 16}, (8, 16)),
    ({"scale_factor_temporal": 4, "scale_factor_spatial": 16}, (4, 16)),
    ({"temporal_compression_ratio": 4, "block_out_channels": [8] * 4}, (4, 8)),
    ({"block_out_channels": [8] * 6}, (4, 32)),
    ({"base_dim": 96}, (4, 8)),
])  # fmt: skip
def test_strides_follow_from_the_configuration_of_a_vae(vae: dict[str, Any], strides: tuple[int, int]) -> None:
    assert strides_of(vae) == strides
