"""Keyframes that LTX's pipelines append as tokens at the time of a frame: packs of what their calls pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.buckets.sizes import LatentSpec, Size
from hf_bucketing.conditions.names import KEYFRAMES
from hf_bucketing.conditions.shares import Drawn
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.families.ltx import SCALES
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.samples import Samples
from hf_bucketing.models.texts import TextEmbeddings
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.strips import patchify, unpatchify
from tests.batching.test_drawing import step_of
from tests.models.cases import assert_same_gradients, gradients, largest_difference
from tests.models.pipeline_calls import mean_squares, record_call
from tests.models.test_pipeline_arguments import pictures
from tests.models.test_references import LTX, LTX2, load

SAMPLES: tuple[tuple[Size, tuple[int, ...]], ...] = (
    (Size(9, 32, 64), (0, 2)),
    (Size(5, 64, 32), ()),
    (Size(9, 32, 32), (1, 2)),
    (Size(1, 32, 32), ()),
    (Size(13, 32, 64), (3,)),
    (Size(5, 32, 32), (0,)),
)
"""Sizes of samples, and the latent frames at which they are shown a picture."""


class Keyframes(NamedTuple):
    """A pipeline that is shown keyframes.

    Args:
        tiny: Name of the tiny pipeline.
        pipeline_class: Its class.
        condition: Makes a condition of a picture, given the latent frame at which it is shown and the stride.
        pixels: Returns the pixels in [−1, 1] of levels of 8 bits, as the pipeline computes them.
        frame: Returns the frame of pixels at which it then lies.
        in_front: Whether the pipeline puts the tokens of keyframes in front of the sample's own.
        options: Further arguments of its call.
        changes: Arguments of the transformer's call that packs pass otherwise.
    """

    tiny: str
    pipeline_class: str
    condition: Callable[[Any, int, int], Any]
    frame: Callable[[int, int], int]
    pixels: Callable[[torch.Tensor], torch.Tensor]
    in_front: bool
    options: Mapping[str, Any]
    changes: Mapping[str, Any] = {}


CASES = {
    "ltx": Keyframes(
        tiny="ltx-condition",
        pipeline_class="LTXConditionPipeline",
        condition=lambda picture, latent, stride: LTXVideoCondition(image=picture, frame_index=latent * stride),
        frame=lambda latent, stride: latent * stride,
        pixels=lambda levels: levels / 255 * 2 - 1,
        in_front=True,
        options={**LTX.options, "image_cond_noise_scale": 0.0},
    ),
    "ltx2": Keyframes(
        tiny="ltx2",
        pipeline_class="LTX2ConditionPipeline",
        condition=lambda picture, latent, stride: LTX2VideoCondition(frames=picture, index=latent, crf=0),
        frame=lambda latent, stride: (latent - 1) * stride + 1,
        pixels=lambda levels: levels / 127.5 - 1,
        in_front=False,
        options={**LTX2.options},
        changes=LTX2.changes,
    ),
}


class Recorded(NamedTuple):
    """A sample as its pipeline passes it on, and as a pack takes it."""

    call: dict[str, Any]
    own: slice
    latent: torch.Tensor
    keyframes: list[torch.Tensor]
    timesteps: torch.Tensor
    text: torch.Tensor
    frames: list[int]


@pytest.fixture(scope="module")
def recorded_of(tiny_folder: Callable[[str], Path]) -> Callable[[str], tuple[Recipe, list[Recorded]]]:
    """Return what a pipeline passes for each sample; tests leave its model unpacked."""
    return cache(partial(record, tiny_folder))


def record(tiny_folder: Callable[[str], Path], name: str) -> tuple[Recipe, list[Recorded]]:
    case = CASES[name]
    recipe = load(tiny_folder(case.tiny))
    pipeline = getattr(diffusers, case.pipeline_class)(**recipe.pipeline.components)
    pipeline.set_progress_bar_config(disable=True)
    # LTX-Video's pipeline draws latents from the posterior; training takes its mode.
    with mock.patch.object(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()):
        return recipe, [record_sample(case, recipe.spec, pipeline, number) for number in range(len(SAMPLES))]


def record_sample(case: Keyframes, spec: LatentSpec, pipeline: Any, number: int) -> Recorded:
    size, latents = SAMPLES[number]
    generator = torch.Generator().manual_seed(number)
    conditions = [
        case.condition(picture, latent, spec.temporal_stride)
        for picture, latent in zip(pictures(levels_of(number) / 255 * 2 - 1), latents, strict=True)
    ]
    call = record_call(
        pipeline,
        prompt="red"[: 1 + number % 3],
        height=size.height,
        width=size.width,
        num_frames=size.frames,
        frame_rate=fps_of(number),
        num_inference_steps=1,
        generator=generator,
        **({"conditions": conditions} if conditions else {}),
        **case.options,
    )
    call |= case.changes
    call["timestep"] = call["timestep"] * (0.95 - 0.1 * number)
    if "sigma" in call:
        call["sigma"] = call["sigma"] * (0.95 - 0.1 * number)
    frames = [case.frame(latent, spec.temporal_stride) for latent in latents if latent]
    grid, one = spec.grid(size), spec.grid(size._replace(frames=1))
    count, each = math.prod(grid), math.prod(one)
    tokens = call["hidden_states"][0].unflatten(1, (-1, *spec.patch))
    start = each * len(frames) if case.in_front else 0
    others = torch.cat([tokens[:start], tokens[start + count :]])
    levels = call["timestep"].expand(1, len(tokens))[0] if call["timestep"].ndim < 3 else call["timestep"][0, :, 0]
    assert not levels[:start].any()
    assert not levels[start + count :].any()
    own = slice(start, start + count)
    mask = call["encoder_attention_mask"][0].bool()
    return Recorded(
        call=call,
        own=own,
        latent=unpatchify(tokens[own], grid),
        keyframes=[unpatchify(part, one) for part in others.split(each)] if frames else [],
        timesteps=levels[own],
        text=call["encoder_hidden_states"][0][mask],
        frames=frames,
    )


def levels_of(number: int) -> torch.Tensor:
    """Return the pictures that a sample is shown, `(3, n, H, W)`, levels of 8 bits."""
    size, latents = SAMPLES[number]
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 256, (3, len(latents), size.height, size.width), generator=generator)


def clip_of(number: int, *, case: Keyframes, stride: int) -> torch.Tensor:
    """Return a clip of noise, `(3, F, H, W)`, that has its pictures at their frames."""
    size, latents = SAMPLES[number]
    clip = torch.rand(3, *size, generator=torch.Generator().manual_seed(number)) * 2 - 1
    for place, picture in zip(latents, case.pixels(levels_of(number)).unbind(1), strict=True):
        clip[:, case.frame(place, stride) if place else 0] = picture
    return clip


def fps_of(number: int) -> float:
    return 8.0 + number


def conditioning_of(recipe: Recipe, samples: Sequence[Recorded]) -> dict[str, torch.Tensor]:
    begins = torch.zeros(len(samples), max(len(sample.frames) for sample in samples))
    for row, sample in enumerate(samples):
        begins[row, : len(sample.frames)] = torch.tensor(sample.frames)
    rates = torch.tensor([fps_of(number) for number in range(len(samples))])
    if SCALES not in recipe.family.conditioning(recipe.transformer):
        return {"fps": torch.cat([rates[:, None], begins], 1)}
    stride, side = float(recipe.spec.temporal_stride), float(recipe.spec.spatial_stride)
    scales = torch.tensor([[stride / rate, side, side, stride] for rate in rates.double().tolist()])
    return {SCALES: torch.cat([scales, begins], 1)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strip_length", [4, 7])
def test_a_pack_of_samples_with_keyframes_equals_the_calls_of_the_pipeline(
    name: str, strip_length: int, recorded_of
) -> None:
    """Samples with some keyframes, a clean first frame, both and neither meet in a pack; float64."""
    recipe, samples = recorded_of(name)
    model = recipe.transformer
    expected = [model(**{**sample.call, "return_dict": False})[0][0, sample.own] for sample in samples]
    of_calls = gradients(model, mean_squares(expected))
    packing = enable_packing(model, strip_length=strip_length)
    batch = packing.pack(
        [sample.latent for sample in samples],
        references=[sample.keyframes for sample in samples],
        timesteps=[sample.timesteps for sample in samples],
        text=[sample.text for sample in samples],
        conditioning=conditioning_of(recipe, samples),
    )
    packed = [patchify(output, batch.patch).flatten(1) for output in batch.unpack(packed_forward(model, batch))]
    of_pack = gradients(model, mean_squares(packed))
    disable_packing(model)
    assert largest_difference(expected, packed) <= 1e-11
    assert_same_gradients(of_calls, of_pack, 1e-6, without_gradient=tuple(recipe.family.unused(model)))


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_shows_drawn_keyframes_as_the_calls_of_the_pipeline_do(name: str, recorded_of) -> None:
    """The recipe encodes frames of the samples themselves, and makes the arguments of the pack; float64."""
    recipe, samples = recorded_of(name)
    case, model, stride = CASES[name], recipe.transformer, recipe.spec.temporal_stride
    expected = [model(**{**sample.call, "return_dict": False})[0][0, sample.own] for sample in samples]
    of_calls = gradients(model, mean_squares(expected))
    drawn = []
    for size, latents in SAMPLES:
        frames = np.arange(size.frames) == (0 if 0 in latents else -1)
        drawn.append(Drawn(frames, masked=False, references=True, appended=tuple(filter(None, latents))))
    packing = enable_packing(model, strip_length=4)
    step = step_of(recipe, "appended_keyframes", PackStep, packing=packing)
    clips = [clip_of(number, case=case, stride=stride) for number in range(len(SAMPLES))]
    media = step.media({"pixel_values": clips}, drawn)
    clean, noisy = media.pop("latents"), [sample.latent for sample in samples]
    for row, sample in enumerate(samples):
        first = slice(0, int(not sample.timesteps[0]))
        shown, recorded = [clean[row][:, first], *media[KEYFRAMES][row]], [sample.latent[:, first], *sample.keyframes]
        for encoded, latent in zip(shown, recorded, strict=True):
            torch.testing.assert_close(encoded, latent, rtol=1e-6, atol=1e-6)
    media[KEYFRAMES] = [sample.keyframes for sample in samples]  # in float32, as the pipelines keep latents
    clean = noisy
    levels = torch.stack([sample.timesteps.max() for sample in samples])
    rates = torch.tensor([fps_of(number) for number in range(len(samples))])
    text = TextEmbeddings(torch.zeros(len(samples), 1, 1))
    inputs = recipe.model_inputs(
        Samples(noised=Noised(noisy, noisy, levels, clean), text=text, fps=rates, conditions=media)
    )
    batch = packing.pack(
        inputs.latents,
        references=inputs.references,
        timesteps=inputs.timesteps,
        text=[sample.text for sample in samples],
        conditioning=inputs.conditioning,
    )
    packed = [patchify(output, batch.patch).flatten(1) for output in batch.unpack(packed_forward(model, batch))]
    of_pack = gradients(model, mean_squares(packed))
    disable_packing(model)
    assert largest_difference(expected, packed) <= 1e-11
    assert_same_gradients(of_calls, of_pack, 1e-6, without_gradient=tuple(recipe.family.unused(model)))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_stack_places_keyframes_as_a_pack_does(name: str, recorded_of) -> None:
    recipe, samples = recorded_of(name)
    for row, sample in enumerate(samples):
        if sample.timesteps.unique().numel() > 1:
            continue  # `run_alone` takes one timestep
        conditioning = {key: values[row] for key, values in conditioning_of(recipe, samples).items()}
        options = {"timestep": sample.timesteps[0], "text": sample.text, "references": sample.keyframes}
        alone = recipe.family.run_alone(recipe.transformer, sample.latent, conditioning=conditioning, **options)
        expected = recipe.transformer(**{**sample.call, "return_dict": False})[0][:, sample.own]
        assert largest_difference([expected[0]], [patchify(alone, recipe.spec.patch).flatten(1)]) <= 1e-11
        if sample.frames:
            moved = {key: values.clone() for key, values in conditioning.items()}
            for values in moved.values():
                values[-2:] += 1
            other = recipe.family.run_alone(recipe.transformer, sample.latent, conditioning=moved, **options)
            assert largest_difference([alone], [other]) > 1e-4
