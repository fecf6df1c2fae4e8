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
    silence = latent.new_zeros(0, model.config.audio_in_channels)
    return minimax_h3_with_audio(model, latent, timestep, text, audio=silence, audio_timestep=timestep)[0]


def minimax_h3_with_audio(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    audio: torch.Tensor,
    audio_timestep: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the model on a latent and audio `(tokens, C)` as the pipeline does; return noise − data of both."""
    layout = layout_of(model, latent, len(text), num_audio_latents=len(audio) // 2)
    times, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        layout["video_indices"],
        layout["audio_indices"],
        0,
        0,
        len(text),
        video_timestep=float(1 - timestep / 1000),  # in float32, as the scheduler
        audio_timestep=float(1 - audio_timestep / 1000),
        condition_video_timestep=1.0,
        condition_audio_timestep=1.0,
    )
    velocity, heard = model(
        hidden_states=patchify_video_latents(latent[None], model.config.patch_size)[None],
        audio_hidden_states=audio[None],
        encoder_hidden_states=text[None],
        timestep=times,
        timestep_indices=indices,
        return_dict=False,
        **layout,
    )
    return -latent_of_rows(velocity[0], latent, patch=model.config.patch_size), -heard[0]


def layout_of(model: Any, latent: torch.Tensor, words: int, *, num_audio_latents: int) -> dict[str, torch.Tensor]:
    """Return the arguments by which the pipeline describes the rows of a sample `(C, f, h, w)` to the model."""
    made = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((words,), TEXT), *latent.shape[1:], num_audio_latents, model.config.patch_size, 2, AUDIO, VIDEO
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    return dict(zip(names, made, strict=False))


def latent_of_rows(rows: torch.Tensor, latent: torch.Tensor, *, patch: tuple[int, int, int]) -> torch.Tensor:
    """Return rows of patches as a latent of the shape of another, `(C, f, h, w)`."""
    channels, *sides = latent.shape
    grid = [side // part for side, part in zip(sides, patch, strict=True)]
    return rows.reshape(*grid, channels, *patch).permute(3, 0, 4, 1, 5, 2, 6).reshape(latent.shape)


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


def text_of(pipeline: Any, caption: str) -> torch.Tensor:
    """Encode a caption, `(length, dim)`, by the pipeline's own block."""
    encode_text = MiniMaxH3TextEncoderStep().init_pipeline()
    encode_text.update_components(
        text_encoder=pipeline.text_encoder, tokenizer=pipeline.tokenizer, processor=pipeline.processor
    )
    (text,) = encode_text(prompt=caption, output="prompt_embeds")
    return text


def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    text = text_of(pipeline, drawn.caption)
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
