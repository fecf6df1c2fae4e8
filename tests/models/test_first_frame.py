"""Image-to-video with a clean first frame."""

from __future__ import annotations

import torch

from hf_bucketing.models.first_frame import with_clean_first_frame
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.recipe import Samples, TextEmbeddings


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
    inputs = with_clean_first_frame(samples, conditioning={"fps": samples.fps})
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
    inputs = with_clean_first_frame(samples, conditioning={})
    assert inputs.latents[1].equal(samples.noised.latents[1])
    assert inputs.timesteps[1].tolist() == [900.0]
    assert inputs.weights is not None
    assert inputs.weights[1].eq(1).all()
