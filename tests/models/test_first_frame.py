"""Image-to-video with a clean first frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from hf_bucketing.buckets.sizes import LatentSpec, Size
from hf_bucketing.models.families.cosmos import FAMILY
from hf_bucketing.models.first_frame import ENDS, FIRST_LATENT, FirstFrameRecipe, end_frames
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import Samples
from hf_bucketing.models.texts import TextEmbeddings
from tests.models.families import RECIPES


class RateRecipe(FirstFrameRecipe):
    """Takes the frame rates beside the clean first frames."""

    family = FAMILY

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        return {"fps": samples.fps}


RECIPE = RateRecipe(
    pipeline=None, spec=LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 1, 1)), max_sequence_length=8
)


def samples_of(*frames: int) -> Samples:
    clean = [torch.randn(4, count, 2, 3) for count in frames]
    noisy = [torch.randn_like(latent) for latent in clean]
    timesteps = torch.tensor([500.0, 900.0][: len(frames)])
    return Samples(
        noised=Noised(noisy, noisy, timesteps, clean),
        text=TextEmbeddings(torch.zeros(len(frames), 1, 8)),
        fps=torch.ones(len(frames)),
    )


def test_the_first_frame_of_a_video_is_clean_has_timestep_zero_and_does_not_count() -> None:
    samples = samples_of(3)
    inputs = RECIPE.model_inputs(samples)
    (latent,), (weights,) = inputs.latents, inputs.weights or ()
    assert latent[:, :1].equal(samples.noised.clean[0][:, :1])
    assert latent[:, 1:].equal(samples.noised.latents[0][:, 1:])
    assert inputs.timesteps[0].tolist() == [0.0, 500.0, 500.0]
    assert weights.shape == (1, 3, 2, 3)
    assert weights[0, :, 0, 0].tolist() == [0.0, 1.0, 1.0]
    assert weights.sum() == 12
    assert inputs.conditioning == {"fps": samples.fps}


def test_an_image_beside_a_video_has_no_condition() -> None:
    samples = samples_of(2, 1)
    inputs = RECIPE.model_inputs(samples)
    assert inputs.latents[1].equal(samples.noised.latents[1])
    assert inputs.timesteps[1].tolist() == [900.0]
    assert inputs.weights is not None
    assert inputs.weights[1].eq(1).all()


def test_the_first_frame_of_the_data_set_stands_in_the_place_of_the_samples_own() -> None:
    samples = samples_of(3, 1)
    shown = [torch.randn(4, 1, 2, 3) for _ in range(2)]
    inputs = RECIPE.model_inputs(replace(samples, conditions={FIRST_LATENT: shown}))
    assert inputs.latents[0][:, :1].equal(shown[0])
    assert inputs.latents[0][:, 1:].equal(samples.noised.latents[0][:, 1:])
    assert inputs.latents[1].equal(samples.noised.latents[1]), "an image has no condition"
    assert inputs.weights is not None
    assert inputs.weights[0][0, :, 0, 0].tolist() == [0, 1, 1]


def test_shown_ends_are_those_of_the_data_set_or_of_the_samples() -> None:
    pixels, first = torch.rand(2, 3, 5, 4, 6), [torch.rand(3, 1, 4, 6) for _ in range(2)]
    assert end_frames(pixels, {}).equal(pixels[:, :, :1])
    assert end_frames(pixels, {}, ENDS).equal(pixels[:, :, [0, 4]])
    frames = end_frames(pixels, {"first_frame": first}, ENDS)
    assert frames[:, :, :1].equal(torch.stack(first))
    assert frames[:, :, 1:].equal(pixels[:, :, 4:])


@pytest.mark.parametrize("tiny", ["ltx-i2v", "ltx2-i2v"])
@torch.no_grad()
def test_a_render_shows_the_first_frame_as_training_does(tiny: str, tiny_folder, monkeypatch) -> None:
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    folder = str(tiny_folder(tiny))
    recipe = recipe_of(folder).load(folder, max_sequence_length=64)
    image = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    calls: list[dict[str, Any]] = []
    hook = recipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    settings = {name: value for name, value in RECIPES[tiny].render.items() if name != "num_frames"}
    frames = recipe.render("x", Size(5, 32, 64), image=Image.fromarray(image), **settings)
    hook.remove()
    assert frames.shape == (5, 32, 64, 3)

    pixels = (torch.from_numpy(image).permute(2, 0, 1) / 127.5 - 1)[None, :, None].repeat(1, 1, 5, 1, 1)
    clean = recipe.encode_latents(pixels)
    noised = Noised([torch.randn_like(clean[0])], [clean[0]], torch.tensor([700.0]), [clean[0]])
    samples = Samples(noised=noised, text=recipe.encode_text(["x"]), fps=torch.tensor([25.0]))
    inputs = recipe.model_inputs(samples)
    shown, first = recipe.pipeline._pack_latents(inputs.latents[0][None]), clean.shape[3] * clean.shape[4]
    assert len(calls) == 2
    for kwargs in calls:
        assert torch.allclose(kwargs["hidden_states"][:, :first], shown[:, :first], atol=1e-5)
        assert kwargs["timestep"].shape == shown.shape[:2]
        assert kwargs["timestep"][0, :first].eq(0).all()
        assert kwargs["timestep"][0, first:].gt(0).all()
    assert inputs.timesteps[0].tolist() == [0.0, 700.0]
