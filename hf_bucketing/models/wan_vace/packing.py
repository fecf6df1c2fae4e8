"""How Wan VACE is packed: as Wan; the control video is cut into strips as the latents are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...packing.batch import Rows
from ...packing.family import Draw, Transformer
from ..wan.packing import WanFamily

CONTROL = "control_hidden_states"
SCALE = "control_hidden_states_scale"


class WanVACEFamily(WanFamily):
    """Packing of `WanVACETransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    Beside what Wan takes, it takes `control_hidden_states`, a sequence of `(vace_in_channels, frames, height, width)`
    of the latents' sizes, and `control_hidden_states_scale`, `(n, control layers)`, which is 1 in training. Its
    pipeline adds latent frames for reference images in front of both.
    """

    transformer_class = "WanVACETransformer3DModel"
    tested_forwards = ("760359164852",)
    timesteps_per = "row"
    original_names = None  # diffusers reads no adapters of its control blocks from other names
    cast_inputs = (*WanFamily.cast_inputs, CONTROL, SCALE)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return also the control video and its scale."""
        channels, layers = transformer.config.vace_in_channels, len(transformer.config.vace_layers)
        return {
            **super().conditioning(transformer),
            CONTROL: lambda grids: self.draw_latents(transformer, grids, channels=channels),
            SCALE: lambda grids: 0.5 + torch.rand(len(grids), layers),
        }

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the arguments of the forward; the scale comes as a factor of each row's tokens, by layer."""
        kwargs = super().inputs(rows)
        # The stock forward unbinds the first dimension, and multiplies (rows, tokens, dim) by each part.
        return {**kwargs, SCALE: kwargs[SCALE].T[:, :, None, None].to(rows.latents)}


FAMILY = WanVACEFamily()
