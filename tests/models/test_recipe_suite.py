"""Every training recipe: its loss is the one computed by hand from the stock pipeline's own components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError, Size
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.batching.own_sizes import LengthStep, PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.objectives import Denoising, DiffusionForcing, Objective, sample_generator
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import families, find_family, find_recipe, recipe_of, recipes
from hf_bucketing.packing import PackedBatch, packed_forward
from tests.models.families import RECIPES
from tests.models.kin import FEW, KIN
from tests.models.recipe_cases import Drawn, RecipeCase, draw_conditions

FAST = ("wan-2.2-ti2v", "wan-vace", "flux2", "ltx2-in-context")
"""Recipes that are tried with conditions in every run of the tests; of others the slow ones try those of FEW."""
FIRST = {next((name for name in names if name in RECIPES and not RECIPES[name].needs_shown), None) for names in KIN}
"""A recipe of each kin that is tried without conditions: in `make test` those of FEW."""


def marks_of(name: str, shown: tuple[str, ...]) -> Any:
    if name in FAST and shown == RECIPES[name].shown[-1]:
        return ()
    if not shown and name in FIRST:
        return () if name in FEW else pytest.mark.slow
    return pytest.mark.slow if name in (*FAST, *FEW) else pytest.mark.every


RUNS = [
    pytest.param(
        case,
        shown,
        id="-".join([name, "+".join(shown)] if shown else [name]),
        marks=marks_of(name, shown),
    )
    for name, case in RECIPES.items()
    for shown in (*(() if case.needs_shown else ((),)), *case.shown)
]
each_recipe = pytest.mark.parametrize(("case", "shown"), RUNS)


@pytest.fixture
def folder_of(tiny_folder: Callable[[str], Path]) -> Callable[[RecipeCase], Path]:
    """Return the folder of a case's tiny pipeline."""
    return lambda case: tiny_folder(case.tiny)


def batch_of(case: RecipeCase, shown: Sequence[str], *, stacked: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = case.sizes[:1] * 2 if stacked else case.sizes
    pixels = [torch.rand(3, *size, generator=generator) * 2 - 1 for size in sizes]
    references = case.references[:1] * 2 if stacked else case.references
    drawn = [
        draw_conditions(shown, size, generator, references=shapes)
        for size, shapes in zip(sizes, references, strict=True)
    ]
    return {
        "pixel_values": torch.stack(pixels) if stacked else pixels,
        "caption": list(case.captions[: len(sizes)]),
        "fps": [8.0 if size[0] > 1 else 0.0 for size in sizes],
        "index": [3, 4, 5][: len(sizes)],
        "shown": {name: [sample[name] for sample in drawn] for name in shown},
    }


def drawn_noise(objective: Objective, index: int, shape: torch.Size) -> torch.Tensor:
    generator = sample_generator(seed=objective.seed, epoch=1, index=index)
    if isinstance(objective, Denoising):
        torch.randint(objective.posterior.num_timesteps, (1,), generator=generator)
    elif isinstance(objective, DiffusionForcing):
        objective._draw_sigmas(generator, tuple(shape[1:]))
    else:
        objective._draw_sigma(generator, tuple(shape[1:]))
    return torch.randn(shape, generator=generator)


def load(case: RecipeCase, folder: Path) -> Recipe:
    recipe = recipe_of(str(folder)).load(str(folder), max_sequence_length=case.max_sequence_length)
    recipe.transformer.eval()
    return recipe


def losses_by_hand(case: RecipeCase, recipe: Recipe, objective: Objective, batch: dict[str, Any]) -> list[float]:
    latents = media_of(recipe, batch)["latents"]
    noised = objective(latents, indices=batch["index"], epoch=1)
    timesteps = noised.timesteps if noised.frame_timesteps is None else noised.frame_timesteps
    losses = [
        case.loss(
            recipe.pipeline,
            Drawn(
                pixels=pixels,
                caption=batch["caption"][row],
                fps=batch["fps"][row] or 1.0,
                noise=drawn_noise(objective, batch["index"][row], latents[row].shape),
                timestep=timesteps[row],
                max_sequence_length=case.max_sequence_length,
                shown={name: values[row] for name, values in batch["shown"].items()},
                guidance=recipe.guidance,
            ),
        )
        for row, pixels in enumerate(batch["pixel_values"])
    ]
    return [float(loss) for loss in losses]


@each_recipe
@torch.no_grad()
def test_the_loss_is_the_one_by_hand(case: RecipeCase, shown: tuple[str, ...], folder_of, monkeypatch) -> None:
    recipe = load(case, folder_of(case))
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    check_losses(BucketStep(recipe=recipe, objective=objective), batch_of(case, shown, stacked=True), case)
    batch, lengths = batch_of(case, shown, stacked=False), record_text_lengths(monkeypatch)
    by_hand = losses_by_hand(case, recipe, objective, batch)
    packing = enable_packing(recipe.transformer, strip_length=8)
    check_losses(PackStep(recipe=recipe, objective=objective, packing=packing), batch, case, by_hand=by_hand)
    check_losses(LengthStep(recipe=recipe, objective=objective, packing=packing), batch, case, by_hand=by_hand)
    if recipe.family.text.in_sequence:
        shown = [[Size(*pixels.shape[1:]) for pixels in own] for own in batch["shown"].get("reference", ())]
        pictures = max((recipe.reference_text(sizes, recipe.spec) for sizes in shown), default=0)
        counted = recipe.text_tokens(recipe.max_sequence_length) + pictures
        assert max(lengths) <= counted, "max_tokens counts the text"


def check_losses(step: Step, batch: dict[str, Any], case: RecipeCase, *, by_hand: Sequence[float] = ()) -> None:
    """Check that a step has the losses by hand, which are computed here where the model is not packed."""
    expected = by_hand or losses_by_hand(case, step.recipe, step.objective, batch)
    losses = step(step.recipe.transformer, batch, epoch=1).values
    assert losses.tolist() == pytest.approx(expected, abs=case.tolerance, rel=case.tolerance)


def test_every_recipe_belongs_to_one_kin() -> None:
    assert sorted(name for names in KIN for name in names) == sorted(RECIPES)


@pytest.mark.cases(fast=("flux",), slow=("*",))
@pytest.mark.parametrize("name", ["flux", "flux-control", "flux2", "hunyuan-video", "hunyuan-image"])
@torch.no_grad()
def test_the_guidance_reaches_models_that_embed_it_as_their_pipelines_pass_it(name: str, folder_of) -> None:
    case = RECIPES[name]
    recipe = load(case, folder_of(case))
    assert recipe.guided(None) is recipe
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    losses = {}
    for scale in (1.0, 3.5):
        guided = recipe.guided(scale)
        for batching in ("bucket", "pack"):
            batch = batch_of(case, case.shown[-1] if case.needs_shown else (), stacked=batching == "bucket")
            by_hand = losses_by_hand(case, guided, objective, batch)
            step: Step = BucketStep(recipe=guided, objective=objective)
            if batching == "pack":
                packing = enable_packing(recipe.transformer, strip_length=8)
                step = PackStep(recipe=guided, objective=objective, packing=packing)
            losses[scale, batching] = step(recipe.transformer, batch, epoch=1).values.tolist()
            if batching == "pack":
                disable_packing(recipe.transformer)
            assert losses[scale, batching] == pytest.approx(by_hand, abs=case.tolerance, rel=case.tolerance)
    for batching in ("bucket", "pack"):
        assert losses[1.0, batching] != pytest.approx(losses[3.5, batching], rel=1e-5), "the scale makes a difference"


@pytest.mark.parametrize(("name", "model"), [
    ("wan", "WanTransformer3DModel"), ("chroma", "ChromaTransformer2DModel"),
    ("flux2-klein", "Flux2Transformer2DModel"), ("qwen-image", "QwenImageTransformer2DModel"),
])  # fmt: skip
def test_models_that_embed_no_guidance_refuse_it_by_name(name: str, model: str, folder_of) -> None:
    recipe = load(RECIPES[name], folder_of(RECIPES[name]))
    with pytest.raises(BucketingError, match=f"`guidance` is the scale .* this {model} embeds none"):
        recipe.guided(1.0)


def record_text_lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the tokens that stand beside each sample of a pack in its sequence."""
    lengths: list[int] = []

    def record(transformer: Any, pack: PackedBatch) -> torch.Tensor:
        lengths.extend(pack.layout.text_lengths)
        return packed_forward(transformer, pack)

    monkeypatch.setattr("hf_bucketing.batching.own_sizes.packed_forward", record)
    return lengths


@pytest.mark.slow
def test_every_recipe_has_a_case(folder_of) -> None:
    assert {recipe_of(str(folder_of(case))).pipeline_class for case in RECIPES.values()} == set(recipes())


def test_a_recipe_and_a_family_are_found_by_the_name_of_their_class() -> None:
    """Only the modules whose text names the class are imported for that."""
    assert {name: find_recipe(name) for name in recipes()} == recipes()
    assert {name: find_family(name) for name in families()} == families()
    assert find_recipe("NoPipeline") is find_family("NoModel") is None
