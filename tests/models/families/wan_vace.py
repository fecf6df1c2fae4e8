"""Wan VACE."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanVACETransformer3DModel
from PIL import Image

from tests.models import cases, cross_models
from tests.models.families.wan import RENDER, clean_latent, masked_mean, noisy_latent, picture, prompt_embeds
from tests.models.recipe_cases import Drawn, RecipeCase

CONTROL_CHANNELS, LAYERS = 5, [0, 2]


def make(**config: Any) -> WanVACETransformer3DModel:
    settings = {**cross_models.WAN, "num_layers": 3, "vace_layers": LAYERS, "vace_in_channels": CONTROL_CHANNELS}
    return WanVACETransformer3DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    control_hidden_states: torch.Tensor,
    control_hidden_states_scale: torch.Tensor,
) -> torch.Tensor:
    return model(
        latent[None],
        timestep[None],
        text[None],
        control_hidden_states=control_hidden_states[None],
        control_hidden_states_scale=control_hidden_states_scale,
    ).sample[0]


CASES = {
    "wan-vace": cases.FamilyCase(
        make=make,
        alone=alone,
        conditioning=lambda draw, count: {
            "control_hidden_states": [draw(CONTROL_CHANNELS, *size) for size in cases.SIZES],
            "control_hidden_states_scale": 1 + 0.3 * draw(count, len(LAYERS)),
        },
    )
}


def loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Take the control channels of the pipeline's own preparation, called as a person would."""
    shown, (_, frames, height, width) = drawn.shown, drawn.pixels.shape
    video, mask, references = (shown.get(name) for name in ("control", "mask", "reference"))
    if video is None and mask is not None:
        video = torch.where(mask > 0.5, 0.0, drawn.pixels)
    clips = {
        "video": None if video is None else [(video / 2 + 0.5).unbind(1)],
        "mask": None if mask is None else [mask.expand(3, -1, -1, -1).unbind(1)],
    }
    clips = {name: None if clip is None else torch.stack(clip[0])[None] for name, clip in clips.items()}
    images = [picture(reference[:, 0]) for reference in references or ()] or None
    added = len(references or ())
    made = pipeline.preprocess_conditions(
        **clips, reference_images=images, height=height, width=width, num_frames=frames,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    control = pipeline.prepare_video_latents(*made, device=torch.device("cpu"))
    masks = pipeline.prepare_masks(made[1])[:, :, 1:]  # for images of several references, it makes too few zeros
    control = torch.cat([control, torch.nn.functional.pad(masks, (0, 0, 0, 0, added, 0))], 1)
    clean = clean_latent(pipeline, drawn.pixels)
    clean = torch.cat([*(clean_latent(pipeline, canvas[:, None]) for canvas in made[2][0][::-1] if added), clean], 2)
    output = pipeline.transformer(
        noisy_latent(drawn, clean),
        timestep=drawn.timestep[None],
        encoder_hidden_states=prompt_embeds(pipeline, drawn),
        control_hidden_states=control,
        control_hidden_states_scale=torch.ones(2),
    ).sample
    return masked_mean((output - (drawn.noise[None] - clean)).square()[:, :, added:], mask)


PICTURE = Image.new("RGB", (48, 32), "white")
RECIPES = {
    "wan-vace": RecipeCase(
        tiny="wan-vace",
        loss=loss,
        render={
            **RENDER,
            "max_sequence_length": 64,
            "video": [PICTURE] * 5,
            "mask": [PICTURE] * 5,
            "reference_images": PICTURE,
        },
        shown=(("control",), ("mask",), ("reference",), ("control", "mask", "reference")),
    )
}
