"""MiniMax-H3."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3TextEncoderStep

from tests.models.cases import FamilyCase
from tests.models.recipe_cases import BLOCKS_OF_32, Drawn, RecipeCase

VIDEO, TEXT, AUDIO = 0, 1, 2


def make_minimax_h3(**config: Any) -> MiniMaxH3Transformer3DModel:
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 24,
        "num_layers": 2,
        "num_refiner_layers": 2,
        "ffn_dim": 32,
        "in_channels": 4,
        "audio_in_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "time_embed_hidden_dim": 24,
        "time_embed_dim": 20,
        "rope_freq_dim": 2,
    }
    return MiniMaxH3Transformer3DModel(**{**settings, **config})


def minimax_h3_alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Call the model on `(C, f, h, w)` as the pipeline does, but for the sound; return noise − data."""
    patch, channels = model.config.patch_size, model.config.in_channels
    frames, height, width = latent.shape[1:]
    positions, tags, video, audio, words, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((len(text),), TEXT), frames, height, width, 0, patch, 2, AUDIO, VIDEO
    )
    time = float(1 - timestep / 1000)  # in float32, as the scheduler
    times, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, 0, 0, words.numel(), video_timestep=time, audio_timestep=time,
        condition_video_timestep=max(time, 0.999), condition_audio_timestep=1.0,
    )  # fmt: skip
    velocity, _ = model(
        hidden_states=patchify_video_latents(latent[None], patch)[None],
        audio_hidden_states=latent.new_zeros(1, 0, model.config.audio_in_channels),
        encoder_hidden_states=text[None],
        timestep=times,
        timestep_indices=indices,
        token_tags=tags,
        position_ids=positions,
        video_indices=video,
        audio_indices=audio,
        text_indices=words,
        return_dict=False,
    )
    p_t, p_h, p_w = patch
    rows = velocity[0].reshape(frames // p_t, height // p_h, width // p_w, channels, p_t, p_h, p_w)
    return -rows.permute(3, 0, 4, 1, 5, 2, 6).reshape(channels, frames, height, width)


@torch.no_grad()
def normalised_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode a clip `(3, F, H, W)` so that the pipeline's way of decoding gives it back."""
    vae = pipeline.vae
    mean, std, latent_mean, latent_std = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (pipeline.pixel_mean, pipeline.pixel_std, vae.config.latents_mean, vae.config.latents_std)
    )
    latent = vae.encode(((pixels[None] + 1) / 2 - mean) / std).latent_dist.mode()
    return ((latent - latent_mean) / latent_std)[0]


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    encode_text = MiniMaxH3TextEncoderStep().init_pipeline()
    encode_text.update_components(
        text_encoder=pipeline.text_encoder, tokenizer=pipeline.tokenizer, processor=pipeline.processor
    )
    (text,) = encode_text(prompt=drawn.caption, output="prompt_embeds")
    clean, noise, sigma = normalised_latent(pipeline, drawn.pixels), drawn.noise, drawn.timestep / 1000
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = minimax_h3_alone(pipeline.transformer, noisy, drawn.timestep, text)
    return (velocity - (noise - clean)).square().mean()


CASES = {
    "minimax-h3": FamilyCase(
        make=make_minimax_h3, alone=minimax_h3_alone, empty_text=False, without_gradient=("audio_proj",)
    )
}
RECIPES = {
    "minimax-h3": RecipeCase(
        tiny="minimax-h3",
        loss=text_to_video_loss,
        sizes=((5, 32, 64), (1, 32, 32), (22, 64, 32)),
        render={"num_inference_steps": 3, "num_frames": 124},
        buckets=BLOCKS_OF_32,
        bucket_frames="1,5",
    )
}
