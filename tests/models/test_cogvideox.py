"""CogVideoX: its schedule, its loss, its texts, and the sizes that its positions allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler, DDPMScheduler

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.losses import GaussianPosterior
from hf_bucketing.models.objectives import Denoising
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from tests.models.recipe_cases import samples_of

SCHEDULE = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[[str], Path]) -> dict[str, Path]:
    names = ("cogvideox-2b", "cogvideox-1.5", "cogvideox-i2v", "cogvideox-5b-i2v")
    return {name: tiny_folder(name) for name in names}


def load(folder: Path, **options: int) -> Recipe:
    return recipe_of(str(folder)).load(str(folder), **options)


@pytest.mark.parametrize("scheduler", [
    CogVideoXDDIMScheduler(snr_shift_scale=3.0, **SCHEDULE), CogVideoXDPMScheduler(snr_shift_scale=1.0, **SCHEDULE),
])  # fmt: skip
def test_noise_and_targets_are_those_of_the_scheduler_up_to_pure_noise(scheduler) -> None:
    posterior = GaussianPosterior.from_scheduler(scheduler)
    steps = torch.arange(1000)
    signal, noise = (posterior.at(name, steps, torch.zeros(1000, dtype=torch.float64)) for name in ("signal", "noise"))
    assert torch.allclose(signal.square(), scheduler.alphas_cumprod.double(), atol=1e-12)
    assert torch.allclose(noise.square(), 1 - scheduler.alphas_cumprod.double(), atol=1e-12)
    assert (signal[-1], noise[-1]) == (0, 1)
    latents = [torch.randn(4, 1, 2, 2) for _ in range(20)]
    noised = Denoising(posterior=posterior)(latents, indices=range(20), epoch=0)
    again = Denoising(posterior=GaussianPosterior(betas=posterior.betas, prediction_type="sample"))
    drawn = torch.stack([
        (x_t - signal[t].float() * x) / noise[t].float()
        for x_t, x, t in zip(noised.latents, latents, noised.timesteps, strict=True)
    ])  # fmt: skip
    assert torch.equal(again(latents, indices=range(20), epoch=0).timesteps, noised.timesteps)
    expected = scheduler.get_velocity(torch.stack(latents), drawn, noised.timesteps)
    assert torch.allclose(torch.stack(noised.targets), expected, atol=1e-4)


def test_other_schedulers_keep_their_exact_betas_and_noise_is_not_predicted_from_pure_noise() -> None:
    scheduler = DDPMScheduler(variance_type="learned_range")
    assert torch.equal(GaussianPosterior.from_scheduler(scheduler).betas, scheduler.betas.double())
    with pytest.raises(BucketingError, match="ends in pure noise"):
        GaussianPosterior.from_scheduler(CogVideoXDDIMScheduler(rescale_betas_zero_snr=True))


def test_the_first_latent_frame_of_1_5_fills_a_patch(folders) -> None:
    recipe = load(folders["cogvideox-1.5"])
    assert recipe.spec == LatentSpec(temporal_stride=4, spatial_stride=8, patch=(2, 2, 2), repeats_first=True)
    for frames, latent_frames in ((1, 2), (9, 4), (17, 6)):
        latents = recipe.encode_latents(torch.rand(1, 3, frames, 32, 48))
        assert latents.shape == (1, 4, *recipe.spec.latent_size(Size(frames, 32, 48)))
        assert latents.shape[2] == latent_frames
        assert torch.equal(latents[:, :, 0], latents[:, :, 1])
    with pytest.raises(BucketingError, match="next valid size is 9×"):
        recipe.spec.latent_size(Size(13, 32, 48))


@pytest.mark.parametrize("name", ["cogvideox-2b", "cogvideox-5b-i2v"])
def test_texts_have_the_length_of_the_table_of_positions(name: str, folders) -> None:
    assert load(folders[name]).max_sequence_length == 64
    with pytest.raises(BucketingError, match="takes captions of 64 tokens, and `max_sequence_length` is 16"):
        load(folders[name], max_sequence_length=16)


def test_models_without_a_table_take_texts_of_any_length(folders) -> None:
    assert load(folders["cogvideox-1.5"], max_sequence_length=16).encode_text(["red"]).values.shape == (1, 16, 32)


def test_sizes_without_positions_are_refused_by_name(folders) -> None:
    learned, pairs = load(folders["cogvideox-5b-i2v"]), load(folders["cogvideox-1.5"])
    assert learned.refusal(samples_of(learned, torch.zeros(1, 4, 3, 4, 6), fps=[8.0])) is None
    assert "learned positions" in str(learned.refusal(samples_of(learned, torch.zeros(1, 4, 3, 6, 4), fps=[8.0])))
    refusal = pairs.refusal(samples_of(pairs, torch.zeros(1, 4, 2, 4, 66), fps=[8.0]))
    assert "32 positions for columns" in str(refusal)


def test_the_first_frame_is_scaled_as_the_vae_asks(folders) -> None:
    pixels = torch.rand(1, 3, 9, 32, 48) * 2 - 1
    for name, inverted in (("cogvideox-i2v", True), ("cogvideox-5b-i2v", False)):
        recipe = load(folders[name])
        config, latents = recipe.pipeline.vae.config, recipe.encode_latents(pixels[:, :, :1])
        assert config.invert_scale_latents == inverted
        scaled = latents[:, :, :1] / (config.scaling_factor**2 if inverted else 1)
        (image,) = recipe.encode_conditions(pixels, recipe.encode_latents(pixels), {}).values()
        assert torch.allclose(image, scaled, atol=1e-5)
        assert recipe.blank_conditions(latents[0])["image_latents"].shape == image.shape[1:]
