"""MiniMax-H3: what its pipeline passes to the model, and stacks of a model that runs one sample per forward."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import family_of, recipe_of
from hf_bucketing.packing import packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from hf_bucketing.packing.strips import patchify
from tests.models.cases import Samples, assert_same_gradients, gradients, largest_difference
from tests.models.families import CASES
from tests.models.families.minimax_h3 import latent_of_rows
from tests.models.pipeline_calls import mean_squares
from tests.models.recipe_cases import stock_pipeline

VIDEO, TEXT = 0, 1


class Recorded(Exception):  # noqa: N818
    """Ends a call of the pipeline at a call of the model."""


def recorded_call(pipeline: Any, number: int = 1, **options: Any) -> dict[str, Any]:
    """Return the arguments of a pipeline's first call of its transformer, or of a later one."""
    arguments: dict[str, Any] = {}
    forward, calls = pipeline.transformer.forward, itertools.count(1)

    @functools.wraps(forward)
    def record(**kwargs: Any) -> Any:
        if next(calls) < number:
            return forward(**kwargs)
        arguments.update(kwargs)
        raise Recorded

    with patch.object(pipeline.transformer, "forward", record), pytest.raises(Recorded):
        pipeline(**options)
    return arguments


@torch.no_grad()
def test_but_for_the_sound_the_model_gets_what_the_pipeline_passes(tiny_folder: Callable[[str], Path]) -> None:
    folder, prompt = tiny_folder("minimax-h3"), "a red square"
    size = {"height": 32, "width": 96, "num_frames": 124}
    passed = recorded_call(stock_pipeline(folder), prompt=prompt, num_inference_steps=4, **size)
    recipe = recipe_of(str(folder)).load(str(folder))
    rows = Rows(
        latents=torch.zeros(1, 4, 37, 2, 6),
        timesteps=torch.tensor([1000.0]),
        text=recipe.encode_text([prompt]).trimmed().values,
        patch=(1, 2, 2),
    )
    family = recipe.family
    made = {**family.inputs(rows), **family.unpacked_inputs(recipe.transformer, rows)}
    assert torch.equal(made["encoder_hidden_states"], passed["encoder_hidden_states"])
    assert made["hidden_states"].shape == passed["hidden_states"].shape
    silent = (passed["token_tags"] == VIDEO) | (passed["token_tags"] == TEXT)
    assert not bool(silent.all()), "the pipeline always makes sound"
    for name in ("token_tags", "position_ids"):
        assert torch.equal(made[name], passed[name][silent]), name
    places = silent.cumsum(0) - 1
    for name in ("video_indices", "text_indices"):
        assert torch.equal(made[name], places[passed[name]]), name
    times = passed["timestep"][passed["timestep_indices"]][silent]
    assert torch.equal(made["timestep"][made["timestep_indices"]], times)


class RecordedSounds:
    """Two samples of other sizes as the pipeline passes them in its second step, and one of them without sound.

    The model and what it is passed are in float64.
    """

    def __init__(self, folder: Path) -> None:
        pipeline = stock_pipeline(folder)
        calls = [
            recorded_call(
                pipeline, 2, prompt=prompt, num_inference_steps=4, generator=torch.Generator().manual_seed(1), **size
            )
            for prompt, size in (
                ("a red square", {"height": 32, "width": 96, "num_frames": 124}),
                ("a loud bell", {"height": 64, "width": 32, "num_frames": 141}),
            )
        ]
        self.model = pipeline.transformer.double()
        self.calls = [
            {
                name: value.double() if name.endswith("hidden_states") else value
                for name, value in call.items()
                if isinstance(value, torch.Tensor)
            }
            for call in calls
        ]
        self.latents = [
            latent_of_rows(call["hidden_states"][0], torch.empty(4, *size), patch=(1, 2, 2))
            for call, size in zip(self.calls, ((37, 2, 6), (42, 4, 2)), strict=True)
        ]
        self.levels = [
            [1000 * (1 - self.time_of(call, f"{kind}_indices")) for call in self.calls] for kind in ("video", "audio")
        ]

    @staticmethod
    def time_of(call: dict[str, torch.Tensor], rows: str) -> torch.Tensor:
        (time,) = call["timestep"][call["timestep_indices"][call[rows]]].unique()
        return time

    def packed(self) -> Any:
        """Return the outputs of a pack of both, and of the second again without sound, as the forward returns them."""
        video, heard = (torch.stack([*levels, levels[1]]) for levels in self.levels)
        texts = [call["encoder_hidden_states"][0] for call in self.calls]
        sounds = [call["audio_hidden_states"][0] for call in self.calls]
        packing = enable_packing(self.model, strip_length=8)
        batch = packing.pack(
            [*self.latents, self.latents[1]],
            timesteps=video,
            text=[*texts, texts[1]],
            audio=Audio(latents=[*sounds, sounds[1][:0]], timesteps=heard, video_timesteps=video),
        )
        strips, audio = packed_forward_with_audio(self.model, batch)
        rows = [patchify(latent, batch.patch).flatten(1) for latent in batch.unpack(strips)]
        return [-output for output in rows], [-output for output in audio]


def test_a_pack_with_sound_is_what_the_pipelines_calls_of_the_model_give(tiny_folder: Callable[[str], Path]) -> None:
    recorded = RecordedSounds(tiny_folder("minimax-h3"))
    expected = [output[0] for call in recorded.calls for output in recorded.model(**call, return_dict=False)]
    alone = gradients(recorded.model, mean_squares(expected))
    videos, sounds = recorded.packed()
    outputs = [videos[0], sounds[0], videos[1], sounds[1]]
    assert largest_difference(expected, outputs) <= 1e-11
    assert len(sounds[2]) == 0
    assert largest_difference([videos[1]], [videos[2]]) > 1e-3, "video attends to its sound"
    assert_same_gradients(alone, gradients(recorded.model, mean_squares(outputs)), 1e-6)


def test_audio_has_the_level_of_its_schedule_in_the_step_in_which_video_has_its_own(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = tiny_folder("minimax-h3")
    recorded = RecordedSounds(folder)
    objective = (
        recipe_of(str(folder)).load(str(folder), audio=True).objective(weighting_scheme=None, snr_gamma=None, seed=0)
    )
    video, heard = map(torch.stack, recorded.levels)
    noised = objective.audio([torch.zeros(2, 4)] * 2, timesteps=video, keys=[(0, 0, 0), (0, 0, 1)])
    assert torch.allclose(noised.timesteps, heard, rtol=1e-5)
    assert bool((heard < video - 1).all())


@torch.no_grad()
def test_a_stack_runs_one_sample_after_another_each_with_its_own_text() -> None:
    case = CASES["minimax-h3"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case, order=(0, 4))
    samples.text[1] = samples.text[1][:3]
    text, mask = torch.full((2, 9, case.text_dim), 7.0, dtype=torch.float64), torch.zeros(2, 9)
    for row, words in enumerate(samples.text):
        text[row, : len(words)], mask[row, : len(words)] = words, 1
    stack = Rows(
        latents=torch.stack(samples.latents), timesteps=samples.timesteps, text=text, text_mask=mask, patch=(1, 2, 2)
    )
    outputs = family_of(model).run(model, stack)
    for output, expected in zip(outputs, samples.alone(model), strict=True):
        assert float((output - expected).abs().max()) <= 1e-11
