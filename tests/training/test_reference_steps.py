"""Steps on samples with references: stacks and packs agree, and a share of samples is shown none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.conditions.shares import read_conditions
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import REFERENCES

OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


@pytest.fixture(scope="module")
def recipe(tiny_folder: Callable[[str], Path]) -> Any:
    """FLUX.2 that takes references, in float64."""
    folder = str(tiny_folder("flux2"))
    kind: Any = type("Edits", (recipe_of(folder),), {"conditions": (ReferenceRule(most=9),)})
    recipe = kind.load(folder, max_sequence_length=32)
    for name in ("transformer", "text_encoder", "vae"):
        getattr(recipe.pipeline, name).double()
    return recipe


def make_batch(*counts: int) -> dict[str, Any]:
    """Make samples of one size with some references each, of two sizes."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sides: int) -> torch.Tensor:
        return torch.rand(3, 1, *sides, generator=generator) * 2 - 1

    return {
        "pixel_values": torch.stack([draw(32, 64) for _ in counts]),
        "shown": {"reference": [(draw(32, 32), draw(64, 32))[:count] for count in counts]},
        "caption": [f"number {number}" for number in range(len(counts))],
        "index": list(range(len(counts))),
        "fps": [0.0] * len(counts),
    }


def as_pack(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "pixel_values": list(batch["pixel_values"])}


@pytest.fixture
def step(recipe) -> Iterator[PackStep]:
    packing = enable_packing(recipe.transformer, strip_length=8)
    yield PackStep(recipe=recipe, objective=recipe.objective(**OPTIONS), packing=packing)
    disable_packing(recipe.transformer)


def losses(step: Step, batch: dict[str, Any], *, epoch: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return step(step.recipe.transformer, batch, epoch=epoch).values


def test_a_stack_and_a_pack_of_samples_with_references_lose_the_same(recipe, step) -> None:
    batch = make_batch(2, 2, 2)
    packed = losses(step, as_pack(batch))
    with step.unpacked():
        stacked = losses(BucketStep(recipe=recipe, objective=step.objective), batch)
        alone = losses(BucketStep(recipe=recipe, objective=step.objective), {**batch, "shown": {}})
    assert torch.allclose(packed, stacked, rtol=1e-9)
    assert not torch.isclose(stacked, alone, rtol=1e-5).any()


def test_media_has_a_tuple_of_references_for_each_sample(recipe) -> None:
    batch = make_batch(0, 1, 2)
    stacked, packed = media_of(recipe, batch), media_of(recipe, as_pack(batch))
    assert [len(references) for references in stacked[REFERENCES]] == [0, 1, 2]
    assert [tuple(latent.shape[1:]) for latent in stacked[REFERENCES][2]] == [(1, 4, 4), (1, 8, 4)]
    for pair in zip(sum(stacked[REFERENCES], ()), sum(packed[REFERENCES], ()), strict=True):
        assert torch.equal(*pair)


@pytest.mark.slow
def test_references_are_dropped_by_the_samples_own_seed(step) -> None:
    batch = as_pack(make_batch(2, 0, 1, 2))
    none = {**batch, "shown": {"reference": [()] * 4}}
    seen = set()
    for epoch in range(6):
        kept, dropped = (losses(step, rows, epoch=epoch) for rows in (batch, none))
        drawn, again = (losses(replace(step, reference_dropout=0.5), batch, epoch=epoch) for _ in range(2))
        assert torch.equal(drawn, again)
        without = torch.isclose(drawn, dropped, rtol=1e-9)
        assert (without | torch.isclose(drawn, kept, rtol=1e-9)).all()
        assert without[1], "it has no references anyway"
        seen |= {*without[[0, 2, 3]].tolist()}
    assert seen == {True, False}
    assert torch.allclose(losses(replace(step, reference_dropout=1.0), batch), losses(step, none), rtol=1e-9)


@pytest.mark.slow
def test_a_stack_drops_the_references_of_all_its_samples_or_of_none(recipe) -> None:
    batch, stacked = make_batch(2, 2, 2), BucketStep(recipe=recipe, objective=recipe.objective(**OPTIONS))
    none = {**batch, "shown": {"reference": [()] * 3}}
    counts = set()
    for epoch in range(8):
        drawn = losses(replace(stacked, reference_dropout=0.5), batch, epoch=epoch)
        counts.add(int(torch.isclose(drawn, losses(stacked, none, epoch=epoch), rtol=1e-9).sum()))
    assert counts == {0, 3}


@pytest.mark.cases(fast=("True",), slow=("False",))
@pytest.mark.parametrize("stacked", [False, True])
def test_a_share_without_references_is_a_condition_like_others(stacked: bool, recipe, step) -> None:
    batch = make_batch(2, 2, 2)
    kind: Step = BucketStep(recipe=recipe, objective=step.objective) if stacked else step
    batch = batch if stacked else as_pack(batch)
    with step.unpacked() if stacked else nullcontext():
        for epoch in range(4):
            dropped = losses(replace(kind, reference_dropout=0.5), batch, epoch=epoch)
            drawn = replace(kind, condition=read_conditions("reference:0.5,none:0.5"))
            assert torch.equal(losses(drawn, batch, epoch=epoch), dropped)
        for text in ("reference", "none"):  # a list that does not name references shows them
            always = losses(replace(kind, condition=read_conditions(text)), batch)
            assert torch.equal(always, losses(kind, batch))


def test_each_source_shows_references_by_its_own_shares(step) -> None:
    batch = {**as_pack(make_batch(2, 1, 2, 1)), "source": ["edits", "stills", "edits", "stills"]}
    kept, none = losses(step, batch), losses(step, {**batch, "shown": {"reference": [()] * 4}})
    step = replace(step, condition=read_conditions("reference;stills=none:0.999999,reference:0.000001"))
    assert torch.allclose(losses(step, batch), torch.stack([kept[0], none[1], kept[2], none[3]]), rtol=1e-9)


def test_held_out_samples_are_shown_the_references_that_conditions_draw_for_them(step) -> None:
    batch = as_pack(make_batch(2, 2, 2, 2, 2, 2))
    drawn = replace(step, condition=read_conditions("reference:0.5,none:0.5"))
    first, again, whole, dropping = (
        torch.stack([loss.values for loss in each.held_out(each.recipe.transformer, batch, num_levels=2)])
        for each in (drawn, replace(drawn, seed=3), step, replace(step, reference_dropout=1.0))
    )
    assert torch.equal(first, again)
    assert torch.equal(whole, dropping), "nothing is dropped"
    changed = ~torch.isclose(first, whole, rtol=1e-9)
    assert torch.equal(changed[0], changed[1])
    assert {*changed[0].tolist()} == {True, False}
