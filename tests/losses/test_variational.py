"""The variational bound: against one sample at a time, against the paper's formula in numpy, and its parts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler

from hf_bucketing import BucketingError
from hf_bucketing.losses import GaussianPosterior, batch_vlb
from hf_bucketing.packing import PackedLayout, packed_vlb
from hf_bucketing.packing.strips import to_strips

GRIDS, PATCH, STRIP = ((2, 2, 3), (1, 1, 1), (1, 4, 2), (2, 2, 3)), (1, 2, 2), 5
TIMESTEPS = torch.tensor([0, 37, 99, 1])
BETAS = torch.linspace(1e-4, 0.02, 100, dtype=torch.float64)


def draw(channels: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(channels, t * PATCH[0], h * PATCH[1], w * PATCH[2]) for t, h, w in GRIDS]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def layout() -> PackedLayout:
    return PackedLayout(grids=GRIDS, text_lengths=(1,) * len(GRIDS), strip_length=STRIP)


def strips(tensors: list[torch.Tensor]) -> torch.Tensor:
    return to_strips(tensors, PATCH, layout=layout())


def cases() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    outputs, clean = draw(8, 0), [latent.clamp(-1, 1) for latent in draw(4, 1)]
    posterior = GaussianPosterior(betas=BETAS)
    noised = [
        posterior.at("signal", t[None], x)[0] * x + posterior.at("noise", t[None], x)[0] * noise
        for t, x, noise in zip(TIMESTEPS, clean, draw(4, 2), strict=True)
    ]
    return outputs, noised, clean


@pytest.mark.parametrize("variance_type", ["learned_range", "learned"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_packed_equals_one_sample_at_a_time(prediction_type: str, variance_type: str) -> None:
    outputs, noised, clean = cases()
    posterior = GaussianPosterior(betas=BETAS, prediction_type=prediction_type, variance_type=variance_type)
    alone = [
        batch_vlb(output[None], noised=x_t[None], clean=x_0[None], timesteps=t[None], posterior=posterior)
        for output, x_t, x_0, t in zip(outputs, noised, clean, TIMESTEPS, strict=True)
    ]
    packed = packed_vlb(
        strips(outputs), layout(), noised=strips(noised), clean=strips(clean), timesteps=TIMESTEPS, posterior=posterior
    )
    assert packed.dtype == torch.float64
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-12, atol=0)


def bound_of_one_number(mean: float, variance: float, x_t: float, x_0: float, t: int) -> float:
    """The formulas of Ho et al. (2020) and Nichol & Dhariwal (2021) for a learned range, in plain Python."""
    betas = BETAS.numpy()
    bar = np.cumprod(1 - betas)
    before = bar[t - 1] if t else 1.0
    of_clean = math.sqrt(before) * betas[t] / (1 - bar[t])
    of_noised = math.sqrt(1 - betas[t]) * (1 - before) / (1 - bar[t])
    smallest = math.log(betas[max(t, 1)] * (1 - bar[max(t, 1) - 1]) / (1 - bar[max(t, 1)]))
    fraction = (variance + 1) / 2
    log_variance = fraction * math.log(betas[t]) + (1 - fraction) * smallest
    predicted = (x_t - math.sqrt(1 - bar[t]) * mean) / math.sqrt(bar[t])
    ours, truth = (of_clean * x + of_noised * x_t for x in (predicted, x_0))
    if t:
        squared = (truth - ours) ** 2 * math.exp(-log_variance)
        return 0.5 * (log_variance - smallest - 1 + math.exp(smallest - log_variance) + squared) / math.log(2)

    def cdf(x: float) -> float:
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    upper, lower = (cdf((x_0 - ours + side) * math.exp(-log_variance / 2)) for side in (1 / 255, -1 / 255))
    mass = upper if x_0 < -0.999 else 1 - lower if x_0 > 0.999 else upper - lower
    return -math.log(max(mass, 1e-12)) / math.log(2)


@pytest.mark.parametrize("sample", range(len(GRIDS)))
def test_the_bound_is_the_papers_number_by_number(sample: int) -> None:
    outputs, noised, clean = (tensors[sample] for tensors in cases())
    mean, variance = outputs[:4].flatten().tolist(), outputs[4:].flatten().tolist()
    numbers = zip(mean, variance, noised.flatten().tolist(), clean.flatten().tolist(), strict=True)
    t = int(TIMESTEPS[sample])
    expected = np.mean([bound_of_one_number(*number, t) for number in numbers])
    value = batch_vlb(
        outputs[None], noised=noised[None], clean=clean[None], timesteps=TIMESTEPS[sample][None],
        posterior=GaussianPosterior(betas=BETAS), rescale=False,
    )  # fmt: skip
    assert float(value) == pytest.approx(expected, rel=1e-9)


def test_the_variance_is_the_second_half_of_the_channels_of_every_patch() -> None:
    """Halving the flat token vector instead would mix the halves: patches hold channels and pixels together."""
    outputs, noised, clean = cases()
    outputs = [torch.cat([torch.zeros_like(x), torch.full_like(x, value)]) for value, x in enumerate(clean)]
    prediction = strips(outputs).requires_grad_()
    posterior = GaussianPosterior(betas=BETAS)
    values = packed_vlb(
        prediction, layout(), noised=strips(noised), clean=strips(clean), timesteps=TIMESTEPS, posterior=posterior
    )
    values.sum().backward()
    assert (prediction.grad[:, :4] == 0).all(), "the mean is detached"
    real = (layout().segment_ids >= 0).view(-1, STRIP)
    reached = (prediction.grad[:, 4:] != 0).unflatten(4, (STRIP, -1)).all(-1).movedim(4, 1).flatten(2)
    assert reached[real].all()
    assert not reached[~real].any()
    alone = [
        batch_vlb(o[None], noised=n[None], clean=c[None], timesteps=t[None], posterior=posterior)
        for o, n, c, t in zip(outputs, noised, clean, TIMESTEPS, strict=True)
    ]
    torch.testing.assert_close(values.detach(), torch.cat(alone), rtol=1e-12, atol=0)


def test_padding_has_no_part_even_when_it_is_nan() -> None:
    outputs, noised, clean = (strips(tensors) for tensors in cases())
    options = {"noised": noised, "clean": clean, "timesteps": TIMESTEPS, "posterior": GaussianPosterior(betas=BETAS)}
    expected = packed_vlb(outputs, layout(), **options)
    padding = (layout().segment_ids < 0).view(-1, 1, 1, 1, STRIP).repeat_interleave(PATCH[2], -1)
    poisoned = torch.where(padding, torch.nan, outputs).requires_grad_()
    values = packed_vlb(poisoned, layout(), **options)
    values.sum().backward()
    assert torch.equal(values, expected)
    assert torch.isfinite(poisoned.grad).all()


def test_rescaling_multiplies_by_the_steps_over_a_thousand() -> None:
    outputs, noised, clean = (torch.stack([tensors[0], tensors[3]]) for tensors in cases())
    options = {"noised": noised, "clean": clean, "timesteps": TIMESTEPS[[1, 3]]}
    posterior = GaussianPosterior(betas=BETAS)
    plain, rescaled = (batch_vlb(outputs, **options, posterior=posterior, rescale=flag) for flag in (False, True))
    assert torch.allclose(rescaled, plain * 0.1)


def test_the_schedule_is_read_from_a_diffusers_scheduler() -> None:
    scheduler = DDPMScheduler(num_train_timesteps=50, variance_type="learned_range", prediction_type="v_prediction")
    posterior = GaussianPosterior.from_scheduler(scheduler)
    assert (posterior.num_timesteps, posterior.prediction_type) == (50, "v_prediction")
    assert posterior.variance_type == "learned_range"
    one = torch.ones(1, 1, dtype=torch.float64)
    at = torch.tensor([30])
    assert float(posterior.at("signal", at, one)) == pytest.approx(float(scheduler.alphas_cumprod[30]) ** 0.5, 1e-6)
    assert float(posterior.at("smallest", at, one).exp()) == pytest.approx(
        float(scheduler._get_variance(30, variance_type="fixed_small")), 1e-5
    )
    assert GaussianPosterior.from_scheduler(DDPMScheduler(variance_type="learned")).variance_type == "learned"
    with pytest.raises(BucketingError, match="no betas"):
        GaussianPosterior.from_scheduler(SimpleNamespace())


def test_impossible_inputs_are_errors() -> None:
    for options in ({"prediction_type": "flow"}, {"variance_type": "fixed"}, {"betas": torch.zeros(3)}):
        with pytest.raises(BucketingError):
            GaussianPosterior(**{"betas": BETAS, **options})
    x = torch.zeros(1, 4, 1, 2, 2)
    with pytest.raises(BucketingError, match="twice their channels"):
        batch_vlb(x, noised=x, clean=x, timesteps=TIMESTEPS[:1], posterior=GaussianPosterior(betas=BETAS))
