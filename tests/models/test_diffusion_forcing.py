"""A noise level per latent frame, and SkyReels-V2, which is trained with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.errors import PackingError
from hf_bucketing.models import enable_packing
from hf_bucketing.models.families.wan import SkyReelsV2DiffusionForcingRecipe
from hf_bucketing.models.objectives import DiffusionForcing, FlowMatching
from hf_bucketing.models.recipe import Recipe
from tests.models.recipe_cases import samples_of


def levels_of(objective: DiffusionForcing, frames: int, count: int) -> torch.Tensor:
    """Return the noise levels of the frames of so many samples, `(count, frames)`."""
    noised = objective([torch.zeros(1, frames, 1, 1)] * count, indices=range(count), epoch=0)
    assert noised.frame_timesteps is not None
    assert torch.equal(noised.timesteps, torch.stack([levels.mean() for levels in noised.frame_timesteps]))
    return torch.stack(noised.frame_timesteps) / 1000


def test_each_frame_has_its_own_level_which_does_not_fall() -> None:
    latents = [torch.randn(2, 5, 3, 4), torch.randn(2, 3, 2, 2), torch.randn(2, 1, 2, 2)]
    noised = DiffusionForcing(seed=1, shift=3.0)(latents, indices=[5, 6, 7], epoch=0)
    assert noised.frame_timesteps is not None
    assert [tuple(levels.shape) for levels in noised.frame_timesteps] == [(5,), (3,), (1,)]
    for latent, noisy, target, timesteps in zip(latents, *noised[:2], noised.frame_timesteps, strict=True):
        assert bool((timesteps.diff() > 0).all())
        for frame, timestep in enumerate(timesteps):
            expected = latent[:, frame] + timestep / 1000 * target[:, frame]
            assert torch.allclose(noisy[:, frame], expected, atol=1e-5)
    alone = DiffusionForcing(seed=1, shift=3.0)(latents[1:2], indices=[6], epoch=0)
    assert alone.frame_timesteps is not None
    assert torch.equal(alone.frame_timesteps[0], noised.frame_timesteps[1])
    assert torch.equal(alone.latents[0], noised.latents[1])


def test_the_precision_of_latents_stays() -> None:
    latent = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    noised = DiffusionForcing()([latent], indices=[0], epoch=0)
    assert noised.latents[0].dtype == noised.targets[0].dtype == torch.bfloat16
    assert noised.timesteps.dtype == torch.float32


def test_levels_are_distributed_as_non_decreasing_sequences_around_a_chosen_frame() -> None:
    # The mean of the first of 3: 1/2 if it is chosen, 1/4 below the second, 1/6 as the lower of two below the third.
    levels = levels_of(DiffusionForcing(weighting_scheme="uniform"), 3, 4000)
    first = (1 / 2 + 1 / 4 + 1 / 6) / 3
    assert levels.mean(0).tolist() == pytest.approx([first, 0.5, 1 - first], abs=0.015)


@pytest.mark.cases(fast=("options0",), slow=("*",))
@pytest.mark.parametrize("options", [{}, {"weighting_scheme": "uniform", "shift": 3.0}, {"sigmas": (0.2, 0.6)}])
def test_images_have_levels_distributed_as_in_flow_matching(options: dict[str, Any]) -> None:
    count = 4000
    forced = levels_of(DiffusionForcing(**options), 1, count)[:, 0]
    plain = FlowMatching(**options)([torch.zeros(1, 1, 1, 1)] * count, indices=range(count), epoch=0).timesteps / 1000
    shares = torch.linspace(0.05, 0.95, 10)
    assert torch.allclose(forced.quantile(shares), plain.quantile(shares), atol=0.03)


@pytest.mark.parametrize("shift", [0.7, 1.0, 8.3])
@pytest.mark.parametrize("sigmas", [(0.0, 1.0), (0.3, 1.0), (0.1, 0.4)])
@pytest.mark.parametrize("scheme", ["logit_normal", "uniform"])
def test_levels_fill_the_range_of_sigmas(shift: float, sigmas: tuple[float, float], scheme: Any) -> None:
    levels = levels_of(DiffusionForcing(shift=shift, sigmas=sigmas, weighting_scheme=scheme), 6, 300)
    assert bool(((levels > sigmas[0] - 1e-6) & (levels < sigmas[1] + 1e-6)).all())
    assert float(levels.max() - levels.min()) > 0.8 * (sigmas[1] - sigmas[0])


def test_the_draws_of_flow_matching_are_those_of_earlier_versions() -> None:
    latents = [torch.zeros(1, 2, 1, 2), torch.zeros(1, 1, 2, 1)]
    plain = FlowMatching()(latents, indices=[4, 9], epoch=3)
    assert plain.frame_timesteps is None
    assert plain.timesteps.tolist() == [481.2102355957031, 100.22833251953125]
    assert plain.targets[1].flatten().tolist() == [-0.6598221063613892, 0.9056969285011292]
    shifted = FlowMatching(weighting_scheme="uniform", shift=3.0, seed=2)(latents, indices=[4, 9], epoch=3)
    assert shifted.timesteps.tolist() == [966.779541015625, 951.677978515625]
    assert shifted.targets[1].flatten().tolist() == [1.4564186334609985, -1.1655999422073364]
    low = FlowMatching(shift=2.0, sigmas=(0.0, 0.3))(latents, indices=[4, 9], epoch=3)
    assert low.timesteps.tolist() == [186.22947692871094, 182.1955108642578]


def test_impossible_sigmas_are_refused() -> None:
    with pytest.raises(BucketingError, match="two ascending noise levels"):
        DiffusionForcing(sigmas=(0.5, 0.5))


@pytest.fixture
def recipe(tiny_folder: Callable[[str], Path]) -> Recipe:
    return SkyReelsV2DiffusionForcingRecipe.load(str(tiny_folder("skyreels-v2-df")), max_sequence_length=16)


def test_the_recipe_forces_and_numbers_frame_rates_as_the_pipeline(recipe: Recipe) -> None:
    objective = recipe.objective(weighting_scheme="uniform", snr_gamma=None, seed=4)
    assert objective == DiffusionForcing(shift=8.0, weighting_scheme="uniform", seed=4)
    assert recipe.conditioning(samples_of(recipe, fps=[16.0, 24.0, 1.0]))["fps"].tolist() == [0, 1, 1]


@pytest.mark.parametrize("batching", ["bucket", "pack"])
@torch.no_grad()
def test_samples_of_16_frames_per_second_are_refused_beside_others(recipe: Recipe, batching: str) -> None:
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    step: Step = BucketStep(recipe=recipe, objective=objective)
    if batching == "pack":
        packing = enable_packing(recipe.transformer, strip_length=8)
        step = PackStep(recipe=recipe, objective=objective, packing=packing)
    batch = {"latents": [torch.zeros(4, 2, 4, 4)] * 2, "caption": ["red", "blue"], "index": [0, 1]}
    same = [step(recipe.transformer, {**batch, "fps": rates}, epoch=0) for rates in ([16.0, 16.0], [24.0, 8.0])]
    assert same[0].values.isfinite().all()
    assert not torch.allclose(same[0].values, same[1].values, rtol=1e-6), "the frame rate makes a difference"
    mean = objective([torch.zeros(4, 2, 4, 4)] * 2, indices=[0, 1], epoch=0).timesteps / 1000
    assert torch.equal(same[0].noise_levels, mean)
    with pytest.raises(PackingError, match="16 frames per second apart from others"):
        step(recipe.transformer, {**batch, "fps": [16.0, 24.0]}, epoch=0)
