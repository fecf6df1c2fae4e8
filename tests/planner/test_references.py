"""Plans of memory for samples with references: what a real step holds, and what is encoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError, Size
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing.batch import Rows
from hf_bucketing.planner import MemoryPlan, PlanConfig, memory as planner, plan_memory, trace
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import StepShape, plan_components
from hf_bucketing.planner.trackers import PeakTracker
from hf_bucketing.settings import changed

CONFIG = PlanConfig.from_flat(
    sample_size=[1, 64, 64], train_batch_size=2, device="cpu", mixed_precision="no", max_sequence_length=16
)
ONE, TWO = (changed(CONFIG, reference_sizes=sizes) for sizes in ("64,96", "64,96;1,32,64"))


def rows_of(model: Any, step: trace.TracedStep, family: Any) -> Rows:
    """Return random samples of a traced step, with their references."""
    count, channels = len(step.latent_sizes), family.in_channels(model)

    def draw(size: tuple[int, int, int]) -> torch.Tensor:
        return torch.randn(count, channels, *size)

    (size, *_), patch = step.latent_sizes, family.patch(model.config)
    grid = tuple(side // per_token for side, per_token in zip(size, patch, strict=True))
    return Rows(
        latents=draw(size),
        timesteps=torch.full((count,), 500.0),
        text=torch.randn(count, step.text_length, family.text_dim(model)),
        patch=patch,
        text_mask=torch.ones(count, step.text_length) if family.text.padding == "masked" else None,
        conditioning=family.draw_conditioning(model, [grid] * count),
        references=[draw(shown) for shown in step.reference_sizes],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux2", "ltx", "qwen-image-edit-2511"])
def test_a_step_with_references_takes_what_is_planned(name: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder(name))
    components = read_components(folder)
    step = planner._step(components, TWO, planner.step_shape(components, TWO))
    model = recipe_of(folder).load(folder).transformer
    family = components.recipe.family
    rows = rows_of(model, step, family)
    assert len(rows.references) == 2
    tracker = PeakTracker.of(model, [rows.latents, rows.text, *rows.references])
    with tracker:
        loss = family.run(model, rows).square().mean()
        tracker.phase = "backward"
        loss.backward()
    for phase, kinds in trace.trace(step).peaks.items():
        assert kinds.total == pytest.approx(tracker.peaks[phase].total, rel=0.01)


def plan(folder: Path, config: PlanConfig) -> MemoryPlan:
    return plan_memory(str(folder), config)


@pytest.mark.slow
def test_references_count_in_tokens_pixels_text_and_what_is_encoded(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("qwen-image-edit-2511")
    components = read_components(str(folder))
    configs = (CONFIG, ONE, TWO)
    none, one, two = shapes = [planner.step_shape(components, config) for config in configs]
    assert [shape.tokens for shape in shapes] == [2 * 16, 2 * (16 + 24), 2 * (16 + 24 + 8)]
    assert (none.pixels, one.pixels) == (2 * 64 * 64, 2 * (64 * 64 + 64 * 96))
    assert two.references == (Size(1, 64, 96), Size(1, 32, 64))
    assert [shape.text_tokens for shape in shapes] == [2 * 16, 2 * (16 + 217), 2 * (16 + 2 * 217)]
    texts = [
        planner.encode_texts(
            components, CONFIG, samples=shape.samples, pictures=217 * len(shape.references)
        ).peak.activations
        for shape in shapes
    ]
    assert texts == sorted({*texts})
    packs = changed(TWO, batching="pack", strip_length=32, max_tokens=1100)
    packed = planner.step_shape(components, packs)
    assert (packed.samples, packed.tokens) == (2, 2 * 64)
    small, large = (
        plan(folder, changed(CONFIG, reference_sizes=sizes, cached="nothing")) for sizes in ("32,32", "96,192")
    )
    assert large.phases["media encoding"].vae > small.phases["media encoding"].vae
    assert large.phases["optimizer"].activations > small.phases["optimizer"].activations > 0, "pixels"


def test_references_in_front_are_frames_of_their_sample(tiny_folder: Callable[[str], Path]) -> None:
    components = read_components(str(tiny_folder("wan-vace")))
    shape = planner.step_shape(components, TWO)
    assert (shape.references, shape.tokens) == ((Size(1, 64, 64),) * 2, 2 * 3 * 16)
    step = planner._step(components, TWO, shape)
    latents = step.latent_sizes[0]
    assert (math.prod(latents) // math.prod(components.spec.patch), step.reference_sizes) == (3 * 16, ())


def test_the_references_of_mixed_samples_count_once(tiny_folder: Callable[[str], Path]) -> None:
    components = read_components(str(tiny_folder("flux2")))
    sizes, shown = [Size(1, 64, 64)] * 2, Size(1, 64, 96)
    mixed = StepShape.of(sizes, tokens=2 * 16 + 3 * 24, text_tokens=32, references=[(), (shown,) * 3])
    assert (mixed.references, mixed.pixels) == ((shown,) * 3, 2 * 64 * 64 + 3 * 64 * 96)
    config = changed(CONFIG, cached="all", batching="pack", max_tokens=512, strip_length=8)
    activations = plan_components(components, config, mixed).peak.activations
    tokens = replace(mixed, references=(), pixels=0)
    assert activations == pytest.approx(plan_components(components, config, tokens).peak.activations, rel=0.2)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("flux-kontext", "64,64;64,64", "It has 2 references, but the model takes at most 1"),
        ("wan", "64,64", "a WanPipeline has such `reference_sizes`. It has 1 reference, but the model takes none"),
        ("flux2", "64,60", "does not divide into whole tokens"),
    ],
)
def test_references_that_a_model_does_not_take_are_refused(
    name: str, sizes: str, message: str, tiny_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(BucketingError, match=message):
        plan(tiny_folder(name), changed(CONFIG, reference_sizes=sizes))


@pytest.mark.parametrize("sizes", ["64", "64,0", "64,64;", "a,b", "1,1,64,64"])
def test_sizes_of_references_are_two_or_three_numbers(sizes: str) -> None:
    with pytest.raises(BucketingError, match=r"`reference_sizes` must be sizes .* got"):
        changed(CONFIG, reference_sizes=sizes)
