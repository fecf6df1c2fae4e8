"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from diffusers import (
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from hf_bucketing.models.first_frame import pictures
from tests.models.cases import IMAGE_SIZES, FamilyCase
from tests.models.families.wan import clean_latent
from tests.models.recipe_cases import IMAGES, REFERENCE, Drawn, RecipeCase


def make(**config: Any) -> QwenImageTransformer2DModel:
    settings = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    }
    return QwenImageTransformer2DModel(**{**settings, **config})


def alone(
    model: Any, latent: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, *, padding: int = 0
) -> torch.Tensor:
    channels, _, height, width = latent.shape
    padded = torch.cat([text, 7 * torch.ones(padding, text.shape[1]).to(text)])
    mask = torch.tensor([1] * len(text) + [0] * padding)
    output = model(
        hidden_states=QwenImagePipeline._pack_latents(latent.transpose(0, 1), 1, channels, height, width),
        timestep=timestep[None] / 1000,
        encoder_hidden_states_mask=mask[None] if padding else None,
        encoder_hidden_states=padded[None],
        img_shapes=[[(1, height // 2, width // 2)]],
    ).sample
    return QwenImagePipeline._unpack_latents(output, 8 * height, 8 * width, 8)[0]


CASES = {
    "qwen-image": FamilyCase(
        make=make,
        alone=alone,
        sizes=IMAGE_SIZES,
        # the last block's text goes nowhere
        without_gradient=("1.attn.add_q_proj", "1.attn.norm_added_q", "1.attn.to_add_out", "1.txt_mlp"),
    ),
}
CASES["qwen-image clean condition"] = replace(
    CASES["qwen-image"], make=partial(make, zero_cond_t=True), alone=partial(alone, padding=3)
)


@contextmanager
def of_small_pictures() -> Iterator[None]:
    """Let pipelines of Qwen-Image-Edit make pictures 64×64 pixels in area inside a `with` block, not 1024×1024."""
    with ExitStack() as stack:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            stock = module.calculate_dimensions

            def small(area: int, ratio: float, stock: Callable[..., Any] = stock) -> Any:
                return stock(64**2 if area == 1024**2 else area, ratio)

            stack.enter_context(mock.patch.object(module, "calculate_dimensions", small))
        yield


def text_seen_with(pipeline: Any, caption: str, references: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the text `(1, length, dim)` that a pipeline of Qwen-Image-Edit makes of a caption and pictures."""
    if not references:
        return QwenImageEditPlusPipeline(**pipeline.components).encode_prompt(caption)[0]
    shown = []
    for pixels in references:
        (picture,) = pictures(pixels.transpose(0, 1))
        if isinstance(pipeline, QwenImageEditPipeline):
            width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(1024**2, picture.width / picture.height)
        else:
            area = pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE
            width, height = pipeline_qwenimage_edit_plus.calculate_dimensions(area, picture.width / picture.height)
        shown.append(pipeline.image_processor.resize(picture, height, width))
    return pipeline.encode_prompt(caption, image=shown[0] if isinstance(pipeline, QwenImageEditPipeline) else shown)[0]


def loss_by_hand(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    clean, noise, sigma = clean_latent(pipeline, drawn.pixels), drawn.noise[None], drawn.timestep / 1000
    references = drawn.shown.get("reference", ())
    if isinstance(pipeline, QwenImagePipeline):
        embeds, mask = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    else:
        embeds, mask = text_seen_with(pipeline, drawn.caption, references), None
    latents = [(1 - sigma) * clean + sigma * noise]
    latents += [pipeline._encode_vae_image(pixels[None], generator=None) for pixels in references]
    _, channels, _, height, width = clean.shape
    tokens = [pipeline._pack_latents(latent, 1, channels, *latent.shape[3:]) for latent in latents]
    output = pipeline.transformer(
        hidden_states=torch.cat(tokens, 1),
        timestep=drawn.timestep[None] / 1000,
        encoder_hidden_states_mask=mask,
        encoder_hidden_states=embeds,
        img_shapes=[[(1, latent.shape[3] // 2, latent.shape[4] // 2) for latent in latents]],
    ).sample[:, : tokens[0].shape[1]]
    velocity = pipeline._unpack_latents(output, 8 * height, 8 * width, 8)
    return (velocity - (noise - clean)).square().mean()


RECIPES = {
    "qwen-image": RecipeCase(
        tiny="qwen-image",
        loss=loss_by_hand,
        sizes=IMAGES,
        render={"num_inference_steps": 2, "max_sequence_length": 64},
    )
}
PICTURES = [Image.new("RGB", size, "white") for size in ((64, 80), (96, 64))]
RECIPES["qwen-image-edit"] = replace(
    RECIPES["qwen-image"],
    tiny="qwen-image-edit",
    render={**RECIPES["qwen-image"].render, "image": PICTURES[0]},
    shown=REFERENCE,
    references=(((1, 48, 48),), (), ((1, 32, 64),)),
    max_tokens=4096,
)
RECIPES["qwen-image-edit-2509"] = replace(
    RECIPES["qwen-image-edit"],
    tiny="qwen-image-edit-2509",
    render={**RECIPES["qwen-image"].render, "image": PICTURES},
    references=(((1, 32, 16), (1, 16, 48)), (), ((1, 48, 48), (1, 16, 16), (1, 32, 64))),
)
RECIPES["qwen-image-edit-2511"] = replace(RECIPES["qwen-image-edit-2509"], tiny="qwen-image-edit-2511")
