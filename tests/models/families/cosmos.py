"""Cosmos Predict 1 and 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.models.recipe_cases import FIRST_FRAME, IMAGES, Drawn, RecipeCase, encoding_to_the_mode


class Guardrail:
    """The calls that a pipeline makes of cosmos_guardrail."""

    def to(self, device: Any) -> None:
        """Move nowhere."""

    def check_text_safety(self, prompt: str) -> bool:
        return "unsafe" not in prompt

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames


@torch.no_grad()
def clean_latent(pipeline: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode `(3, F, H, W)` so that the pipeline's way of decoding gives it back, in float64."""
    config = pipeline.vae.config
    latents = pipeline.vae.encode(pixels[None]).latent_dist.mode().double()
    shape = (1, latents.shape[1], -1, 1, 1)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(shape)[:, :, : latents.shape[2]]
        for values in (config.latents_mean, config.latents_std)
    )
    return (latents - mean) / std * pipeline.scheduler.config.sigma_data


def conditioned(pipeline: Any, drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the latents that the pipeline shows the model, its indicator of those frames, and the mask channel."""
    _, frames, height, width = drawn.pixels.shape
    with encoding_to_the_mode(pipeline.vae):
        _, latents, indicator, _, mask, _ = pipeline.prepare_latents(
            drawn.first[None], 1, len(drawn.noise), height, width, frames,
            do_classifier_free_guidance=False, dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
    if frames == 1:  # which the pipeline does not render: such samples are not conditioned
        indicator, mask = torch.zeros_like(indicator), torch.zeros_like(mask)
    return latents.double(), indicator.double(), mask


def output_of(pipeline: Any, drawn: Drawn, latents: torch.Tensor, timestep: torch.Tensor, **options: Any) -> Any:
    embeds, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    padding_mask = torch.zeros(1, 1, *drawn.pixels.shape[2:])
    output = pipeline.transformer(
        latents.float(), timestep.float(), embeds, padding_mask=padding_mask, **options, return_dict=False
    )[0]
    return output.double()


def predict1_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Weight the error of the clean latent as EDM does; the scheduler preconditions."""
    scheduler, clean, noise = pipeline.scheduler, clean_latent(pipeline, drawn.pixels), drawn.noise[None].double()
    sigma, deviation = (4 * drawn.timestep.double()).exp(), scheduler.config.sigma_data
    noisy, options, scored = clean + sigma * noise, {"fps": drawn.fps}, torch.ones_like(clean[:, :1])
    shown = noisy
    if pipeline.transformer.config.in_channels > clean.shape[1]:
        given, indicator, options["condition_mask"] = conditioned(pipeline, drawn)
        c_in = scheduler._get_conditioning_c_in
        given = given * c_in(torch.zeros(())) / c_in(sigma)  # without the noise of augment_sigma
        shown, scored = indicator * given + (1 - indicator) * noisy, scored * (1 - indicator)
    timestep = scheduler.precondition_noise(sigma)[None]
    output = output_of(pipeline, drawn, scheduler.precondition_inputs(shown, sigma), timestep, **options)
    denoised = scheduler.precondition_outputs(noisy, output, sigma)
    weight = (sigma**2 + deviation**2) / (sigma * deviation) ** 2
    return weight * (scored * (denoised - clean).square()).sum() / scored.expand_as(clean).sum()


def predict2_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Compute the clean latent as the pipeline does, and weight its error by 1/t²: the error of the velocity."""
    clean, noise, t = clean_latent(pipeline, drawn.pixels), drawn.noise[None].double(), drawn.timestep.double()
    sigma = t / (1 - t)
    noisy, scored = clean + sigma * noise, torch.ones_like(clean[:, :1])
    shown, timestep, options = (1 - t) * noisy, t[None], {}
    if pipeline.transformer.config.in_channels > clean.shape[1]:
        given, indicator, mask = conditioned(pipeline, drawn)
        options = {"condition_mask": mask, "fps": drawn.fps}
        shown, scored = indicator * given + (1 - indicator) * shown, scored * (1 - indicator)
        timestep = indicator * (1e-4 / (1e-4 + 1)) + (1 - indicator) * t
    output = output_of(pipeline, drawn, shown, timestep, **options)
    denoised = (1 - t) * noisy - t * output
    return (scored * (denoised - clean).square()).sum() / scored.expand_as(clean).sum() / t**2


TEXT_TO_WORLD = RecipeCase(
    tiny="cosmos",
    loss=predict1_loss,
    render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 64},
    components={"safety_checker": Guardrail()},
)
TEXT_TO_IMAGE = replace(
    TEXT_TO_WORLD,
    tiny="cosmos2-t2i",
    loss=predict2_loss,
    sizes=IMAGES,
    render={"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 64},
    bucket_frames="1",
    max_tokens=96,
)

RECIPES = {
    "cosmos": TEXT_TO_WORLD,
    "cosmos-v2w": replace(TEXT_TO_WORLD, tiny="cosmos-v2w", shown=FIRST_FRAME),
    "cosmos2-t2i": TEXT_TO_IMAGE,
    "cosmos2-v2w": replace(TEXT_TO_WORLD, tiny="cosmos2-v2w", loss=predict2_loss, shown=FIRST_FRAME),
}
