"""Bria 3.2: as Flux, without a pooled text; timesteps up to 1000, and padding of texts as zeros."""

from __future__ import annotations

from typing import Any

from ...packing.batch import Rows
from ...packing.texts import TextTokens
from ..flux.packing import FluxFamily


class BriaFamily(FluxFamily):
    """Packing of `BriaTransformer2DModel`; see [`FluxFamily`]."""

    transformer_class = "BriaTransformer2DModel"
    tested_forwards = ("8c30c4b17198",)
    stock_processors = ("BriaAttnProcessor",)
    text = TextTokens(rows="slots", channels="joint_attention_dim", padding="keep_padding")
    attention_kwargs = "attention_kwargs"
    original_names = None
    max_references = 0

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the scheduler's timesteps, as the pipeline passes them."""
        return {**super().inputs(rows), "timestep": rows.timesteps}


FAMILY = BriaFamily()
