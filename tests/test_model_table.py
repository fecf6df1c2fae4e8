"""README's table of models: each cell is a row of a test that runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from hf_bucketing.media.conditions import CONDITIONS
from hf_bucketing.models.registry import families, recipes
from hf_bucketing.models.unpackable import UNPACKABLE
from tests.conftest import ROOT

COLUMNS = ("model", "packs", "trains in buckets", "in packs", "LoRA", "image-to-video", "conditions", "pipelines")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def rows() -> Iterator[str]:
    """Yield the row of each family; the suites of families and of recipes have a case for each of its cells."""
    for name, family in sorted(families().items(), key=lambda item: title(item[0]).lower()):
        own = [recipe for recipe in recipes().values() if recipe.family is family]
        adapted = any(hasattr(recipe.pipeline_type(), "load_lora_weights") for recipe in own)
        trains, images = bool(own), any(recipe.takes_image for recipe in own)
        pipelines = sorted(recipe.pipeline_class.removesuffix("Pipeline") for recipe in own)
        cells = [
            "yes",
            *(("yes" if cell else "–") for cell in (trains, trains, adapted, images)),
            ", ".join(name for name in CONDITIONS if any(name in recipe.shown for recipe in own)),
            ", ".join(pipelines),
        ]
        yield f"| {title(name)} | {' | '.join(cells)} |\n"
    refused = ", ".join(
        name.split("Transformer")[0].removesuffix("Image") for name in sorted(UNPACKABLE, key=str.lower)
    )
    yield f"| {refused} | refused | – | – | – | – | | |\n"


def title(name: str) -> str:
    """Return the model's name, with which the docstring of its folder begins."""
    folder = type(families()[name]).__module__.rpartition(".")[0]
    return str(importlib.import_module(folder).__doc__).partition(":")[0].rstrip(".")


def test_the_table_of_models_is_what_the_cases_show() -> None:
    table = HEADER + "".join(rows())
    assert table in (ROOT / "README.md").read_text(), f"README.md should hold:\n{table}"
