"""LongCat-Image."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import LongCatImagePipeline, LongCatImageTransformer2DModel
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image

TEXT_LENGTH = 512


def make(**config: Any) -> LongCatImageTransformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return LongCatImageTransformer2DModel(**{**settings, **config})


def call(model: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Call the model on `(1, C, h, w)` as the pipeline does."""
    _, channels, height, width = latents.shape
    output = model(
        hidden_states=LongCatImagePipeline._pack_latents(latents, 1, channels, height, width),
        timestep=timestep[None] / 1000,
        guidance=None,
        encoder_hidden_states=text,
        txt_ids=prepare_pos_ids(num_token=text.shape[1]),
        img_ids=prepare_pos_ids(1, "image", (TEXT_LENGTH, TEXT_LENGTH), height=height // 2, width=width // 2),
    ).sample
    return LongCatImagePipeline._unpack_latents(output, 8 * height, 8 * width, 8)


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return call(model, latent.transpose(0, 1), timestep, text[None]).transpose(0, 1)


CASES = {
    "longcat-image": FamilyCase(
        make=make,
        alone=alone,
        sizes=IMAGE_SIZES,
        text_lengths=(TEXT_LENGTH,) * len(IMAGE_SIZES),
        empty_text=False,
    )
}


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, _ = pipeline.encode_prompt(drawn.caption)
    velocity = call(pipeline.transformer, (1 - sigma) * clean + sigma * noise, drawn.timestep, embeds)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "longcat-image": RecipeCase(
        tiny="longcat-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        max_sequence_length=TEXT_LENGTH,
        max_tokens=2048,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "enable_prompt_rewrite": False},
        components={"text_processor": None},
    )
}
