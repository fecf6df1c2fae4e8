"""HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import HunyuanVideo15Transformer3DModel
from PIL import Image

from tests.models.cases import FamilyCase
from tests.models.recipe_cases import FIRST_FRAME, Drawn, RecipeCase


def make_model(**config: Any) -> HunyuanVideo15Transformer3DModel:
    settings = {
        "in_channels": 7,
        "out_channels": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_refiner_layers": 2,
        "text_embed_dim": 16,
        "text_embed_2_dim": 12,
        "image_embed_dim": 10,
        "rope_axes_dim": (4, 6, 6),
    }
    return HunyuanVideo15Transformer3DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    """Run a sample with padded text and its mask, as the pipeline does."""
    rest = {name: values[None] for name, values in conditioning.items()}
    mask = (torch.arange(9) < len(text)).to(text.dtype)
    padded = F.pad(text, (0, 0, 0, 9 - len(text)), value=3.0)
    return model(latent[None], timestep[None].to(latent.dtype), padded[None], mask[None], **rest).sample[0]


def conditioning(draw: Callable[..., torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Draw glyphs of 0, 2, 4 … tokens, and an image for every other sample."""
    glyphs = torch.tensor([(sample * 2) % 5 for sample in range(count)])
    image = draw(count, 6, 10) * (torch.arange(count) % 2).view(-1, 1, 1)
    return {
        "encoder_hidden_states_2": draw(count, 5, 12),
        "encoder_attention_mask_2": (torch.arange(5) < glyphs[:, None]).to(image.dtype),
        "image_embeds": image,
    }


MIXED = FamilyCase(
    make=make_model,
    alone=alone,
    sizes=((3, 2, 3), (1, 4, 2), (5, 3, 3), (1, 1, 1), (3, 2, 3), (1, 5, 3)),
    channels=7,
    out_channels=3,
    empty_text=False,
    conditioning=conditioning,
    # the last block's text goes nowhere
    without_gradient=("1.attn.to_add_out", "1.attn.add_q_proj", "1.attn.norm_added_q", "1.ff_context"),
)

CASES = {"hunyuan-1.5": MIXED}


@torch.no_grad()
def loss(pipeline: Any, drawn: Drawn, *, first_frame: bool) -> torch.Tensor:
    vae, sigma, noise = pipeline.vae, drawn.timestep / 1000, drawn.noise[None]
    pipeline.tokenizer_max_length = drawn.max_sequence_length
    clean = vae.encode(drawn.pixels[None]).latent_dist.mode() * vae.config.scaling_factor
    embeds, mask, glyphs, glyph_mask = pipeline.encode_prompt(drawn.caption)
    if first_frame:
        shown = (drawn.first[:, 0] + 1) / 2
        picture = Image.fromarray((shown * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
        image = pipeline.encode_image(picture, batch_size=1, device="cpu", dtype=torch.float32)
        size = {"height": picture.height, "width": picture.width}
        options = {"dtype": torch.float32, "device": "cpu", **size}
        condition, given = pipeline.prepare_cond_latents_and_mask(noise, shown[None], 1, **options)
    else:
        image = torch.zeros(1, pipeline.vision_num_semantic_tokens, pipeline.vision_states_dim)
        condition, given = pipeline.prepare_cond_latents_and_mask(noise, torch.float32, "cpu")
    output = pipeline.transformer(
        hidden_states=torch.cat([(1 - sigma) * clean + sigma * noise, condition, given], dim=1),
        image_embeds=image,
        timestep=drawn.timestep[None],
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=glyph_mask,
    ).sample
    return (output - (noise - clean)).square().mean()


SIZES = ((5, 32, 48), (1, 32, 32), (9, 48, 32))
RENDER = {"num_inference_steps": 2, "num_frames": 5}
MAX_TOKENS = 4096
"""Those of three samples, whose texts and images have more than a thousand each."""

RECIPES = {
    "hunyuan-video-1.5": RecipeCase(
        tiny="hunyuan-video-1.5",
        loss=partial(loss, first_frame=False),
        sizes=SIZES,
        render=RENDER,
        max_tokens=MAX_TOKENS,
    ),
    "hunyuan-video-1.5-image": RecipeCase(
        tiny="hunyuan-video-1.5-image",
        loss=partial(loss, first_frame=True),
        shown=FIRST_FRAME,
        sizes=SIZES,
        render=RENDER,
        max_tokens=MAX_TOKENS,
    ),
}
