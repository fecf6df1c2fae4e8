"""Anima, which is packed as Cosmos."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines.anima.before_denoise import AnimaTextConditioningStep
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep, encode_vae_image

from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase

TEXTS = ("qwen_prompt_embeds", "qwen_attention_mask", "t5_input_ids", "t5_attention_mask")


def text_of(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    encode = AnimaTextEncoderStep().init_pipeline()
    encode.update_components(
        text_encoder=pipeline.text_encoder, tokenizer=pipeline.tokenizer, t5_tokenizer=pipeline.t5_tokenizer
    )
    texts = encode(prompt=drawn.caption, max_sequence_length=drawn.max_sequence_length, output=list(TEXTS))
    condition = AnimaTextConditioningStep().init_pipeline()
    condition.update_components(text_conditioner=pipeline.text_conditioner, transformer=pipeline.transformer)
    return condition(**texts, output="prompt_embeds")


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean = encode_vae_image(
        drawn.pixels[None, :, 0],
        pipeline.vae,
        generator=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        latent_channels=len(drawn.noise),
    )
    noise, timestep = drawn.noise[None], drawn.timestep
    noisy = (1 - timestep) * clean + timestep * noise
    (velocity,) = pipeline.transformer(
        hidden_states=noisy,
        timestep=timestep[None],
        encoder_hidden_states=text_of(pipeline, drawn),
        padding_mask=torch.zeros(1, 1, *noisy.shape[3:]),
        return_dict=False,
    )
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "anima": RecipeCase(
        tiny="anima",
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={"num_inference_steps": 2},
        max_sequence_length=512,
        bucket_frames="1",
        max_tokens=96,
    )
}
