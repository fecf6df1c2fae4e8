"""ConsisID."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import ConsisIDTransformer3DModel
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline

from tests.models.cases import COGVIDEOX, FamilyCase
from tests.models.joint_models import COGVIDEOX_SETTINGS

FACE = {
    "LFE_id_dim": 12,
    "LFE_vit_dim": 8,
    "LFE_depth": 2,
    "LFE_num_scale": 2,
    "LFE_dim_head": 4,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 3,
    "LFE_ff_mult": 2,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
}


def make(**config: Any) -> ConsisIDTransformer3DModel:
    """Make a small model; a face's tokens have two thirds of its width."""
    settings = {**COGVIDEOX_SETTINGS, "num_attention_heads": 3, "is_train_face": True, "LFE_output_dim": 64, **FACE}
    return ConsisIDTransformer3DModel(**{**settings, **config})


class _PositionsOfThePipeline(ConsisIDPipeline):
    """The pipeline's own rotary positions, without its other components."""

    def __init__(self, transformer: ConsisIDTransformer3DModel) -> None:
        self.transformer, self.vae_scale_factor_spatial = transformer, 8


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **face: torch.Tensor
) -> torch.Tensor:
    """Run a sample as the pipeline does, with the layers of its face's features in a list."""
    options: dict[str, Any] = {}
    if face:
        options["id_cond"] = face["id_cond"][None]
        options["id_vit_hidden"] = [layer[None] for layer in face["id_vit_hidden"]]
    frames, height, width = latent.shape[1:]
    positions = _PositionsOfThePipeline(model)._prepare_rotary_positional_embeddings
    rotary = positions(8 * height, 8 * width, frames, latent.device)
    tensors = latent.transpose(0, 1)[None], text[None], timestep[None]
    return model(*tensors, image_rotary_emb=rotary, **options).sample[0].transpose(0, 1)


CONSISID = FamilyCase(
    make=make,
    alone=alone,
    sizes=COGVIDEOX.sizes,
    conditioning=lambda draw, count: {"id_cond": draw(count, 12), "id_vit_hidden": draw(count, 2, 5, 8)},
)
CASES = {
    "consisid": CONSISID,
    "consisid no face": FamilyCase(make=partial(make, is_train_face=False), alone=alone, sizes=COGVIDEOX.sizes),
}
