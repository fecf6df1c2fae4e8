"""Kandinsky 6."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Kandinsky6Transformer3DModel

from tests.models.cases import VIDEO_SIZES, FamilyCase
from tests.models.recipe_cases import Drawn, RecipeCase


def in_float32(rotary: torch.nn.Module, args: tuple[Any, ...]) -> None:
    rotary.float()  # as in a loaded model; `to` would cast its buffers too


def make(**config: Any) -> Kandinsky6Transformer3DModel:
    settings = {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 16,
        "in_text_dim2": 20,
        "time_dim": 24,
        "model_dim": 32,
        "ff_dim": 48,
        "num_text_blocks": 2,
        "num_visual_blocks": 2,
        "axes_dims": (4, 6, 6),
        "in_audio_dim": 6,
        "out_audio_dim": 6,
        "ca_rope": True,
        "cross_gates": True,
        "fix_modulation": True,
    }
    model = Kandinsky6Transformer3DModel(**{**settings, **config})
    for rotary in (
        model.visual_rope_embeddings,
        model.audio_rope_embeddings,
        model.video_text_rope_embeddings,
        model.audio_text_rope_embeddings,
    ):
        rotary.register_forward_pre_hook(in_float32)
    return model


def with_exact_positions(model: torch.nn.Module) -> torch.nn.Module:
    """Turn a loaded model into float64, but for the tables of its positions."""
    model.double()
    for name, module in model.named_modules():
        if name.endswith("rope_embeddings"):
            module.float()
    return model


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    silence = latent.new_zeros(0, 6)
    return with_audio(model, latent, timestep, text, audio=silence, audio_timestep=timestep, **conditioning)[0]


def with_audio(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    pooled_projections: torch.Tensor,
    visual_cond: torch.Tensor,
    audio: torch.Tensor,
    audio_timestep: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the model on a latent `(C, F, H, W)` and audio `(tokens, C)`, without audio if there are no tokens.

    The stock forward embeds one timestep for both; here the embedding of audio is given its own.
    """
    padded = torch.cat([text, 7 * torch.ones_like(text[:3])])
    own = model.audio_time_embeddings.register_forward_pre_hook(lambda module, args: (audio_timestep[None],))
    output = model(
        hidden_states=torch.cat([latent, visual_cond]).movedim(0, -1)[None],
        encoder_hidden_states=padded[None],
        pooled_projections=pooled_projections[None],
        timestep=timestep[None],
        audio_hidden_states=audio[None] if len(audio) else None,
        encoder_attention_mask=(torch.arange(len(padded)) < len(text))[None],
    )
    own.remove()
    return output.sample[0].movedim(-1, 0), output.audio_sample[0] if len(audio) else audio


CASES = {
    "kandinsky6": FamilyCase(
        make=make,
        alone=alone,
        sizes=VIDEO_SIZES,
        conditioning=lambda draw, count: {
            "pooled_projections": draw(count, 20),
            "visual_cond": [draw(5, *size) for size in VIDEO_SIZES],
        },
        empty_text=False,
        without_gradient=(
            "audio_",
            "va_cross_attention.",
            "av_cross_attention.",
            "va_modulation.",
            "av_modulation.",
        ),
        lora_targets=("to_query", "to_key", "to_value"),
    )
}


@torch.no_grad()
def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    vae, sigma, noise = pipeline.vae, drawn.timestep / 1000, drawn.noise[None]
    clean = vae.encode(drawn.pixels[None]).latent_dist.mode() * vae.config.scaling_factor
    noisy = ((1 - sigma) * clean + sigma * noise).permute(0, 2, 3, 4, 1)
    embeds, pooled, mask, *_ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    output = pipeline.transformer(
        hidden_states=torch.cat([noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[..., :1])], -1),
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=drawn.timestep[None],
        encoder_attention_mask=mask,
    ).sample
    return (output.permute(0, 4, 1, 2, 3) - (noise - clean)).square().mean()


RECIPES = {
    "kandinsky6": RecipeCase(
        tiny="kandinsky6",
        loss=text_to_video_loss,
        render={
            "num_inference_steps": 2,
            "guidance_scale": 1.0,
            "num_frames": 5,
            "sample_audio": False,
            "max_sequence_length": 64,
        },
    )
}
