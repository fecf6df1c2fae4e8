"""Kandinsky 5."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import torch

from tests.models.cases import VIDEO_SIZES, FamilyCase
from tests.models.recipe_cases import Drawn, RecipeCase


def _in_the_dtype_of_the_weights(layer: torch.nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(layer.weight.dtype),)


def _in_float32(rotary: torch.nn.Module, args: tuple[Any, ...]) -> None:
    rotary.float()


class Kandinsky5Transformer3DModel(diffusers.Kandinsky5Transformer3DModel):
    """The stock model, which runs in float64 only if its layers of time take their weights' dtype.

    Its rotary tables are always made in float32, as in a loaded model; `to` would cast their buffers too.
    """

    _keep_in_fp32_modules = None

    @functools.wraps(diffusers.Kandinsky5Transformer3DModel.__init__)
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.time_embeddings.in_layer.register_forward_pre_hook(_in_the_dtype_of_the_weights)
        self.text_rope_embeddings.register_forward_pre_hook(_in_float32)
        self.visual_rope_embeddings.register_forward_pre_hook(_in_float32)


def make(**config: Any) -> Kandinsky5Transformer3DModel:
    settings = {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 16,
        "in_text_dim2": 20,
        "time_dim": 24,
        "model_dim": 32,
        "ff_dim": 48,
        "num_text_blocks": 2,
        "num_visual_blocks": 2,
        "axes_dims": (4, 6, 6),
    }
    return Kandinsky5Transformer3DModel(**{**settings, **config})


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    pooled_projections: torch.Tensor,
    scale_factor: torch.Tensor,
    visual_cond: torch.Tensor | None = None,
) -> torch.Tensor:
    _, frames, height, width = latent.shape
    latent = latent if visual_cond is None else torch.cat([latent, visual_cond])
    output = model(
        hidden_states=latent.permute(1, 2, 3, 0)[None],
        encoder_hidden_states=text[None],
        pooled_projections=pooled_projections[None],
        timestep=timestep[None],
        visual_rope_pos=[torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        text_rope_pos=torch.arange(len(text)),
        scale_factor=tuple(scale_factor.tolist()),
        sparse_params=None,
    ).sample
    return output[0].permute(3, 0, 1, 2)


CASES = {
    "kandinsky5": FamilyCase(
        make=make,
        alone=alone,
        sizes=VIDEO_SIZES,
        lora_targets=("to_query", "to_key", "to_value"),
        conditioning=lambda draw, count: {
            "pooled_projections": draw(count, 20),
            "scale_factor": torch.tensor([[1.0, 2.0, 2.0], [1.0, 3.16, 3.16]] * count)[:count],
        },
    ),
    "kandinsky5 visual condition": FamilyCase(
        make=functools.partial(make, visual_cond=True),
        alone=alone,
        sizes=VIDEO_SIZES,
        lora_targets=("to_query", "to_key", "to_value"),
        conditioning=lambda draw, count: {
            "pooled_projections": draw(count, 20),
            "scale_factor": torch.tensor([[1.0, 1.0, 1.0], [1.0, 3.16, 3.16]] * count)[:count],
            "visual_cond": [draw(5, *size) for size in VIDEO_SIZES],
        },
    ),
}


@torch.no_grad()
def text_to_video_loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    vae, sigma, noise = pipeline.vae, drawn.timestep / 1000, drawn.noise[None]
    clean = vae.encode(drawn.pixels[None]).latent_dist.mode() * vae.config.scaling_factor
    noisy = ((1 - sigma) * clean + sigma * noise).permute(0, 2, 3, 4, 1)
    _, frames, height, width, _ = noisy.shape
    embeds, pooled, ends = pipeline.encode_prompt(drawn.caption, max_sequence_length=drawn.max_sequence_length)
    output = pipeline.transformer(
        hidden_states=torch.cat([noisy, torch.zeros_like(noisy), torch.zeros_like(noisy[..., :1])], -1),
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=drawn.timestep[None],
        visual_rope_pos=[torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        text_rope_pos=torch.arange(ends.diff().max().item()),
        scale_factor=pipeline._get_scale_factor(8 * height, 8 * width),
    ).sample
    return (output.permute(0, 4, 1, 2, 3) - (noise - clean)).square().mean()


RECIPES = {
    "kandinsky5": RecipeCase(
        tiny="kandinsky5",
        loss=text_to_video_loss,
        render={"num_inference_steps": 2, "guidance_scale": 1.0, "num_frames": 5, "max_sequence_length": 64},
        captions=("a red square", "a blue oval.", "a large blue circle on grey"),  # a stack has one length
        bucket_settings={"train_batch_size": 1},
        # It rounds rotated queries and keys to bf16, where the rounding of float32 sums, which differs with the
        # processor and the shape of a product, may show as one part in 512 of an element.
        tolerance=1e-4,
    )
}
