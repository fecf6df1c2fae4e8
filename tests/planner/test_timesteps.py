"""Plans of memory for samples with clean parts, whose tokens have timesteps of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import SHOWN_LATENTS
from hf_bucketing.planner import PlanConfig, memory as planner, trace
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.trackers import PeakTracker
from hf_bucketing.settings import changed
from tests.models.recipe_cases import samples_of

CONFIG = PlanConfig.from_flat(
    sample_size=[17, 128, 128], train_batch_size=2, device="cpu", mixed_precision="no", max_sequence_length=16
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "condition"), [("wan-2.2-ti2v", None), ("wan-2.2-t2v-5b", "prefix"), ("ltx", "first_frame:0.5,none:0.5")]
)
def test_a_step_with_clean_parts_takes_what_is_planned(
    name: str, condition: str | None, tiny_folder: Callable[[str], Path]
) -> None:
    folder = str(tiny_folder(name))
    components, config = read_components(folder), changed(CONFIG, condition=condition)
    step = planner._step(components, config, planner.step_shape(components, config))
    recipe = recipe_of(folder).load(folder, max_sequence_length=16)
    model, (size, *_) = recipe.transformer, step.latent_sizes
    samples = samples_of(recipe, torch.randn(2, recipe.latent_channels, *size), fps=[8.0, 8.0])
    if condition is not None:
        part = torch.zeros(1, size[0], 1, 1, dtype=torch.bool)
        part[:, 0] = True
        samples = replace(samples, conditions={SHOWN_LATENTS: [part, part]})
    inputs = recipe.model_inputs(samples)
    assert not isinstance(inputs.timesteps, torch.Tensor), "one per token"
    tracker = PeakTracker.of(model, [torch.stack(list(inputs.latents)), samples.text.values])
    with tracker:
        loss = recipe.predict(model, samples, inputs).square().mean()
        tracker.phase = "backward"
        loss.backward()
    planned, by_row = trace.trace(step).peaks, trace.trace(replace(step, token_timesteps=False)).peaks
    for phase, kinds in planned.items():
        assert kinds.total == pytest.approx(tracker.peaks[phase].total, rel=0.03)
        assert by_row[phase].activations < 0.95 * kinds.activations


@pytest.mark.cases(fast=("ltx-i2v-*",), slow=("*",))
@pytest.mark.parametrize(
    ("name", "condition", "expected"),
    [
        ("ltx", None, False),
        ("ltx-i2v", None, True),
        ("wan", "prefix", False),
        ("wan-2.2-i2v", "prefix", False),
        ("wan-2.2-t2v-5b", None, False),
        ("skyreels-v2-df", None, True),
        ("cosmos-v2w", "prefix", False),
        ("cosmos2-v2w", None, True),
    ],
)
def test_tokens_have_timesteps_where_the_recipe_gives_them_some(
    name: str, condition: str | None, expected: bool, tiny_folder: Callable[[str], Path]
) -> None:
    components, config = read_components(str(tiny_folder(name))), changed(CONFIG, condition=condition)
    step = planner._step(components, config, planner.step_shape(components, config))
    assert step.token_timesteps is expected
    if expected:
        assert trace.trace(step).peaks["backward"].activations > 0


def test_a_condition_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BucketingError, match="`condition` must be conditions with their shares"):
        changed(CONFIG, condition="last")
