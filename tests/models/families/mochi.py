"""Mochi."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import MochiTransformer3DModel

from tests.models.cases import FamilyCase
from tests.models.recipe_cases import Drawn, RecipeCase


def make_model(**config: Any) -> MochiTransformer3DModel:
    """Make a model whose norms see tokens in one order of memory.

    The tokens of one frame reach the stock norms transposed, unlike those of several frames, and the sums in these
    norms are rounded to float32 in the order of the memory.
    """
    settings = {
        "in_channels": 4,
        "patch_size": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "pooled_projection_dim": 24,
        "text_embed_dim": 16,
        "time_embed_dim": 16,
    }
    model = MochiTransformer3DModel(**{**settings, **config})
    model.patch_embed.register_forward_hook(_in_order)
    return model


def _in_order(embed: Any, args: tuple[torch.Tensor, ...], tokens: torch.Tensor) -> torch.Tensor:
    return tokens.contiguous()


def alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Run a sample with padded text and its mask, as the pipeline does; its scheduler turns the output round."""
    mask = torch.arange(9) < len(text)
    padded = F.pad(text, (0, 0, 0, 9 - len(text)), value=3.0)
    output = model(
        hidden_states=latent[None],
        encoder_hidden_states=padded[None],
        timestep=1000 - timestep[None],
        encoder_attention_mask=mask[None],
    )
    return -output.sample[0]


CASES = {
    "mochi": FamilyCase(
        make=make_model,
        alone=alone,
        without_gradient=("2.attn1.add_q_proj", "2.attn1.norm_added_q"),  # the last block's text goes nowhere
    )
}


@torch.no_grad()
def loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Compare with data − noise at the time of the pipeline, which is 0 for noise and 1000 for data."""
    config, data = pipeline.vae.config, pipeline.vae.encode(drawn.pixels[None]).latent_dist.mode()
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    data, noise, time = (data - mean) / std * config.scaling_factor, drawn.noise[None], 1 - drawn.timestep / 1000
    embeds, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        hidden_states=time * data + (1 - time) * noise,
        encoder_hidden_states=embeds,
        timestep=1000 * time[None],
        encoder_attention_mask=mask,
    ).sample
    return (output - (data - noise)).square().mean()


RECIPES = {
    "mochi": RecipeCase(
        tiny="mochi",
        loss=loss,
        sizes=((7, 32, 48), (1, 32, 32), (13, 48, 32)),
        bucket_frames="1,7",
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 7, "max_sequence_length": 64},
    )
}
