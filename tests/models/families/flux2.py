"""Flux.2."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux2KleinKVPipeline, Flux2Pipeline, Flux2Transformer2DModel
from PIL import Image

from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.recipe_cases import IMAGES, REFERENCE, Drawn, RecipeCase


def make_flux2(**config: Any) -> Flux2Transformer2DModel:
    settings = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return Flux2Transformer2DModel(**{**settings, **config})


def flux2_call(
    model: Any,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    shown: tuple[torch.Tensor, torch.Tensor] | None = None,
    **conditioning: Any,
) -> torch.Tensor:
    """Call the model on `(1, C, h, w)`, and tokens and positions of references, as the pipelines do."""
    blocks = Flux2Pipeline._patchify_latents(latents)
    ids, tokens = Flux2Pipeline._prepare_latent_ids(blocks), Flux2Pipeline._pack_latents(blocks)
    shown_tokens, shown_ids = (tokens[:, :0], ids[:, :0]) if shown is None else shown
    sides = [(tokens, ids), (shown_tokens, shown_ids)]
    if "num_ref_tokens" in conditioning:
        sides.reverse()
    all_tokens, all_ids = (torch.cat(parts, 1) for parts in zip(*sides, strict=True))
    output = model(
        hidden_states=all_tokens,
        encoder_hidden_states=text,
        timestep=timestep / 1000,
        img_ids=all_ids,
        txt_ids=Flux2Pipeline._prepare_text_ids(text),
        **conditioning,
    ).sample[:, : tokens.shape[1]]
    return Flux2Pipeline._unpatchify_latents(Flux2Pipeline._unpack_latents_with_ids(output, ids))


def flux2_alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, **conditioning: torch.Tensor
) -> torch.Tensor:
    kwargs = {name: values[None] for name, values in conditioning.items()}
    return flux2_call(model, latent[None, :, 0], timestep[None], text[None], **kwargs)[0][:, None]


def text_to_image_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    blocks = pipeline._encode_vae_image(drawn.pixels[None, :, 0], generator=None)
    clean, noise, sigma = pipeline._unpatchify_latents(blocks), drawn.noise[None, :, 0], drawn.timestep / 1000
    embeds, _ = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    guidance: dict[str, Any] = (
        {"guidance": torch.tensor([drawn.guidance])} if isinstance(pipeline, Flux2Pipeline) else {}
    )
    noisy = (1 - sigma) * clean + sigma * noise
    references, shown = [pixels[None, :, 0] for pixels in drawn.shown.get("reference", ())], None
    if references:
        shown = pipeline.prepare_image_latents(references, 1, generator=None, device="cpu", dtype=torch.float32)
    if isinstance(pipeline, Flux2KleinKVPipeline) and shown is not None:
        guidance |= {"kv_cache_mode": "extract", "num_ref_tokens": shown[0].shape[1]}
    velocity = flux2_call(pipeline.transformer, noisy, drawn.timestep[None], embeds, shown=shown, **guidance)
    return (velocity - (noise - clean)).square().mean()


CASES = {
    "flux.2": FamilyCase(
        make=make_flux2,
        alone=flux2_alone,
        sizes=IMAGE_SIZES,
        conditioning=lambda draw, count: {"guidance": 4 + draw(count)},
    )
}
RENDER = {"num_inference_steps": 2, "max_sequence_length": 64}
GUIDED = {**RENDER, "guidance_scale": 1.0}
RECIPES = {
    tiny: RecipeCase(
        tiny=tiny,
        loss=text_to_image_loss,
        sizes=IMAGES,
        render={**render, "image": [Image.new("RGB", size, "white") for size in ((64, 80), (96, 64))]},
        shown=REFERENCE,
        references=(((1, 32, 16), (1, 16, 48)), (), ((1, 48, 48), (1, 16, 16), (1, 32, 64))),
    )
    for tiny, render in {"flux2": GUIDED, "flux2-klein": GUIDED, "flux2-klein-kv": RENDER}.items()
}
