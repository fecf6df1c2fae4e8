"""MiniMax-H3: what its pipeline passes to the model, and stacks of a model that runs one sample per forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing.models.registry import family_of, recipe_of
from hf_bucketing.packing.batch import Rows
from tests.models.cases import Samples
from tests.models.families import CASES
from tests.models.recipe_cases import stock_pipeline

VIDEO, TEXT = 0, 1


class Recorded(Exception):  # noqa: N818
    """Ends a call of the pipeline at its first call of the model."""


def first_call(pipeline: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a pipeline's first call of its transformer."""
    arguments: dict[str, Any] = {}
    forward = pipeline.transformer.forward

    @functools.wraps(forward)
    def record(**kwargs: Any) -> None:
        arguments.update(kwargs)
        raise Recorded

    pipeline.transformer.forward = record
    with pytest.raises(Recorded):
        pipeline(**options)
    return arguments


@torch.no_grad()
def test_but_for_the_sound_the_model_gets_what_the_pipeline_passes(tiny_folder: Callable[[str], Path]) -> None:
    folder, prompt = tiny_folder("minimax-h3"), "a red square"
    size = {"height": 32, "width": 96, "num_frames": 124}
    passed = first_call(stock_pipeline(folder), prompt=prompt, num_inference_steps=4, **size)
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
