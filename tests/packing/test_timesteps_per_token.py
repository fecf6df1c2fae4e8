"""Timesteps of single tokens and weights of single latents, in packs, in stacks and by hand."""

from __future__ import annotations

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.errors import PackingError
from hf_bucketing.losses import GaussianPosterior, masked_mse
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.objectives import Denoising, FlowMatching, Noised
from hf_bucketing.packing import packed_forward, packed_mse
from hf_bucketing.packing.batch import Rows
from tests.models.cases import FLUX, LATTE, SIZES, WAN, Samples, largest_difference
from tests.models.families import CASES


def frame_timesteps(samples: Samples) -> list[torch.Tensor]:
    """Return another timestep for each latent frame, the first of each sample clean."""
    generator = torch.Generator().manual_seed(3)
    drawn = [1000 * torch.rand(latent.shape[1], generator=generator) for latent in samples.latents]
    for levels in drawn:
        levels[0] = 0
    return drawn


def of_tokens(timesteps: list[torch.Tensor]) -> list[torch.Tensor]:
    pairs = zip(timesteps, SIZES, strict=True)
    return [levels.repeat_interleave(height // 2 * (width // 2)) for levels, (_, height, width) in pairs]


@torch.no_grad()
def test_a_pack_with_diffusion_forcing_equals_the_stock_model() -> None:
    case = CASES["skyreels-v2"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    by_frame = frame_timesteps(samples)
    alone = [
        model(latent[None], timestep[None], text[None], enable_diffusion_forcing=True).sample[0]
        for latent, timestep, text in zip(samples.latents, by_frame, samples.text, strict=True)
    ]
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing, timesteps=by_frame)
    packed = batch.unpack(packed_forward(model, batch))
    assert largest_difference(alone, packed) <= 1e-11
    disable_packing(model)
    latents, text = (torch.stack([values[0], values[4]]) for values in (samples.latents, samples.text))
    timesteps = torch.stack([by_frame[0], by_frame[4]]).repeat_interleave(6, 1)
    rows = Rows(latents=latents, timesteps=timesteps, text=text, patch=(1, 2, 2))
    assert largest_difference([alone[0], alone[4]], packing.family.run(model, rows)) <= 1e-11
    timesteps[0, 1] += 1
    with pytest.raises(PackingError, match="a timestep per frame"):
        packing.family.run(model, rows)


def test_diffusion_forcing_that_the_stock_model_cannot_run_in_packs_is_refused() -> None:
    case = CASES["skyreels-v2 fps"]
    model, samples = case.model(), Samples(case=case)
    batch = samples.pack(enable_packing(model, strip_length=4), timesteps=frame_timesteps(samples))
    with pytest.raises(PackingError, match="inject_sample_info"):
        packed_forward(model, batch)
    disable_packing(model)
    model._set_ar_attention(2)
    with pytest.raises(PackingError, match="num_frame_per_block=2"):
        enable_packing(model, strip_length=4)


@pytest.mark.parametrize("each", ["frame", "token"])
@torch.no_grad()
def test_a_pack_with_a_timestep_per_token_equals_the_stock_model(each: str) -> None:
    model, samples = WAN.model(torch.float64), Samples(torch.float64, case=WAN)
    by_frame = frame_timesteps(samples)
    by_token = of_tokens(by_frame)
    if each == "token":  # not the same in a frame
        by_token = [levels * torch.linspace(0.5, 1, len(levels)) for levels in by_token]
    alone = [
        model(latent[None], timestep[None], text[None]).sample[0]
        for latent, timestep, text in zip(samples.latents, by_token, samples.text, strict=True)
    ]
    packing = enable_packing(model, strip_length=4)
    batch = samples.pack(packing, timesteps=by_token if each == "token" else by_frame)
    packed = batch.unpack(packed_forward(model, batch))
    for output, other in zip(alone, packed, strict=True):
        assert float((output - other).abs().max()) <= 1e-11 * float(output.abs().max())


@torch.no_grad()
def test_equal_timesteps_of_tokens_are_the_timestep_of_the_sample() -> None:
    model, samples = WAN.model(torch.float64), Samples(torch.float64, case=WAN)
    packing = enable_packing(model, strip_length=4)
    repeated = [
        timestep.repeat(latent.shape[1]) for timestep, latent in zip(samples.timesteps, samples.latents, strict=True)
    ]
    outputs = [
        batch.unpack(packed_forward(model, batch))
        for batch in (samples.pack(packing), samples.pack(packing, timesteps=repeated))
    ]
    assert largest_difference(*outputs) < 1e-11


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 6), ()])
def test_timesteps_of_neither_frames_nor_tokens_are_refused(shape: tuple[int, ...]) -> None:
    samples = Samples(case=WAN)
    timesteps = frame_timesteps(samples)
    timesteps[4] = torch.zeros(shape)  # a grid of 3 frames with 6 tokens each
    packing = enable_packing(WAN.model(), strip_length=4)
    message = r"Sample 4 has timesteps of shape .*\(18,\).*\(3,\)" if len(shape) == 1 else r"sequence of tensors"
    with pytest.raises(PackingError, match=message):
        samples.pack(packing, timesteps=timesteps)


def test_a_model_with_one_timestep_per_row_refuses_more() -> None:
    for case in (LATTE, FLUX):
        samples = Samples(case=case)
        packing = enable_packing(case.model(), strip_length=4)
        with pytest.raises(PackingError, match=r"one timestep per batch row.*\(6,\)"):
            samples.pack(packing, timesteps=frame_timesteps(samples))


def test_too_few_timesteps_are_refused() -> None:
    samples = Samples(case=WAN)
    packing = enable_packing(WAN.model(), strip_length=4)
    with pytest.raises(PackingError, match="one timestep per latent"):
        samples.pack(packing, timesteps=frame_timesteps(samples)[:-1])


def weights_of(samples: Samples) -> list[torch.Tensor]:
    """Return weights `(1, F, H, W)`, drawn, but 0 for the first frames of two samples: all of the second, an image."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.rand(1, *latent.shape[1:], generator=generator) for latent in samples.latents]
    for weight in drawn[:2]:
        weight[:, 0] = 0
    return drawn


def test_weighted_losses_of_packs_are_those_by_hand() -> None:
    samples = Samples(case=WAN)
    packing = enable_packing(WAN.model(), strip_length=4)
    batch, weights = samples.pack(packing), weights_of(samples)
    strips = batch.pack_like(samples.latents).requires_grad_()
    losses = packed_mse(strips, batch.pack_like(samples.targets), batch.layout, batch.pack_like(weights))
    for loss, latent, target, weight in zip(losses, samples.latents, samples.targets, weights, strict=True):
        squared = (latent - target).square().mean(0, keepdim=True)
        expected = float((squared * weight).sum() / weight.sum()) if weight.any() else 0.0
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
        stacked = masked_mse(latent[None], target[None], weights=weight[None])
        assert float(loss.detach()) == pytest.approx(float(stacked), rel=1e-5)
    losses.sum().backward()
    assert strips.grad is not None
    assert all(bool(torch.isfinite(gradient).all()) for gradient in strips.grad)
    first, second, *_ = batch.unpack(strips.grad)
    assert not first[:, 0].any()
    assert first[:, 1:].any()
    assert not second.any(), "no weight, no gradient, and no NaN"


def test_weights_of_tokens_weigh_as_those_of_their_latents() -> None:
    samples = Samples(case=WAN)
    packing = enable_packing(WAN.model(), strip_length=4)
    batch = samples.pack(packing)
    targets = batch.pack_like(samples.targets)
    of_token = torch.rand(batch.layout.num_strips, 4)
    by_latent = of_token[:, None, None, None].repeat_interleave(2, -1).expand(-1, 1, 1, 2, -1)
    values, other = (packed_mse(batch.strips, targets, batch.layout, weights) for weights in (of_token, by_latent))
    assert torch.allclose(values, other)
    assert not torch.allclose(values, packed_mse(batch.strips, targets, batch.layout))


def test_weights_of_another_shape_are_refused() -> None:
    samples = Samples(case=WAN)
    packing = enable_packing(WAN.model(), strip_length=4)
    batch = samples.pack(packing)
    targets = batch.pack_like(samples.targets)
    for weights in (torch.ones(batch.layout.num_strips, 3), torch.ones(6), targets[:, :2]):
        with pytest.raises(BucketingError, match="Expected weights of shape"):
            packed_mse(batch.strips, targets, batch.layout, weights)
    with pytest.raises(BucketingError, match="weights that broadcast"):
        masked_mse(targets, targets, weights=torch.ones(5))


@pytest.mark.parametrize("kind", ["flow", "denoising"])
def test_objectives_weigh_stacks_and_packs_alike(kind: str) -> None:
    model = WAN.model()
    samples = Samples(case=WAN, order=(0, 4))
    latents, targets = samples.latents, samples.targets
    if kind == "flow":
        objective, prediction, timesteps = FlowMatching(), torch.stack(latents), torch.tensor([10.0, 20.0])
    else:  # with a learned variance, so that the bound is weighted too
        posterior = GaussianPosterior(betas=torch.linspace(1e-4, 0.02, 1000))
        objective = Denoising(posterior=posterior)
        prediction, timesteps = (
            torch.cat([torch.stack(latents), torch.rand(2, 4, *SIZES[0])], 1),
            torch.tensor([10, 20]),
        )
    noised = Noised(latents, targets, timesteps, targets)
    weights = [torch.rand(1, *SIZES[0]) for _ in range(2)]
    weights[0][:, 0] = 0
    stacked = objective.losses(prediction, noised, weights=weights)
    batch = enable_packing(model, strip_length=4).pack(latents, timesteps=timesteps, text=samples.text)
    packed = objective.packed_losses(batch.pack_like(list(prediction)), noised, batch, weights=weights)
    assert torch.allclose(stacked, packed, rtol=1e-5)
    assert not torch.allclose(stacked, objective.losses(prediction, noised), rtol=1e-3)
    scaled = objective.losses(prediction, noised, weights=[3 * weight for weight in weights])
    assert torch.allclose(stacked, scaled, rtol=1e-5)
