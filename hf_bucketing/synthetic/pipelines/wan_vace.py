"""A pipeline of Wan VACE with small random weights."""

from __future__ import annotations

from diffusers import WanVACEPipeline, WanVACETransformer3DModel

from .components import CHANNELS
from .wan import TRANSFORMER, components

_MASK_CHANNELS = 8 * 8
"""Pixels of a mask for each latent pixel."""


def _pipeline() -> WanVACEPipeline:
    config = {"vace_layers": [0, 2], "vace_in_channels": 2 * CHANNELS + _MASK_CHANNELS}
    return WanVACEPipeline(**components(), transformer=WanVACETransformer3DModel(**TRANSFORMER, **config))


TINY = {"wan-vace": _pipeline}
