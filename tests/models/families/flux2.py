"""Flux.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2Pipeline, Flux2Transformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase


def make_flux2(**config: Any) -> Flux2Transformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return Flux2Transformer2DModel(**{**settings, **config})


def flux2_call(
    model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    """Call the model on `(1, C, h, w)` as the pipelines do."""
    blocks = Flux2Pipeline._patchify_latents(latents)
    ids = Flux2Pipeline._prepare_latent_ids(blocks)
    output = model(
        hidden_states=Flux2Pipeline._pack_latents(blocks),
        encoder_hidden_states=text,
        timestep=timestep / 1000,
        img_ids=ids,
        txt_ids=Flux2Pipeline._prepare_text_ids(text),
        **conditioning,
    ).sample
    return Flux2Pipeline._unpatchify_latents(Flux2Pipeline._unpack_latents_with_ids(output, ids))


def flux2_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    kwargs = {name: values[None] for name, values in conditioning.items()}
    return flux2_call(model, latent[None, :, 0], timestep[None], text[None], **kwargs)[0][:, None]


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    blocks = pipeline._encode_vae_image(drawn.pixels[None, :, 0], generator=None)
    clean, noise, sigma = pipeline._unpatchify_latents(blocks), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, _ = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    guidance = {"guidance": torch.tensor([drawn.guidance])} if isinstance(pipeline, Flux2Pipeline) else {}
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = flux2_call(pipeline.transformer, noisy, drawn.timestep[None], embeds, **guidance)
    return (velocity - (noise - clean)).square().mean()


CASES = {
    "flux.2": FamilyCase(
        make=make_flux2,
        alone=flux2_alone,
        sizes=IMAGE_SIZES,
        conditioning=lambda draw, count: {"guidance": 4 + draw(count)},
    )
}
RENDER = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64}
RECIPES = {
    tiny: RecipeCase(tiny=tiny, loss=text_to_image_loss, sizes=IMAGES, render=RENDER)
    for tiny in ("flux2", "flux2-klein")
}
