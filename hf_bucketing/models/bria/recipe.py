"""Bria 3.2 is packed, and its pipeline not trained."""

from __future__ import annotations

from ..recipe import Recipe

RECIPES: tuple[type[Recipe], ...] = ()
REFUSED = {
    "BriaPipeline": (
        "the pipeline reads its VAE and its transformer wherever it is made and encodes text, and a run loads neither "
        "where it does not call them"
    ),
}
