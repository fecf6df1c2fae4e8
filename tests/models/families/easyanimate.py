"""EasyAnimate 5.1."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import EasyAnimateTransformer3DModel

from hf_bucketing.models.families.cogvideox import EASYANIMATE_TEXT
from tests.models.cases import SIZES, FamilyCase
from tests.models.recipe_cases import Drawn, RecipeCase


def make(**config: Any) -> EasyAnimateTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "num_layers": 2,
        "mmdit_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "time_embed_dim": 24,
        "text_embed_dim": 16,
        "add_norm_text_encoder": True,
        "after_norm": True,
    }
    return EasyAnimateTransformer3DModel(**{**settings, **config})


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return model(latent[None], timestep[None], encoder_hidden_states=text[None]).sample[0]


# the last block's text goes nowhere
LAST = ("1.attn1.add_q_proj", "1.attn1.norm_added_q", "1.attn1.to_add_out", "1.txt_ff")
CASES = {
    "easyanimate": FamilyCase(
        make=make,
        alone=alone,
        text_lengths=(EASYANIMATE_TEXT,) * len(SIZES),
        empty_text=False,
        without_gradient=LAST,
    )
}


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode a clip to `(1, C, f, h, w)`, so that the pipeline's way of decoding it gives it back."""
    return pipeline.vae.encode(pixels[None]).latent_dist.mode() * pipeline.vae.config.scaling_factor


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    embeds, *_ = pipeline.encode_prompt(drawn.caption, do_classifier_free_guidance=False)
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = pipeline.transformer(noisy, drawn.timestep[None], encoder_hidden_states=embeds).sample
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "easyanimate": RecipeCase(
        tiny="easyanimate",
        loss=text_to_video_loss,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5},
        max_sequence_length=EASYANIMATE_TEXT,
        max_tokens=1024,
    )
}
