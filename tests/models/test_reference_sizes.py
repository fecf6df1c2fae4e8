"""References as they are shown, compared with what the stock pipelines give their VAE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from hf_bucketing import Size
from hf_bucketing.conditions.references import RowReferences
from hf_bucketing.media import MediaSource
from hf_bucketing.media.sample import load_references
from hf_bucketing.models.index import read_index
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of, recipes
from tests.models.kin import one_per_kin

pytestmark = pytest.mark.usefixtures("files_anywhere")

SIDES = {
    "odd": (150, 100),
    "long": (96, 333),
    "whole": (128, 96),
    "large": (1301, 1700),
    "larger": (2101, 2083),
}
"""Height and width of stored pictures."""


SIZE = Size(1, 64, 96)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline that takes references.

    Args:
        samples: References of each sample, by their names, in the order of the call.
        size: Size of each sample.
        options: Arguments of the pipeline's call.
        shown: What each sample is shown beside references.
        downscale_factor: How many times larger it is than references that lie over it.
        order: −1 where the recipe encodes references from the last to the first.
    """

    samples: tuple[tuple[str, ...], ...]
    size: Size = SIZE
    options: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    downscale_factor: int | None = None
    order: int = 1


ALL = ("odd", "long", "whole", "large")
CASES = {
    "flux2": Case(samples=(("odd",), ALL)),
    "flux2-klein": Case(samples=(("odd", "large"),)),
    "flux2-klein-kv": Case(samples=(("odd", "large"),)),
    "flux3": Case(samples=(("odd",), ("long",), ("whole",), ("larger",), ALL)),
    "flux-kontext": Case(samples=(("odd",), ("long",), ("large",)), options={"_auto_resize": True}),
    "qwen-image-edit": Case(samples=(("odd",), ("large",))),
    "qwen-image-edit-2509": Case(samples=(ALL,)),
    "qwen-image-2.1": Case(samples=(ALL,), options={"output_resolution": 1024}),
    "minimax-h3": Case(samples=(ALL,), size=Size(22, 64, 96)),
    "ltx2-in-context": Case(samples=(("odd",),), size=Size(1, 96, 64), downscale_factor=1),
    "wan-vace": Case(samples=(("odd",), ALL), size=Size(17, 64, 96), order=-1),
    "wan-animate": Case(samples=(("odd",), ("large",)), size=Size(5, 64, 96), shown=("control", "face")),
    "wan-animate-2": Case(samples=(("odd",),), size=Size(5, 96, 64), shown=("control",)),
}
WITHOUT_CALL = {"LTXPipeline", "LTXConditionPipeline"}
"""Pipelines that take no references in diffusers."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pictures of coarse noise, in which neither a crop nor a filter goes unseen."""
    folder, draws = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    made = {}
    for name, (height, width) in SIDES.items():
        noise = Image.fromarray(draws.integers(0, 256, (height // 3, width // 3, 3), np.uint8))
        made[name] = folder / f"{name}.png"
        noise.resize((width, height), Image.Resampling.BILINEAR).save(made[name], compress_level=1)
    return made


class _Ended(Exception):  # noqa: N818
    """Ends the call of a pipeline."""


@contextmanager
def recorded_encoding(pipeline: Any) -> Iterator[list[torch.Tensor]]:
    """Let the VAE of a pipeline encode to zeros, end calls at the transformer, and collect what the VAE is given."""
    given: list[torch.Tensor] = []
    encode = pipeline.vae.encode

    def zeros(pixels: torch.Tensor, return_dict: bool = True) -> Any:
        given.append(pixels)
        small = encode(pixels[..., :64, :64]).latent_dist.mode()
        sides = [side * few // 64 for side, few in zip(pixels.shape[-2:], small.shape[-2:], strict=True)]
        latents = small.new_zeros(*small.shape[:-2], *sides)
        sampled = SimpleNamespace(sample=lambda generator=None: latents, mode=lambda: latents)
        return SimpleNamespace(latent_dist=sampled) if return_dict else (sampled,)

    def end(*args: Any) -> None:
        raise _Ended

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pipeline.vae, "encode", zeros))
        for name, part in pipeline.components.items():
            if name.startswith("transformer") and part is not None:
                stack.callback(part.register_forward_pre_hook(end).remove)
        yield given


@torch.no_grad()
def encoded_by_pipeline(recipe: Recipe, case: Case, opened: Sequence[Image.Image]) -> list[torch.Tensor]:
    size = recipe.size_arguments(case.size)
    blank = [Image.new("RGB", (case.size.width, case.size.height))] * case.size.frames
    shown = recipe.shown_arguments(dict.fromkeys(case.shown, blank)) if case.shown else {}
    references = recipe.reference_arguments([[picture] for picture in opened], case.size)
    references = {name: value for name, value in references.items() if name not in case.options}
    with recorded_encoding(recipe.pipeline) as given, pytest.raises(_Ended):
        recipe.pipeline(prompt="a", num_inference_steps=2, **size, **shown, **references, **case.options)
    return given


@torch.no_grad()
def encoded_by_recipe(recipe: Recipe, case: Case, loaded: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    pixels = torch.zeros(1, 3, *case.size)
    shown = {name: [pixels[0]] for name in case.shown}
    with recorded_encoding(recipe.pipeline) as given:
        if recipe.reference_condition().in_front:
            recipe.encode_media(pixels, {**shown, "reference": [loaded]})
        else:
            for reference in loaded:
                recipe.encode_reference(reference)
    return given


def of_references(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pictures `(C, h, w)` among what a VAE is given, without blank ones."""
    flat = [
        pixels[0] if pixels.ndim == 4 else pixels[0, :, 0]
        for pixels in given
        if pixels.ndim == 4 or pixels.shape[2] == 1
    ]
    return [picture for picture in flat if picture.std() > 0.05]


@pytest.mark.slow
@pytest.mark.parametrize("tiny", one_per_kin(CASES, few=True))
def test_the_vae_is_given_what_the_pipeline_gives_it(
    tiny: str, tiny_folder: Callable[[str], Path], files: dict[str, Path]
) -> None:
    case, folder = CASES[tiny], str(tiny_folder(tiny))
    kind = recipe_of(folder)
    recipe = kind.load(folder, trained=kind.transformer_for(("reference", *case.shown)))
    recipe.pipeline.set_progress_bar_config(disable=True)
    rule = kind.reference_rule(read_index(folder).settings, recipe.trained).in_pixels(recipe.spec.multiples)
    rule = rule.within(None, case.downscale_factor)
    for names in case.samples:
        opened = [Image.open(files[name]) for name in names]
        expected = of_references(encoded_by_pipeline(recipe, case, opened))
        sources = [MediaSource.from_cell(str(files[name])) for name in names]
        loaded = load_references(sources, case.size, rule, fps=8.0 if case.size.frames > 1 else 0.0)
        given = of_references(encoded_by_recipe(recipe, case, loaded))
        assert len(given) == len(expected) == len(names)
        for ours, theirs in zip(given[:: case.order], expected, strict=True):
            assert torch.equal(ours, theirs), (names, ours.shape, theirs.shape)
        own = sum(recipe.spec.num_tokens(Size(1, *picture.shape[1:])) for picture in expected)
        text = rule.text_tokens * len(names) + rule.text_factor * own
        stored = [side for name in names for side in (1, *SIDES[name])]
        counted = RowReferences.of_lists([stored], rule=rule.counted).num_tokens([case.size], spec=recipe.spec)
        assert counted.tolist() == [own + text]


def test_all_recipes_with_references_are_compared(tiny_folder: Callable[[str], Path]) -> None:
    compared = {recipe_of(str(tiny_folder(tiny))).pipeline_class for tiny in CASES}
    assert compared | WITHOUT_CALL == {name for name, kind in recipes().items() if kind.reference_condition().most}
