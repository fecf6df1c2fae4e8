"""HunyuanImage 2.1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import HunyuanImageTransformer2DModel

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase


def make(**config: Any) -> HunyuanImageTransformer2DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "text_embed_2_dim": 12,
        "rope_axes_dim": (8, 8),
    }
    return HunyuanImageTransformer2DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    padding = 3
    output = model(
        hidden_states=latent[:, 0][None],
        timestep=timestep[None].to(latent.dtype),
        encoder_hidden_states=torch.cat([text, 7 * torch.ones(padding, text.shape[1]).to(text)])[None],
        encoder_attention_mask=torch.tensor([[1] * len(text) + [0] * padding]),
        **{name: values[None] for name, values in conditioning.items()},
    ).sample
    return output[0][:, None]


def glyphs(draw: Callable[..., torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0, 5, 2, 0, 1, 3])[:count, None]
    return {
        "encoder_hidden_states_2": draw(count, 5, 12),
        "encoder_attention_mask_2": (torch.arange(5) < lengths).long(),
    }


CASES = {
    "hunyuan-image": FamilyCase(make=make, alone=alone, sizes=IMAGE_SIZES, empty_text=False, conditioning=glyphs),
}
CASES["hunyuan-image distilled"] = replace(
    CASES["hunyuan-image"],
    make=partial(make, text_embed_2_dim=None, guidance_embeds=True, use_meanflow=True, patch_size=(2, 2)),
    conditioning=lambda draw, count: {"guidance": 1000 * (3 + draw(count)), "timestep_r": 100 + 10 * draw(count)},
)


@torch.no_grad()
def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    latent = pipeline.vae.encode(drawn.pixels[None, :, 0]).latent_dist.mode()
    clean, noise, sigma = latent * pipeline.vae.config.scaling_factor, drawn.noise[None, :, 0], drawn.timestep / 1000
    pipeline.tokenizer_max_length = drawn.max_sequence_length
    embeds, mask, glyph_embeds, glyph_mask = pipeline.encode_prompt(drawn.caption)
    output = pipeline.transformer(
        hidden_states=(1 - sigma) * clean + sigma * noise,
        timestep=drawn.timestep[None],
        guidance=torch.tensor([drawn.guidance]) * 1000.0,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyph_embeds,
        encoder_attention_mask_2=glyph_mask,
    ).sample
    return (output - (noise - clean)).square().mean()


RECIPES = {
    "hunyuan-image": RecipeCase(
        tiny="hunyuan-image",
        loss=text_to_image_loss,
        sizes=IMAGES,
        max_tokens=512,
        render={"num_inference_steps": 2},
    )
}
