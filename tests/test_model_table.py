"""README's table of models: each cell is a row of a test that runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from hf_bucketing.models.registry import families, recipes
from tests.conftest import ROOT

HEADER = (
    "| model | diffusers class | packs | trains in buckets and in packs | LoRA | image-to-video |\n"
    "|---|---|---|---|---|---|\n"
)


def rows() -> Iterator[str]:
    """Yield the row of each family; the suites of families and of recipes have a case for each of its cells."""
    for name, family in sorted(families().items(), key=lambda item: title(item[0]).lower()):
        own = [recipe for recipe in recipes().values() if recipe.family is family]
        names = sorted(recipe.pipeline_class for recipe in own if not recipe.takes_image)
        image = sorted(recipe.pipeline_class for recipe in own if recipe.takes_image)
        lora = sorted(recipe.pipeline_class for recipe in own if hasattr(recipe.pipeline_type(), "load_lora_weights"))
        cells = [
            title(name),
            f"`{name}`",
            "yes",
            ", ".join(f"`{one}`" for one in [*names, *image]) or "–",
            "yes" if lora else "–" if not own else "no",
            ", ".join(f"`{one}`" for one in image) or "–",
        ]
        yield "| " + " | ".join(cells) + " |\n"


def title(name: str) -> str:
    """Return the model's name, with which the docstring of its folder begins."""
    folder = type(families()[name]).__module__.rpartition(".")[0]
    return str(importlib.import_module(folder).__doc__).partition(":")[0]


def test_the_table_of_models_is_what_the_cases_show() -> None:
    table = HEADER + "".join(rows())
    assert table in (ROOT / "README.md").read_text(), f"README.md should hold:\n{table}"
