"""The cases of every model family, each in a file of its own: `CASES` for packing, `RECIPES` for training."""

from __future__ import annotations

from collections.abc import Iterable

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
FEW = ("flux", "flux.2", "hunyuan", "ltx2", "minimax-h3", "qwen-image", "wan")
"""Cases of models that many train, or that differ most from others: those that `make test` runs."""
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
SETTINGS = {name for name in CASES if " " in name}
"""Cases with other settings of a family, called `FAMILY SETTINGS`."""


def _each(names: Iterable[str], *, every: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Return a test of cases: of few in `make test`, of others on every commit, and of some with `-m every` alone."""
    marks = dict.fromkeys(names, pytest.mark.slow) | dict.fromkeys(every, pytest.mark.every)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in FEW else mark) for name, mark in marks.items()]
    )


each_case = _each(CASES)
"""A test of all cases."""
each_family = _each(CASES, every=SETTINGS)
"""A test of all cases; those with other settings of a family run with `-m every`."""
each_kin = _each(CASES, every=SETTINGS.union(*KIN.values()))
"""A test of one case of each kin; the others run with `-m every`."""
RECIPES: dict[str, RecipeCase] = {
    name: case for module in _modules for name, case in getattr(module, "RECIPES", {}).items()
}
