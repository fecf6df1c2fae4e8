"""Plans of memory for samples whose audio is trained too: what a real step holds, and what a suggestion counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.conditions.audio import AudioRule, RowAudio
from hf_bucketing.conditions.rows import RowConditions
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from hf_bucketing.planner import PlanConfig, memory as planner, trace
from hf_bucketing.planner.components import Components, read_components
from hf_bucketing.planner.rows import DataRows
from hf_bucketing.planner.settings import MachineConfig
from hf_bucketing.planner.suggestion import Suggester
from hf_bucketing.planner.time import Speed
from hf_bucketing.planner.trackers import PeakTracker
from hf_bucketing.planner.ways import tables_of, ways_of
from hf_bucketing.report.measure import Sizes, packed_targets
from hf_bucketing.settings import changed

SILENT = PlanConfig.from_flat(
    sample_size=[9, 32, 64], train_batch_size=2, device="cpu", mixed_precision="no", max_sequence_length=64
)
HEARD = changed(SILENT, audio_fps=8.0)
TOKENS = 28
"""Tokens of the audio of nine frames at eight a second."""
PLANS = {
    "ltx2": (HEARD, TOKENS),
    "minimax-h3": (changed(HEARD, sample_size=[22, 32, 64], audio_fps=24.0, train_batch_size=1), 74),
    "kandinsky6": (HEARD, 29),
}
"""Settings of a step of a model, and the tokens of the audio of each sample."""


@pytest.fixture(scope="module")
def components(tiny_folder: Callable[[str], Path]) -> Components:
    return read_components(str(tiny_folder("ltx2")))


@pytest.mark.cases(slow=("ltx2",))
@pytest.mark.parametrize("name", ["ltx2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*PLANS][1:])])
def test_a_step_with_audio_takes_what_is_planned(name: str, tiny_folder: Callable[[str], Path]) -> None:
    folder, (config, tokens) = str(tiny_folder(name)), PLANS[name]
    components = read_components(folder)
    step, count = (
        planner._step(components, config, planner.step_shape(components, config)),
        config.run.batches.train_batch_size,
    )
    assert step.audio_length == tokens
    recipe = recipe_of(folder).load(folder, audio=True, max_sequence_length=64)
    model, family, length = recipe.transformer, recipe.family, step.text_length
    levels, patch = torch.full((count,), 500.0), family.patch(recipe.transformer.config)
    text_dim = family.audio_text_dim(model)
    audio = Audio(
        latents=list(torch.randn(count, tokens, family.audio_channels(model))),
        timesteps=levels,
        video_timesteps=levels,
        text=torch.randn(count, length, text_dim) if text_dim else None,
    )
    grid = tuple(side // part for side, part in zip(step.latent_sizes[0], patch, strict=True))
    rows = Rows(
        latents=torch.randn(count, family.in_channels(model), *step.latent_sizes[0]),
        timesteps=levels,
        text=torch.randn(count, length, family.text_dim(model)),
        patch=patch,
        text_mask=torch.ones(count, length) if family.text.padding == "masked" else None,
        conditioning={
            name: torch.stack(list(values)) for name, values in family.draw_conditioning(model, [grid] * count).items()
        },
        audio=audio,
    )
    given = [rows.latents, rows.text, *audio.latents, *([] if audio.text is None else [audio.text])]
    tracker = PeakTracker.of(model, given)
    with tracker:
        output, heard = family.run_with_audio(model, rows)
        loss = output.square().mean() + torch.stack(heard).square().mean()
        tracker.phase = "backward"
        loss.backward()
    traced, silent = trace.trace(step), trace.trace(replace(step, audio_length=0))
    for phase, kinds in traced.peaks.items():
        assert kinds.total == pytest.approx(tracker.peaks[phase].total, rel=0.02)
    assert traced.trained > silent.trained, "what serves audio alone is trained too"
    assert traced.flops.hardware > silent.flops.hardware


def test_audio_counts_in_tokens_and_in_the_samples_that_they_hold(components: Components) -> None:
    shape = planner.step_shape(components, HEARD)
    assert (shape.tokens, shape.audio_tokens, shape.length) == (2 * 96, 2 * TOKENS, 2 * (96 + TOKENS))
    assert planner.step_shape(components, changed(HEARD, max_tokens=3 * 96)).samples == 2
    packed = planner.step_shape(components, changed(HEARD, batching="pack", strip_length=10, max_tokens=300))
    assert (packed.samples, packed.length) == (2, 2 * 130), "whole strips"


def test_a_model_without_audio_refuses_its_rate(tiny_folder: Callable[[str], Path]) -> None:
    wan = read_components(str(tiny_folder("wan")))
    with pytest.raises(BucketingError, match="Omit `audio_fps`: a WanPipeline makes no audio"):
        planner.step_shape(wan, HEARD)
    with pytest.raises(BucketingError, match="`audio_fps` must be above 0"):
        changed(HEARD, audio_fps=0.0)


def test_cached_audio_is_counted_in_channels_of_its_own(components: Components) -> None:
    sizes = Sizes(*np.tile([[9], [64], [64]], (1, 10)))
    audio = RowAudio(
        rule=AudioRule(rate=16000, samples_per_token=640), present=np.arange(10) < 3, fps=np.full(10, 8.0)
    )
    conditions = RowConditions.of(audio)
    rows = DataRows(sizes=sizes, total=20, conditions=conditions, caption_characters=40.0)
    suggester = Suggester(
        components, rows, machine=MachineConfig(gpu_memory=24), base=SILENT, speed=Speed(1e12, 2e12, "a test")
    )
    targets = packed_targets(sizes, spec=components.spec, max_area=None)
    latents = components.spec.num_tokens((9, 64, 64)) * 4 * 4
    heard = suggester._cache_bytes(targets, SILENT)
    suggester.rows = replace(rows, conditions=RowConditions(num_rows=10))
    silent = suggester._cache_bytes(targets, SILENT)
    assert heard - silent == 4 * 4 * 3 * TOKENS * 20 // 10, "four channels in float32, of as many rows"
    assert silent > 20 * latents
    assert heard < 1.5 * silent


@pytest.mark.slow
def test_a_suggestion_counts_the_audio_of_rows(components: Components) -> None:
    count = 40
    sizes = Sizes(*np.tile([[9], [64], [64]], (1, count)))
    present = np.arange(count) % 2 == 0
    audio = RowAudio(rule=AudioRule(rate=16000, samples_per_token=640), present=present, fps=np.full(count, 8.0))
    silent = DataRows(sizes=sizes, total=count, conditions=RowConditions(num_rows=count), decoding=0.001)
    machine, base = MachineConfig(gpu_memory=24, num_train_epochs=1), changed(SILENT, device="cuda")
    tables = {
        name: (settings, settings.make(components.spec)) for name, settings in tables_of(components, sizes).items()
    }
    found = [
        Suggester(components, rows, machine=machine, base=base, speed=Speed(1e12, 2e12, "a test")).suggest(
            ways_of(tables, sizes, spec=components.spec)
        )
        for rows in (silent, replace(silent, conditions=RowConditions.of(audio)))
    ]
    for without, with_audio in zip(*(sorted(run.candidates, key=lambda one: one.name) for run in found), strict=False):
        assert with_audio.config.samples.audio_fps == 8.0
        assert without.config.samples.audio_fps is None
    lengths = [max(candidate.memory.shape.length for candidate in run.candidates) for run in found]
    assert lengths[1] > lengths[0]
    bucketed = [candidate for candidate in found[1].candidates if candidate.way.batching == "bucket"]
    assert {tuple(sorted({*(candidate.way.targets.condition_tokens.tolist())})) for candidate in bucketed} == {
        (0, TOKENS)
    }
