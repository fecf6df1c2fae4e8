"""The cases of every model family, each in a file of its own: `CASES` for packing, `RECIPES` for training."""

from __future__ import annotations

import pytest

from hf_bucketing.synthetic.pipelines import importable_modules
from tests.models import cases
from tests.models.cases import FamilyCase
from tests.models.recipe_cases import RecipeCase

_modules = importable_modules(__name__, __path__)

CASES: dict[str, FamilyCase] = {
    **cases.CASES,
    **{name: case for module in _modules for name, case in getattr(module, "CASES", {}).items()},
}
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.every if " " in name else ()) for name in CASES]
)
"""A test of all cases; those with other settings of a family, `FAMILY SETTINGS`, run with `-m every`."""
KIN = {
    "cogvideox": ("cogvideox-1.5", "cogvideox-learned", "cogvideox-sincos"),
    "cogview4": ("cogview3plus",),
    "flux": ("bria", "chroma", "longcat-image", "ovis-image"),
    "hunyuan": ("hunyuan-1.5", "hunyuan-image"),
    "ltx2": ("ltx2.3", "ltx2.5"),
    "sd3": ("sd3.5",),
    "wan": ("chronoedit", "skyreels-v2", "wan-vace"),
}
"""Cases whose families share most of their code with that of another."""
each_kin = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.every if " " in name or name in sum(KIN.values(), ()) else ())
        for name in CASES
    ],
)
"""A test of one case of each kin; the others run with `-m every`."""
RECIPES: dict[str, RecipeCase] = {
    name: case for module in _modules for name, case in getattr(module, "RECIPES", {}).items()
}
