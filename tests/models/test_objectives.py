"""The objective, and the latents and text embeddings that it works on."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError, LatentSpec
from hf_bucketing.losses import GaussianPosterior
from hf_bucketing.media import frame_rates
from hf_bucketing.models.families.ltx import LTXRecipe
from hf_bucketing.models.families.wan import WanRecipe
from hf_bucketing.models.objectives import EDM, Denoising, DiffusionForcing, FlowMatching, sample_generator
from tests.models.recipe_cases import samples_of


def test_the_recipe_reads_the_spec_without_weights_and_refuses_other_pipelines(pipeline_dir, tmp_path: Path) -> None:
    assert WanRecipe.read_spec(str(pipeline_dir)) == LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    shutil.copytree(pipeline_dir, tmp_path / "other")
    index = json.loads((tmp_path / "other" / "model_index.json").read_text())
    index["transformer"], index["_class_name"] = [None, None], "WanPipeline"
    (tmp_path / "other" / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BucketingError, match="has no transformer to train"):
        WanRecipe.load(str(tmp_path / "other"))


def test_latents_and_text_are_those_that_the_pipeline_makes(pipeline_dir) -> None:
    recipe = WanRecipe.load(str(pipeline_dir), max_sequence_length=16)
    pixels = torch.rand(2, 3, 5, 32, 48) * 2 - 1
    latents = recipe.encode_latents(pixels)
    assert latents.shape == (2, 4, 2, 4, 6)
    config = recipe.pipeline.vae.config
    raw = recipe.pipeline.vae.encode(pixels).latent_dist.mode()
    for channel in range(4):
        expected = (raw[:, channel] - config.latents_mean[channel]) / config.latents_std[channel]
        assert torch.allclose(latents[:, channel], expected, atol=1e-5)
    text, mask, _ = recipe.encode_text(["red", "a blue square"])
    assert mask is None
    assert text.shape == (2, 16, 32)
    assert (text[0, 4:] == 0).all(), "three bytes and the end token; then zeros, which the model attends to"
    objective = recipe.objective(weighting_scheme="uniform", snr_gamma=None, seed=4)
    assert objective == FlowMatching(num_train_timesteps=1000, shift=3.0, weighting_scheme="uniform", seed=4)
    with pytest.raises(BucketingError, match="snr_gamma"):
        recipe.objective(weighting_scheme="uniform", snr_gamma=5.0, seed=4)


def test_noise_and_timesteps_follow_seed_epoch_and_index() -> None:
    latents = [torch.zeros(2, 1, 3, 4), torch.zeros(2, 2, 2, 2), torch.zeros(2, 1, 3, 4)]
    objective = FlowMatching(seed=1)
    first = objective(latents, indices=[5, 6, 7], epoch=0)
    swapped = objective(latents[::-1], indices=[7, 6, 5], epoch=0)
    assert torch.equal(first.timesteps, swapped.timesteps.flip(0))
    assert all(torch.equal(target, other) for target, other in zip(first.targets, swapped.targets[::-1], strict=True))
    assert not torch.equal(first.targets[0], first.targets[2])
    for other in (
        objective(latents, indices=[5, 6, 7], epoch=1),
        FlowMatching(seed=2)(latents, indices=[5, 6, 7], epoch=0),
    ):
        assert not torch.equal(first.targets[0], other.targets[0])
        assert not torch.equal(first.timesteps, other.timesteps)


def test_flow_matching_interpolates_and_shifts() -> None:
    latents = [torch.randn(2, 1, 3, 4) for _ in range(500)]
    plain = FlowMatching(weighting_scheme="uniform")(latents, indices=range(500), epoch=0)
    sigmas = plain.timesteps / 1000
    for latent, noisy, target, sigma in zip(latents, *plain[:2], sigmas, strict=True):
        assert torch.allclose(noisy, latent + sigma * target, atol=1e-5)
    shifted = (
        FlowMatching(weighting_scheme="uniform", shift=3.0)(latents, indices=range(500), epoch=0).timesteps / 1000
    )
    assert torch.allclose(shifted, 3 * sigmas / (1 + 2 * sigmas), atol=1e-5)
    assert float(sigmas.mean()) == pytest.approx(0.5, abs=0.05)
    assert float((sigmas < 0.1).float().mean()) == pytest.approx(0.1, abs=0.04)
    normal = FlowMatching()(latents, indices=range(500), epoch=0).timesteps / 1000
    assert float((normal < 0.1).float().mean()) < 0.05


def test_noise_follows_from_seed_epoch_and_index_in_any_batch() -> None:
    objective, latents = FlowMatching(seed=3), [torch.zeros(2, 1, 4, 6), torch.zeros(2, 3, 4, 4)]
    together = objective(latents, indices=[7, 2], epoch=1)
    alone = objective(latents[1:], indices=[2], epoch=1)
    assert torch.equal(together.latents[1], alone.latents[0])
    draw = [
        float(torch.rand(1, generator=sample_generator(seed=seed, epoch=epoch, index=index)))
        for seed, epoch, index in ((3, 1, 2), (3, 1, 2), (4, 1, 2), (3, 2, 2), (3, 1, 3))
    ]
    assert draw[0] == draw[1]
    assert len(set(draw)) == 4


def test_frame_rates_of_images_are_above_0() -> None:
    assert frame_rates([24, 0, 16]).tolist() == [24, 1, 16]
    rates = torch.tensor([0.0, 12.5], dtype=torch.float64)
    assert torch.equal(frame_rates(rates), torch.tensor([1.0, 12.5], dtype=torch.float64))
    for wrong in ([-1.0], [float("nan")], 8.0):
        with pytest.raises(BucketingError, match="frame rate of 0 or more for each sample"):
            frame_rates(wrong)


def test_an_image_of_frame_rate_0_has_finite_positions_in_ltx(pipeline_dirs) -> None:
    recipe = LTXRecipe.load(str(pipeline_dirs["ltx"]))
    scale = recipe.conditioning(samples_of(recipe, fps=[0.0, 8.0]))["rope_interpolation_scale"]
    assert scale.isfinite().all()
    assert torch.equal(scale[1], recipe.conditioning(samples_of(recipe, fps=[8.0]))["rope_interpolation_scale"][0])


OBJECTIVES = {
    "logit-normal": FlowMatching(shift=3.0, seed=5),
    "uniform": FlowMatching(weighting_scheme="uniform", sigmas=(0.0, 0.6), shift=lambda size: 2.0),
    "expert": FlowMatching(sigmas=(0.875, 1.0), shift=5.0),
    "forcing": DiffusionForcing(shift=2.0),
    "EDM": EDM(shift=1.5),
    "denoising": Denoising(posterior=GaussianPosterior(betas=torch.linspace(1e-4, 0.02, 50))),
}


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_held_out_samples_have_the_noise_levels_of_training_in_equally_likely_ranges(objective) -> None:
    count, num_levels = 400, 4
    latents = [torch.zeros(1, 1, 1, 2)] * count
    drawn = objective(latents, indices=range(count), epoch=0).timesteps.double().sort().values
    held_out = [
        objective.held_out(latents, indices=range(count), level=level, num_levels=num_levels).timesteps.double()
        for level in range(num_levels)
    ]
    for lower, upper in pairwise(held_out):
        assert lower.max() <= upper.min()
    together = torch.cat(held_out).sort().values
    below = torch.searchsorted(together, drawn, right=True) / len(together)
    expected = torch.searchsorted(drawn, drawn, right=True) / count
    assert float((below - expected).abs().max()) < 0.09, "Kolmogorov and Smirnov; 0.076 in one of a hundred samples"
    assert float(drawn.mean()) == pytest.approx(float(together.mean()), abs=4 * float(drawn.std()) / count**0.5)


def test_the_noise_of_held_out_samples_depends_on_the_row_and_the_level_alone() -> None:
    latents = [torch.randn(2, 3, 4, 6), torch.randn(2, 1, 2, 2)]
    settings = {"indices": [8, 3], "level": 1, "num_levels": 3}
    for kind in (FlowMatching, DiffusionForcing):
        noised = kind(seed=1).held_out(latents, **settings)
        again = kind(seed=2).held_out(latents[::-1], **{**settings, "indices": [3, 8]})
        assert torch.equal(noised.timesteps, again.timesteps.flip(0))
        assert all(
            torch.equal(latent, other) for latent, other in zip(noised.latents, again.latents[::-1], strict=True)
        )
        other = kind(seed=1).held_out(latents, **{**settings, "level": 2})
        assert not torch.equal(noised.targets[0], other.targets[0])
    frames = noised.frame_timesteps[0]
    assert frames.equal(frames.sort().values)
    assert len(frames.unique()) == 3
