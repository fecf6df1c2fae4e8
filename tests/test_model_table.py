"""The tables of models in README and in docs/models: each cell is a row of a test that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import diffusers
import pytest
from packaging.version import Version

from hf_bucketing.adapters.files import loads_lora
from hf_bucketing.conditions.audio import AUDIO
from hf_bucketing.conditions.names import CONDITIONS
from hf_bucketing.models.compilation import refusal
from hf_bucketing.models.registry import OTHER_KINDS, UNPACKABLE, families, recipes
from tests.conftest import ROOT


class Model(NamedTuple):
    """What the cases of a family show; the suites of families and of recipes have one for each cell."""

    title: str
    trains: bool
    adapters: bool
    formats: str
    images: bool
    compiles: bool
    conditions: list[str]
    pipelines: list[str]


def models() -> Iterator[Model]:
    """Yield the families that pack, by title."""
    for name, family in sorted(families().items(), key=lambda item: title(item[0]).lower()):
        own = [recipe for recipe in recipes().values() if recipe.family.transformer_class == name]
        adapters = any(loads_lora(recipe.pipeline_type()) for recipe in own)
        formats = "diffusers" if family.original_names is None else "diffusers, ComfyUI"
        yield Model(
            title=title(name),
            trains=bool(own),
            adapters=adapters,
            formats=formats if adapters else "–",
            images=any(recipe.takes_image for recipe in own),
            compiles=refusal(getattr(diffusers, name)) is None,
            conditions=[
                name for name in (*CONDITIONS, AUDIO) if any(name in recipe.taken_conditions() for recipe in own)
            ],
            pipelines=sorted(recipe.pipeline_class.removesuffix("Pipeline") for recipe in own),
        )


def title(name: str) -> str:
    return families()[name].title


def refused() -> str:
    return ", ".join(name.split("Transformer")[0].removesuffix("Image") for name in sorted(UNPACKABLE, key=str.lower))


def written(cell: bool | str | Sequence[str]) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "–"
    return cell if isinstance(cell, str) else ", ".join(cell)


def table(titles: Sequence[str], rows: Sequence[Sequence[bool | str | Sequence[str]]]) -> str:
    lines = [f"| {' | '.join(titles)} |", f"{'|---' * len(titles)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(written, row))} |" for row in rows)]) + "\n"


def full_table() -> str:
    """Return the table of docs/models/index.md."""
    rows = [
        (
            model.title,
            True,
            model.trains,
            model.trains,
            model.formats,
            model.images,
            model.compiles,
            model.conditions,
            model.pipelines,
        )
        for model in models()
    ]
    titles = (
        "model",
        "packs",
        "trains in buckets",
        "in packs",
        "LoRA for",
        "image-to-video",
        "compiles",
        "conditions",
        "pipelines",
    )
    return table(titles, [*rows, (refused(), "refused", "–", "–", "–", "–", "–", "", "")])


def compact_table() -> str:
    """Return the table of README: the models that train, by what they train, with the conditions of some."""
    groups: dict[tuple[bool, bool], list[str]] = {}
    for model in (model for model in models() if model.trains):
        shown = [name for name in model.conditions if not name.endswith("_frame")]
        groups.setdefault((model.adapters, model.images), []).append(
            f"{model.title} ({', '.join(shown)})" if shown else model.title
        )
    rows = []
    for (adapters, images), titles in sorted(groups.items(), reverse=True):
        what = "LoRA or all weights" if adapters else "all weights"
        rows.append((f"{what}, also from images" if images else what, "; ".join(titles)))
    return table(("trains", "models (and conditions)"), rows)


@pytest.mark.parametrize(("page", "expected"), [("docs/models/index.md", full_table), ("README.md", compact_table)])
def test_the_tables_of_models_are_what_the_cases_show(page: str, expected: Callable[[], str]) -> None:
    assert expected() in (ROOT / page).read_text(), f"{page} should hold:\n{expected()}"


def test_the_compact_table_names_every_model_that_trains() -> None:
    cells = compact_table()
    assert all(model.title in cells for model in models() if model.trains)


def test_every_transformer_of_diffusers_packs_or_is_explained() -> None:
    exported = {name for name in dir(diffusers) if "Transformer" in name and name.endswith("Model")}
    packed, explained = families().keys(), [*UNPACKABLE, *OTHER_KINDS]
    assert len({*packed, *explained}) == len(packed) + len(explained), "each is packed, or explained once"
    unknown = sorted(exported - {*packed, *explained})
    assert not unknown, f"pack these, or say in models/registry.py why not: {unknown}"
    if Version(diffusers.__version__) >= Version("0.42.1"):
        assert {*packed, *explained} <= {*dir(diffusers)}
