"""Chroma."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.joint_models import flux_ids
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def make_chroma(**config: Any) -> ChromaTransformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 32,
        "approximator_layers": 2,
    }
    return ChromaTransformer2DModel(**{**settings, **config})


def chroma_alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    channels, _, height, width = latent.shape
    masked, tokens = 3, height * width // 4
    output = model(
        ChromaPipeline._pack_latents(latent.transpose(0, 1), 1, channels, height, width),
        encoder_hidden_states=torch.cat([text, text.new_full((masked, text.shape[1]), 7.0)])[None],
        timestep=timestep[None] / 1000,
        img_ids=flux_ids(latent),
        txt_ids=torch.zeros(len(text) + masked, 3),
        attention_mask=torch.tensor([[True] * len(text) + [False] * masked + [True] * tokens]),
    ).sample
    return ChromaPipeline._unpack_latents(output, 8 * height, 8 * width, 8).transpose(0, 1)


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    _, channels, height, width = clean.shape
    embeds, text_ids, mask, *_ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    assert int(mask.sum()) == len(drawn.caption) + 2  # its bytes, the end, and one token of the padding
    packed = pipeline._pack_latents((1 - sigma) * clean + sigma * noise, 1, channels, height, width)
    whole = pipeline._prepare_attention_mask(1, packed.shape[1], packed.dtype, attention_mask=mask)
    output = pipeline.transformer(
        hidden_states=packed,
        timestep=drawn.timestep[None] / 1000,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", clean.dtype),
        attention_mask=whole.bool(),  # the call passes numbers, which attention adds: diffusers issue 12116
    ).sample
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, 8)
    return (velocity - (noise - clean)).square().mean()


CASES = {"chroma": FamilyCase(make=make_chroma, alone=chroma_alone, sizes=IMAGE_SIZES)}
RECIPES = {
    "chroma": RecipeCase(
        tiny="chroma",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    )
}
