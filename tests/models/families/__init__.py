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
RECIPES: dict[str, RecipeCase] = {
    name: case for module in _modules for name, case in getattr(module, "RECIPES", {}).items()
}
