"""PixArt-α and PixArt-Σ."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.models.recipe_cases import IMAGES, Drawn, RecipeCase, clean_image


def text_to_image_loss(pipeline: Any, drawn: Drawn, *, conditioned: bool) -> torch.Tensor:
    clean, noise, step = clean_image(pipeline, drawn.pixels), drawn.noise[None, :, 0], drawn.timestep[None]
    embeds, mask, *_ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, clean_caption=True,
        max_sequence_length=drawn.max_sequence_length,
    )  # fmt: skip
    added = {"resolution": None, "aspect_ratio": None}
    if conditioned:
        height, width = drawn.pixels.shape[2:]
        added = {"resolution": torch.tensor([[height, width]]), "aspect_ratio": torch.tensor([[height / width]])}
    signal = pipeline.scheduler.alphas_cumprod[step]
    noisy = signal.sqrt() * clean + (1 - signal).sqrt() * noise
    output = pipeline.transformer(
        noisy,
        encoder_hidden_states=embeds,
        encoder_attention_mask=mask,
        timestep=step,
        added_cond_kwargs={name: value if value is None else value.float() for name, value in added.items()},
    ).sample
    epsilon, variance = output.chunk(2, dim=1)
    return (epsilon - noise).square().mean() + variational_bound(pipeline, epsilon, variance, noisy, clean, step)


def variational_bound(pipeline: Any, epsilon, variance, noisy, clean, step) -> torch.Tensor:
    """Return the bound in bits per number, for a step other than the last, of the variance that the model learns."""
    assert step > 0
    beta = pipeline.scheduler.betas.double()
    total = (1 - beta).cumprod(0)
    before, after, beta = total[step - 1], total[step], beta[step]
    smallest, largest = (beta * (1 - before) / (1 - after)).log(), beta.log()
    log_variance = smallest + (variance.double() + 1) / 2 * (largest - smallest)

    def mean(start: torch.Tensor) -> torch.Tensor:
        weights = beta * before.sqrt() / (1 - after), (1 - before) * (1 - beta).sqrt() / (1 - after)
        return weights[0] * start + weights[1] * noisy

    guess = (noisy - (1 - after).sqrt() * epsilon) / after.sqrt()
    distance = (mean(clean) - mean(guess)).square()
    divergence = 0.5 * (log_variance - smallest + (smallest.exp() + distance) / log_variance.exp() - 1)
    return (divergence.mean() / torch.log(torch.tensor(2.0))).to(epsilon.dtype)


RECIPES = {
    tiny: RecipeCase(
        tiny=tiny,
        loss=partial(text_to_image_loss, conditioned=tiny == "pixart-alpha"),
        sizes=IMAGES,
        max_tokens=96,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "use_resolution_binning": False},
    )
    for tiny in ("pixart-alpha", "pixart-sigma")
}
