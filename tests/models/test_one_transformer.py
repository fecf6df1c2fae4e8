"""Stacks and packs of every kind in turn on one transformer: none leaves anything behind for the next."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.conditions.shares import read_conditions
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing.pack import Packing
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin
from tests.models.recipe_cases import RecipeCase, draw_conditions

CONDITIONS = {
    "ltx-condition": ("first_frame+appended_last_frame", "reference+appended_keyframes@1", "prefix@1"),
    "ltx2": ("first_frame", "video", "audio", "no_audio"),
    "ltx2-i2v": ("first_frame+appended_last_frame", "appended_keyframes@1", "audio"),
    "kandinsky6": ("appended_first_frame", "video", "no_audio"),
    "minimax-h3": ("appended_first_frame", "appended_first_frame+appended_last_frame", "audio"),
    "skyreels-v2-df": ("prefix@1",),
    "cosmos2-v2w": ("first_frame", "prefix@1"),
}
"""Conditions of a run, beside those of the data set's columns."""
WITH_SOUND = ("ltx2", "ltx2-i2v", "kandinsky6", "minimax-h3")
FAST = ("ltx2", "flux2", "flux-kontext", "ltx-condition", "latte")
each_recipe = pytest.mark.parametrize("name", one_per_kin(RECIPES, fast=FAST, few=True))


class Call(NamedTuple):
    """A training step: what samples are shown, whether the first has sound, and how they are put together."""

    shown: tuple[str, ...]
    condition: str | None
    sound: bool
    packed: bool


def calls_of(name: str) -> list[Call]:
    case = RECIPES[name]
    shown = [*(() if case.needs_shown else ((),)), *case.shown]
    sounds = (True, False) if name in WITH_SOUND else (False,)
    kinds = [(*pair, None) for pair in itertools.product(shown, sounds)]
    kinds += [(shown[-1], name in WITH_SOUND, condition) for condition in CONDITIONS.get(name, ())]
    return [Call(names, condition, sound, packed) for packed in (True, False) for names, sound, condition in kinds]


def batch_of(case: RecipeCase, recipe: Recipe, call: Call, folder: Path) -> dict[str, Any]:
    """Return one sample as a stack, or two samples for a pack, of which the second has no sound."""
    generator, fps = torch.Generator().manual_seed(0), 24.0 if case.tiny == "minimax-h3" else 8.0
    sizes = case.sizes[:1] if not call.packed else (case.sizes[0], case.sizes[-1])
    drawn = [draw_conditions(call.shown, size, generator, references=case.references[0]) for size in sizes]
    shown: dict[str, Any] = {name: [sample[name] for sample in drawn] for name in call.shown}
    if recipe.audio:
        rule = recipe.read_audio_rule(str(folder))
        lengths = [rule.num_samples(rule.num_tokens(sizes[0][0], fps)) if call.sound else 0, 0]
        shown["audio"] = [torch.rand(2, length, generator=generator) - 0.5 for length in lengths[: len(sizes)]]
    pixels = [torch.rand(3, *size, generator=generator) * 2 - 1 for size in sizes]
    return {
        "pixel_values": pixels if call.packed else torch.stack(pixels),
        "caption": list(case.captions[: len(sizes)]),
        "fps": [fps if size[0] > 1 else 0.0 for size in sizes],
        "index": [3, 4][: len(sizes)],
        "shown": shown,
    }


def step_of(recipe: Recipe, call: Call, **packing: Packing) -> Step:
    condition = None if call.condition is None else read_conditions(call.condition)
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    kind = PackStep if call.packed else BucketStep
    return kind(recipe=recipe, objective=objective, condition=condition, seed=0, **packing)


def outcome(case: RecipeCase, recipe: Recipe, call: Call, folder: Path) -> list[torch.Tensor]:
    """Return the losses of a step and the norms of all gradients."""
    transformer = recipe.transformer
    packing = {"packing": enable_packing(transformer, strip_length=8, backend="segments")} if call.packed else {}
    losses = step_of(recipe, call, **packing)(transformer, batch_of(case, recipe, call, folder), epoch=1).values
    losses.sum().backward()
    if call.packed:
        disable_packing(transformer)
    gradients = [torch.zeros(()) if weight.grad is None else weight.grad.norm() for weight in transformer.parameters()]
    transformer.zero_grad()
    return [losses.detach(), torch.stack(gradients)]


@pytest.mark.cases(slow=("wan-vace", "minimax-h3", "ltx2-i2v", "latte", "flux2", "qwen-image-edit-2511"))
@each_recipe
def test_each_step_is_that_of_a_fresh_transformer(name: str, tiny_folder: Callable[[str], Path]) -> None:
    """The transformer that runs all, stacks before and after packs, also recomputes its blocks in backward passes."""
    case, folder, calls = RECIPES[name], tiny_folder(RECIPES[name].tiny), calls_of(name)
    options = {"max_sequence_length": case.max_sequence_length, "audio": name in WITH_SOUND}
    recipe = recipe_of(str(folder)).load(str(folder), **options)
    transformer = recipe.transformer.eval()
    torch.manual_seed(0)
    for weight in transformer.parameters():  # some are zeros, behind which nothing would show
        weight.data += 0.02 * torch.randn_like(weight)
    expected = {}
    for call in calls:
        setattr(recipe.pipeline, recipe.trained, copy.deepcopy(transformer))
        expected[call] = outcome(case, recipe, call, folder)
    setattr(recipe.pipeline, recipe.trained, transformer)
    if name != "chroma":  # whose stacks refuse it
        transformer.enable_gradient_checkpointing()
    with torch.no_grad():
        for call in calls:
            if not call.packed:
                step_of(recipe, call)(transformer, batch_of(case, recipe, call, folder), epoch=1)
    for call in calls:
        for found, value in zip(outcome(case, recipe, call, folder), expected[call], strict=True):
            limit = 1e-5 * float(value.abs().max())
            torch.testing.assert_close(
                found, value, rtol=1e-4, atol=limit, msg=lambda text, call=call: f"{call}: {text}"
            )
