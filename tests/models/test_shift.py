"""Laws for the shift of noise levels by size: those of the pipelines, bounded, and chosen by a setting."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.cogview4 import pipeline_cogview4
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from hf_bucketing import BucketingError, LatentSpec
from hf_bucketing.models.objectives import FlowMatching
from hf_bucketing.models.shift import (
    ShiftByResolution,
    ShiftByRoot,
    ShiftBySteps,
    ShiftByTokens,
    ShiftOfLatents,
    chosen_shift,
    read_shift,
    shift_of_scheduler,
)

LTX = {"base_image_seq_len": 1024, "max_image_seq_len": 4096, "base_shift": 0.95, "max_shift": 2.05}
"""Settings of LTX-Video's scheduler."""
WAN = ((480, 832, 3.0), (720, 1280, 5.0))


def test_without_dynamic_shifting_the_schedulers_own_number_counts() -> None:
    assert shift_of_scheduler(FlowMatchEulerDiscreteScheduler(shift=7.0).config) == 7.0
    assert shift_of_scheduler(UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0).config) == 5.0
    assert shift_of_scheduler({}) == 1.0


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize(("by_root", "stock"), [(False, calculate_shift), (True, pipeline_cogview4.calculate_shift)])
@pytest.mark.parametrize("tokens", [1, 1024, 3000, 4096])
def test_noise_levels_are_shifted_as_the_pipeline_has_its_scheduler_do(kind, by_root, stock, tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind, **LTX)
    if by_root and kind == "exponential":
        with pytest.raises(BucketingError, match="time_shift_type='exponential'; here it can be 'linear'"):
            shift_of_scheduler(scheduler.config, by_root=True)
        return
    points = [value for name, value in LTX.items() if not (by_root and name == "max_image_seq_len")]
    levels = torch.linspace(0.01, 0.99, 7, dtype=torch.float64)
    shift = shift_of_scheduler(scheduler.config, by_root=by_root)(tokens=tokens, pixels=0)
    assert torch.allclose(shift * levels / (1 + (shift - 1) * levels),
                          scheduler.time_shift(stock(tokens, *points), 1.0, levels), rtol=1e-12)  # fmt: skip


def test_half_a_megapixel_and_ten_seconds_of_ltx_have_the_shift_of_its_largest_size() -> None:
    tokens = 31 * 16 * 32  # 241 frames of 512×1024
    law = shift_of_scheduler({"use_dynamic_shifting": True, **LTX})
    assert law(tokens=tokens, pixels=0) == pytest.approx(math.exp(2.05)) == law(tokens=4096, pixels=0)
    free = chosen_shift("unbounded", model_shift=law)
    assert free(tokens=tokens, pixels=0) == pytest.approx(math.exp(calculate_shift(tokens, *LTX.values())))
    assert free(tokens=tokens, pixels=0) > 400


def test_flux_2_at_200_steps_has_the_line_of_flux() -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    for tokens in (256, 1000, 4096):
        assert ShiftByTokens()(tokens=tokens) == pytest.approx(math.exp(compute_empirical_mu(tokens, 200)), rel=1e-4)


def test_a_sample_has_the_tokens_and_pixels_of_its_latent() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    by_tokens = ShiftOfLatents(ShiftByTokens(base_tokens=1, max_tokens=1000, kind="linear", base_shift=1.0,
                                             max_shift=1000.0), spec)  # fmt: skip
    assert by_tokens((3, 8, 10)) == pytest.approx(3 * 4 * 5)
    by_pixels = ShiftOfLatents(ShiftByRoot(base=1, factor=1.0), spec)
    assert by_pixels((3, 8, 10)) == by_pixels((1, 8, 10)) == pytest.approx(math.sqrt(64 * 80))
    by_resolution = ShiftOfLatents(ShiftByResolution(WAN), spec)
    sizes = [(21, 60, 104), (1, 128, 32), (1, 1, 1), (21, 90, 160), (1, 200, 300)]
    assert [by_resolution(size) for size in sizes] == [3.0, 3.0, 3.0, 5.0, 5.0]


def test_large_samples_of_a_batch_get_more_noise_than_small_ones() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8)
    law = ShiftByTokens(base_tokens=16, max_tokens=1024)
    latents = [torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 16, 16), torch.zeros(2, 4, 64, 64)] * 40
    drawn = FlowMatching(shift=ShiftOfLatents(law, spec))(latents, indices=range(120), epoch=0).timesteps / 1000
    plain = FlowMatching()(latents, indices=range(120), epoch=0).timesteps / 1000
    shifts = (drawn / (1 - drawn) / (plain / (1 - plain))).view(-1, 3)
    expected = torch.tensor([math.exp(0.5), math.exp(1.15), math.exp(1.15)])
    assert torch.allclose(shifts, expected.expand_as(shifts), rtol=1e-3)


@pytest.mark.parametrize("steps", [4, 28, 50, 200])
@pytest.mark.parametrize("tokens", [256, 4096, 4300, 4301, 16384])
def test_the_shift_by_steps_is_that_of_the_pipelines_of_flux2(steps: int, tokens: int) -> None:
    law = ShiftBySteps(steps=steps)
    assert law(tokens=tokens) == pytest.approx(math.exp(compute_empirical_mu(tokens, steps)), rel=1e-12)


def test_the_shift_by_steps_tends_to_the_line_of_flux_that_training_takes() -> None:
    many, line = ShiftBySteps(steps=200), ShiftByTokens(bounded=False)
    assert [many(tokens=tokens) for tokens in (256, 4096, 9216)] == pytest.approx(
        [line(tokens=tokens) for tokens in (256, 4096, 9216)], rel=1e-3
    )
    assert ShiftBySteps(steps=28)(tokens=4096) > ShiftBySteps()(tokens=4096) > 2 * line(tokens=4096)


def test_a_setting_chooses_the_law() -> None:
    own = ShiftByTokens(max_tokens=8192, max_shift=0.9)
    assert chosen_shift(2, model_shift=own) == 2.0
    assert chosen_shift(ShiftByRoot(factor=2.0), model_shift=own) == ShiftByRoot(factor=2.0)
    assert chosen_shift("tokens", model_shift=own) is own
    assert chosen_shift("tokens", model_shift=3.0) == ShiftByTokens()
    assert chosen_shift("pixels", model_shift=3.0) == ShiftByRoot()
    assert chosen_shift("flux2", model_shift=own) == ShiftBySteps(steps=50)
    assert chosen_shift("resolution", model_shift=3.0, resolutions=WAN) == ShiftByResolution(WAN)
    assert chosen_shift("480x832:2, 720x1280:5.5", model_shift=3.0) == ShiftByResolution(
        ((480, 832, 2.0), (720, 1280, 5.5))
    )
    with pytest.raises(BucketingError, match="has no bound to lift"):
        chosen_shift("unbounded", model_shift=3.0)
    with pytest.raises(BucketingError, match="name no shifts by resolution; give them"):
        chosen_shift("resolution", model_shift=3.0)


@pytest.mark.parametrize("setting", [0, -1.0, math.nan, math.inf, True, "3", "", "pixel", "480x832", "480x832:",
                                     "480x832:3,", "480x832:x", "480x832:1.2.3", "480p:3"])  # fmt: skip
def test_an_impossible_setting_names_the_possible_ones(setting) -> None:
    with pytest.raises(BucketingError, match='"pixels", "resolution", "unbounded", "flux2", or shifts by'):
        read_shift(setting)


@pytest.mark.parametrize("make", [
    lambda: ShiftByTokens(base_tokens=0), lambda: ShiftByTokens(base_tokens=4096),
    lambda: ShiftByTokens(kind="linear", base_shift=0.0), lambda: ShiftByRoot(base=0), lambda: ShiftByRoot(factor=0.0),
    lambda: ShiftByRoot(offset=-1.0), lambda: ShiftByResolution(()), lambda: ShiftByResolution(((480, 0, 3.0),)),
    lambda: read_shift("480x832:0"), lambda: ShiftBySteps(steps=0),
])  # fmt: skip
def test_impossible_laws_are_errors(make) -> None:
    with pytest.raises(BucketingError, match=r"positive numbers|above 0|base_tokens|1 step or more"):
        make()
