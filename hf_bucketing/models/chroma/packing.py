"""How Chroma is packed: as Flux, with modulation made from the timestep alone and a text that is masked.

Pass text with the mask that the pipeline's `encode_prompt` returns, which keeps one token of the padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...packing.batch import Rows
from ..flux.packing import FluxFamily


class ChromaFamily(FluxFamily):
    """Packing of `ChromaTransformer2DModel`; see [`Family`][hf_bucketing.packing.family.Family]."""

    transformer_class = "ChromaTransformer2DModel"
    tested_forwards = ("3cdf1b3fa10c",)
    text = replace(FluxFamily.text, padding="masked")
    max_references = 0  # no pipeline of Chroma places any

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Add the mask of text and tokens, if there is one.

        It is boolean. The pipeline of diffusers 0.42 passes numbers, which attention adds to its scores, so that
        padding takes part after all (huggingface/diffusers#12116); the model was trained with padding masked.
        """
        inputs = super().inputs(rows)
        if rows.text_mask is None:
            return inputs
        tokens = rows.text_mask.new_ones(inputs["hidden_states"].shape[:2])
        return {**inputs, "attention_mask": torch.cat([rows.text_mask, tokens], 1).bool()}


FAMILY = ChromaFamily()
