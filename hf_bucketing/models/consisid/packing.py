"""How ConsisID is packed: as CogVideoX, with a face to which the tokens of each sample attend between blocks.

The layers that attend to the face work per batch row, and a strip belongs to one sample. So each strip gets the face
of its sample, which is embedded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...devices import to_device
from ...packing.batch import PackedBatch, Rows
from ...packing.context import active_layout
from ...packing.family import Draw, Transformer
from ...packing.names import Grid
from ..cogvideox.packing import CogVideoXFamily

IDENTITY = "id_cond"
FEATURES = "id_vit_hidden"
FEATURE_TOKENS = 577
"""Tokens of each of the layers that the model sees of its image encoder: 24×24 patches of 14 pixels, and one more."""


class ConsisIDFamily(CogVideoXFamily):
    """Packing of `ConsisIDTransformer3DModel`; see [`CogVideoXFamily`].

    Models with `is_train_face` take two inputs more: `id_cond`, `(n, LFE_id_dim)`, and `id_vit_hidden`, `(n,
    LFE_num_scale, tokens, LFE_vit_dim)`, the tensors of the pipeline's list stacked.
    """

    transformer_class = "ConsisIDTransformer3DModel"
    tested_forwards = ("576b0990a76f",)

    def conditioning(self, transformer: Transformer) -> Mapping[str, Draw]:
        """Return the embeddings of faces, where the model takes them."""
        config = transformer.config
        if not config.is_train_face:
            return {}
        layers = config.LFE_num_scale, FEATURE_TOKENS, config.LFE_vit_dim
        return {
            IDENTITY: lambda grids: torch.randn(len(grids), config.LFE_id_dim),
            FEATURES: lambda grids: torch.randn(len(grids), *layers),
        }

    def rows(self, batch: PackedBatch) -> Rows:
        """Return the faces with a row per sample, not per strip."""
        faces = {name: to_device(values, batch.strips.device) for name, values in batch.conditioning.items()}
        return replace(super().rows(replace(batch, conditioning={})), conditioning=faces)

    def inputs(self, rows: Rows) -> dict[str, Any]:
        """Return the features of faces as a list, as the pipeline passes them."""
        inputs = super().inputs(rows)
        return {**inputs, FEATURES: list(inputs[FEATURES].unbind(1))} if FEATURES in inputs else inputs

    def hook_positions(self, transformer: Transformer, base_size: Grid | None) -> list[Any]:
        """Also give each strip the embedded face of its sample."""
        handles = super().hook_positions(transformer, base_size)
        if transformer.config.is_train_face:
            handles.append(transformer.local_facial_extractor.register_forward_hook(_face_of_each_strip))
        return handles


def _face_of_each_strip(extractor: Any, args: tuple[Any, ...], faces: torch.Tensor) -> torch.Tensor:
    """Repeat embedded faces, `(n, tokens, dim)`, for the strips of their samples."""
    return faces[active_layout().strip_segments]


FAMILY = ConsisIDFamily()
