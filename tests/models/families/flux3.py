"""FLUX.3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import Flux3TextRoPEInputsStep, _prepare_image_ids
from diffusers.modular_pipelines.flux3.decoders import Flux3DecodeStep
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep, Flux3VaeEncoderStep

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, REFERENCE, Drawn, RecipeCase

IMAGE_ROPE_SCALE = 0.5
"""That of `Flux3PrepareLatentsStep`."""


def make_flux3(**config: Any) -> Flux3Transformer2DModel:
    settings = {
        "in_channels": 16,
        "cond_in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "timestep_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return Flux3Transformer2DModel(**{**settings, **config})


def flux3_call(
    model: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    references: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Call the model on `(1, C, h, w)` as the pipeline does, with the blocks of references."""
    blocks = Flux3VaeEncoderStep._patchify_latents(latents)
    shown = {}
    if references:
        ids = [
            _prepare_image_ids(*reference.shape[2:], IMAGE_ROPE_SCALE, l_coord=-number)
            for number, reference in enumerate(references, 1)
        ]
        tokens = [reference.flatten(2).transpose(1, 2) for reference in references]
        shown = {"image_cond_hidden_states": torch.cat(tokens, 1), "image_cond_ids": torch.cat(ids)}
    (velocity,) = model(
        hidden_states=blocks.flatten(2).transpose(1, 2),
        encoder_hidden_states=text,
        timestep=timestep / 1000,
        img_ids=_prepare_image_ids(*blocks.shape[2:], IMAGE_ROPE_SCALE),
        txt_ids=Flux3TextRoPEInputsStep._prepare_text_ids(text),
        **shown,
        return_dict=False,
    )
    return Flux3DecodeStep._unpatchify_latents(velocity.transpose(1, 2).unflatten(2, blocks.shape[2:]))


def flux3_alone(model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return flux3_call(model, latent[None, :, 0], timestep[None], text[None])[0][:, None]


def loss_by_hand(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    encode = Flux3VaeEncoderStep().init_pipeline()
    encode.update_components(vae=pipeline.vae)
    images = [pixels[None, :, 0] for pixels in (drawn.pixels, *drawn.shown.get("reference", ()))]
    blocks, *references = encode(condition_images=images, output="image_cond_latents")
    encode_text = Flux3TextEncoderStep().init_pipeline()
    encode_text.update_components(text_encoder=pipeline.text_encoder, tokenizer=pipeline.tokenizer)
    text = encode_text(prompt=drawn.caption, max_sequence_length=drawn.max_sequence_length, output="prompt_embeds")
    clean, noise, sigma = Flux3DecodeStep._unpatchify_latents(blocks), drawn.noise[None, :, 0], drawn.timestep / 1000
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = flux3_call(pipeline.transformer, noisy, drawn.timestep[None], text, references)
    return (velocity - (noise - clean)).square().mean()


CASES = {
    "flux.3": FamilyCase(
        make=make_flux3,
        alone=flux3_alone,
        sizes=IMAGE_SIZES,
        empty_text=False,
        without_gradient=("image_cond",),
    )
}
RECIPES = {
    "flux3": RecipeCase(
        tiny="flux3",
        loss=loss_by_hand,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "max_sequence_length": 160},
        max_sequence_length=160,
        max_tokens=512,
        captions=("red", "a " * 50 + "square", "a large blue circle on grey"),
        shown=REFERENCE,
        references=(((1, 32, 16), (1, 16, 48)), (), ((1, 48, 48), (1, 16, 16), (1, 32, 64))),
    )
}
