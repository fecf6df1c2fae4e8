"""The model families that packing knows: one small recipe each, by the name of the transformer class."""

from __future__ import annotations

import torch

from ...errors import PackingError
from .allegro import AllegroFamily
from .base import Family
from .cosmos import CosmosFamily
from .latte import LatteFamily
from .ltx import LTXFamily
from .pixart import PixArtFamily
from .wan import WanFamily

FAMILIES: dict[str, Family] = {
    "AllegroTransformer3DModel": AllegroFamily(),
    "CosmosTransformer3DModel": CosmosFamily(),
    "LTXVideoTransformer3DModel": LTXFamily(),
    "LatteTransformer3DModel": LatteFamily(),
    "PixArtTransformer2DModel": PixArtFamily(),
    "WanTransformer3DModel": WanFamily(),
}
"""Add a family by adding its recipe here."""


def family_of(transformer: torch.nn.Module) -> Family:
    """Return the recipe of a transformer's class or of the nearest one that it inherits from.

    Raises:
        PackingError: If packing does not know the family.
    """
    for cls in type(transformer).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    raise PackingError(
        f"Packing does not know {type(transformer).__name__}; it knows {', '.join(sorted(FAMILIES))}. "
        "Train this model with bucketed batches, which need nothing of it."
    )


__all__ = ["FAMILIES", "Family", "family_of"]
