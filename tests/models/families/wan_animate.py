"""Wan-Animate."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel
from PIL import Image

from tests.models import cases, cross_models
from tests.models.families.wan import clean_latent, masked_mean, noisy_latent, picture, prompt_embeds
from tests.models.recipe_cases import Drawn, RecipeCase

SIDE = 16
SIZES = ((3, 4, 6), (2, 8, 4), (5, 6, 6), (2, 2, 2), (3, 4, 6), (2, 10, 6))
"""The first latent frame of each is that of its character; some are images."""


def make(**config: Any) -> WanAnimateTransformer3DModel:
    settings = {
        **cross_models.WAN,
        "in_channels": 12,
        "latent_channels": 4,
        "num_layers": 4,
        "image_dim": 8,
        "added_kv_proj_dim": 24,
        "rope_max_seq_len": 65,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": SIDE,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
        "motion_encoder_batch_size": 3,
    }
    return WanAnimateTransformer3DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    encoder_hidden_states_image: torch.Tensor,
    pose_hidden_states: torch.Tensor,
    face_pixel_values: torch.Tensor,
) -> torch.Tensor:
    return model(
        latent[None],
        timestep[None],
        text[None],
        encoder_hidden_states_image=encoder_hidden_states_image[None],
        pose_hidden_states=pose_hidden_states[None, :, 1:],
        face_pixel_values=face_pixel_values[None],
    ).sample[0]


def conditioning(draw: cases.Draw, count: int) -> dict[str, Any]:
    return {
        "encoder_hidden_states_image": draw(count, 6, 8),
        "pose_hidden_states": [draw(4, *size) for size in SIZES],
        "face_pixel_values": [draw(3, 4 * (frames - 2) + 1, SIDE, SIDE) for frames, _, _ in SIZES],
    }


CASES = {
    "wan-animate": cases.FamilyCase(
        make=make,
        alone=alone,
        sizes=SIZES,
        text_lengths=(512,) * len(SIZES),
        channels=12,
        conditioning=conditioning,
    )
}


def loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Take what the transformer is shown from the pipeline's own preparations, called as its call does."""
    shown, (_, frames, height, width) = drawn.shown, drawn.pixels.shape
    sides, mask = {"height": height, "width": width}, shown.get("mask")
    ((reference,),) = (shown["reference"],)
    image = picture(reference[:, 0])
    character = pipeline.prepare_reference_image_latents(
        pipeline.vae_image_processor.preprocess(image, **sides, resize_mode="fill"), device=torch.device("cpu")
    )
    known = pipeline.prepare_prev_segment_cond_latents(
        background_video=None if mask is None else torch.where(mask > 0.5, -1.0, drawn.pixels)[None],
        mask_video=None if mask is None else mask[None],
        segment_frame_length=frames,
        task="animate" if mask is None else "replace",
        device=torch.device("cpu"),
        **sides,
    )
    face = [picture(frame) for frame in shown["face"].unbind(1)]
    side = pipeline.transformer.config.motion_encoder_size
    clean = torch.cat([character[:, 4:], clean_latent(pipeline, drawn.pixels)], 2)
    output = pipeline.transformer(
        torch.cat([noisy_latent(drawn, clean), torch.cat([character, known], 2)], 1),
        timestep=drawn.timestep[None],
        encoder_hidden_states=prompt_embeds(pipeline, drawn),
        encoder_hidden_states_image=pipeline.encode_image(image),
        pose_hidden_states=pipeline.prepare_pose_latents(shown["control"][None]),
        face_pixel_values=pipeline.video_processor.preprocess_video(face, height=side, width=side),
    ).sample
    return masked_mean((output - (drawn.noise[None] - clean)).square()[:, :, 1:], mask)


ANIMATE = ("control", "face", "reference")
CLIP = [Image.new("RGB", (48, 32), (80 * number, 120, 200)) for number in range(3)] * 3
RECIPES = {
    "wan-animate": RecipeCase(
        tiny="wan-animate",
        loss=loss,
        render={
            "num_inference_steps": 2,
            "guidance_scale": 1.0,
            "segment_frame_length": 5,
            "image": CLIP[0],
            "pose_video": CLIP[:5],
            "face_video": CLIP[1:6],
        },
        max_sequence_length=512,
        shown=(ANIMATE, (*ANIMATE, "mask")),
        needs_shown=True,
        references=(((1, 20, 50),),) * 3,
    )
}
