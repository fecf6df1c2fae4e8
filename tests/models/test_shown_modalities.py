"""Sound that is shown clean, as `LTX2DFRPipeline` keeps it: packs and stacks of what its call passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2DFRPipeline

from hf_bucketing.conditions.audio import AUDIO
from hf_bucketing.conditions.shares import Drawn
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import Samples
from hf_bucketing.models.texts import AUDIO_TEXT, TextEmbeddings
from hf_bucketing.packing.forward import packed_forward_with_audio
from hf_bucketing.packing.strips import patchify, unpatchify
from tests.batching.test_drawing import step_of
from tests.models.cases import assert_same_gradients, gradients, largest_difference
from tests.models.pipeline_calls import mean_squares, record_call

SAMPLES = ((9, 32, 64, 7), (17, 32, 32, 4), (9, 64, 32, 11))
"""Frames, height and width of samples, and the tokens of the sound that each is shown."""

AFTER_LAST_ATTENTION = ("1.video_to_audio_attn", "1.audio_ff", "audio_proj_out")
"""What computes sound behind the last block in which the video attends to it, of two blocks."""


@pytest.fixture(scope="module")
def recipe(tiny_folder: Callable[[str], Path]) -> Recipe:
    folder = str(tiny_folder("ltx2"))
    loaded = recipe_of(folder).load(folder, max_sequence_length=64, audio=True)
    for module in loaded.modules("trained", "text_encoders", "vae"):
        module.double()
    loaded.transformer.eval()
    return loaded


def record(recipe: Recipe, number: int) -> dict[str, Any]:
    """Return what the pipeline passes for a sample whose sound is frozen."""
    frames, height, width, tokens = SAMPLES[number]
    pipeline = LTX2DFRPipeline(**{**recipe.pipeline.components, "scheduler": FlowMatchEulerDiscreteScheduler()})
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(number)
    channels, bins = (
        pipeline.audio_latent_channels,
        pipeline.audio_mel_bins // pipeline.audio_vae_mel_compression_ratio,
    )
    call = record_call(
        pipeline,
        prompt="red"[: 1 + number],
        num_frames=frames,
        height=height,
        width=width,
        frame_rate=8.0 + number,
        audio_latents=torch.randn(1, channels, tokens, bins, generator=generator),
        generate_slots=False,
        freeze_audio=True,
        max_sequence_length=64,
        generator=generator,
    )
    level = 0.95 - 0.1 * number
    return {**call, "timestep": call["timestep"] * level, "sigma": call["sigma"] * level}


def inputs_of(recipe: Recipe, calls: list[dict[str, Any]]) -> tuple[Any, TextEmbeddings]:
    """Return what training passes for the same samples, of which `audio` is drawn."""
    step = step_of(recipe, "audio")
    latents, sounds = [], [call["audio_hidden_states"][0].double() for call in calls]
    for call, (frames, height, width, _) in zip(calls, SAMPLES, strict=False):
        (_, h, w), tokens = recipe.spec.grid((frames, height, width)), call["hidden_states"][0].double()
        latents.append(unpatchify(tokens.unflatten(1, (-1, *recipe.spec.patch)), (len(tokens) // h // w, h, w)))
    levels = torch.cat([call["sigma"] for call in calls])
    drawn = [Drawn(np.zeros(1, bool), masked=False, references=False, audio=True)] * len(calls)
    noised = Noised(latents, latents, levels, latents)
    keys = [(0, 0, number) for number in range(len(calls))]
    audio = step._noised_audio({AUDIO: sounds}, noised, drawn, keys=keys)
    names = ("encoder_hidden_states", "encoder_attention_mask", "audio_encoder_hidden_states")
    values, mask, heard = (torch.cat([call[name] for call in calls]) for name in names)
    text = TextEmbeddings(values, mask, {AUDIO_TEXT: heard})
    rates = torch.tensor([8.0 + number for number in range(len(calls))])
    samples = Samples(noised=noised, text=text, fps=rates, audio=audio)
    return samples, text


def test_a_pack_of_samples_whose_sound_is_shown_equals_the_calls_of_the_pipeline(recipe: Recipe) -> None:
    """Outputs of the video in float64 to 1e-11, gradients of their mean squares to 1e-6."""
    model = recipe.transformer
    calls = [record(recipe, number) for number in range(len(SAMPLES))]
    for call in calls:
        assert not call["audio_timestep"].any()
        assert not call["audio_sigma"].any()
        assert call["timestep"].all()
        assert call["use_cross_timestep"]
    expected = [model(**call)[0][0] for call in calls]
    of_calls = gradients(model, mean_squares(expected))
    samples, text = inputs_of(recipe, calls)
    inputs = recipe.model_inputs(samples)
    packing = enable_packing(model, strip_length=4)
    batch = packing.pack(
        inputs.latents,
        timesteps=inputs.timesteps,
        conditioning=inputs.conditioning,
        audio=inputs.audio,
        **text.pack_kwargs(),
    )
    output, _ = packed_forward_with_audio(model, batch)
    packed = [patchify(sample, batch.patch).flatten(1) for sample in batch.unpack(output)]
    of_pack = gradients(model, mean_squares(packed))
    disable_packing(model)
    assert largest_difference(expected, packed) <= 1e-11
    assert not any(of_model.pop("audio_scale_shift_table").any() for of_model in (of_calls, of_pack))
    assert_same_gradients(of_calls, of_pack, 1e-6, without_gradient=AFTER_LAST_ATTENTION)


@torch.no_grad()
def test_a_stack_shows_sound_as_the_calls_of_the_pipeline_do(recipe: Recipe) -> None:
    call = record(recipe, 0)
    samples, _ = inputs_of(recipe, [call])
    output, _ = recipe.predict_with_audio(recipe.transformer, samples, recipe.model_inputs(samples))
    expected = recipe.transformer(**call)[0][0]
    assert largest_difference([expected], [patchify(output[0], recipe.spec.patch).flatten(1)]) <= 1e-11
