"""The model families that packing knows: one small recipe each, by the name of the transformer class."""

from __future__ import annotations

import torch

from ..errors import PackingError
from ..packing.family import Family
from ..packing.joint_family import JointFamily
from .allegro import AllegroFamily
from .cogvideox import CogVideoXFamily
from .cosmos import CosmosFamily
from .flux import FluxFamily
from .hunyuan_video import HunyuanVideoFamily
from .latte.packing import LatteFamily
from .ltx.packing import LTXFamily
from .pixart import PixArtFamily
from .sd3 import SD3Family
from .wan.packing import WanFamily

FAMILIES: dict[str, Family] = {
    "AllegroTransformer3DModel": AllegroFamily(),
    "CogVideoXTransformer3DModel": CogVideoXFamily(),
    "CosmosTransformer3DModel": CosmosFamily(),
    "FluxTransformer2DModel": FluxFamily(),
    "HunyuanVideoTransformer3DModel": HunyuanVideoFamily(),
    "LTXVideoTransformer3DModel": LTXFamily(),
    "LatteTransformer3DModel": LatteFamily(),
    "PixArtTransformer2DModel": PixArtFamily(),
    "SD3Transformer2DModel": SD3Family(),
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


__all__ = ["FAMILIES", "Family", "JointFamily", "family_of"]
