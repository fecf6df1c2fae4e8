"""Wan-Animate 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanAnimate2Transformer3DModel
from diffusers.models.transformers import transformer_wan_animate_2 as stock
from diffusers.modular_pipelines.wan_animate_2.encoders import (
    clip_visual_encode,
    encode_vae,
    get_i2v_mask,
    get_t5_prompt_embeds,
)
from PIL import Image

from tests.models.cases import Draw, FamilyCase
from tests.models.families.wan import masked_mean, noisy_latent, picture
from tests.models.recipe_cases import Drawn, RecipeCase

SIZES = ((3, 4, 6), (2, 8, 4), (5, 6, 6), (2, 2, 2), (3, 4, 6), (2, 10, 6))
"""The first latent frame of each is that of its character; some are images."""
CHANNELS, WORDS = 4, 8


def make(**config: Any) -> WanAnimate2Transformer3DModel:
    settings = {
        "text_len": WORDS,
        "in_dim": 2 * CHANNELS + 4,
        "dim": 48,
        "ffn_dim": 32,
        "freq_dim": 24,
        "text_dim": 16,
        "out_dim": CHANNELS,
        "num_heads": 2,
        "num_layers": 3,
    }
    return WanAnimate2Transformer3DModel(**{**settings, **config})


@contextmanager
def attending_densely() -> Iterator[None]:
    """Let the stock model attend by a mask of all pairs, as FlexAttention has no backward pass on a CPU."""
    make_mask, attend = stock.create_block_mask, stock.dispatch_attention_fn

    def uncompiled(*args: Any, **options: Any) -> Any:
        return make_mask(*args, **{**options, "_compile": False})

    def densely(query: Any, key: Any, value: Any, *, attn_mask: Any, **options: Any) -> Any:
        if attn_mask is None:
            return attend(query, key, value, attn_mask=None, **options)
        rows, columns = torch.arange(query.shape[1])[:, None], torch.arange(key.shape[1])[None]
        mask = attn_mask.mask_mod(0, 0, rows, columns)
        mask = mask | ~mask.any(1, keepdim=True)  # padding, whose rows would be undefined
        sides = (side.transpose(1, 2) for side in (query, key, value))
        return F.scaled_dot_product_attention(*sides, attn_mask=mask).transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "create_block_mask", uncompiled)
        patch.setattr(stock, "dispatch_attention_fn", densely)
        yield


def alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    driving_latents: torch.Tensor,
    driving_text: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    driving_image: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call the stock model as the blocks of its pipeline do."""
    driving = driving_latents[:, 1:]
    _, frames, height, width = driving.shape
    cache = stock.WanAnimate2KVCache(len(model.blocks))
    grid, area = torch.tensor([[frames, height // 2, width // 2]]), height * width // 4
    images = None if driving_image is None else driving_image[None]
    with attending_densely():
        model(
            [driving[:CHANNELS]],
            timestep=timestep[None],
            encoder_hidden_states=[driving_text],
            encoder_hidden_states_image=images,
            condition_latents=[driving[CHANNELS:]],
            kv_cache=cache,
            kv_cache_mode="extract",
            seq_len=frames * area,
            offset_grid_sizes=grid,
        )
        return model(
            [latent[:CHANNELS]],
            timestep=timestep[None],
            encoder_hidden_states=[text],
            encoder_hidden_states_image=None if images is None else encoder_hidden_states_image[None],
            condition_latents=[latent[CHANNELS:]],
            kv_cache=cache,
            kv_cache_mode="cached",
            seq_len=(frames + 1) * area,
            reference_grid_sizes=grid,
            origin_len=4 * (frames - 1) + 1,
            origin_area=[8 * height, 8 * width],
        ).sample[0]


def conditioning(draw: Draw, count: int) -> dict[str, Any]:
    return {
        "driving_latents": [draw(2 * CHANNELS + 4, *size) for size in SIZES],
        "driving_text": draw(count, WORDS, 16),
        "encoder_hidden_states_image": draw(count, 6, 1280),
        "driving_image": draw(count, 6, 1280),
    }


CASE = FamilyCase(
    make=make,
    alone=alone,
    sizes=SIZES,
    text_lengths=(WORDS,) * len(SIZES),
    channels=2 * CHANNELS + 4,
    conditioning=conditioning,
    on_cpu=attending_densely,
)
CASES = {
    "wan-animate-2": CASE,
    "wan-animate-2 elsewhere": replace(
        CASE,
        make=partial(make, use_img_emb=False, refer_offset_t=0, refer_offset_h=-1, refer_offset_w=3, refer_stride=2),
        conditioning=lambda draw, count: {
            name: values for name, values in conditioning(draw, count).items() if "image" not in name
        },
    ),
}


def loss(pipeline: Any, drawn: Drawn) -> torch.Tensor:
    """Make what the transformer is shown by the functions of the pipeline's blocks, in their order."""
    (_, frames, height, width), ((reference,),) = drawn.pixels.shape, (drawn.shown["reference"],)
    cpu, vae = torch.device("cpu"), pipeline.vae
    image = pipeline.image_processor.preprocess(picture(reference[:, 0]), height, width, resize_mode="fill")
    driving = drawn.shown["control"][None]

    def known(pixels: torch.Tensor, mask_len: int) -> torch.Tensor:
        latent = encode_vae(vae, pixels)[0]
        return torch.cat([get_i2v_mask(*latent.shape[1:], mask_len, device=cpu), latent])

    character, before = known(image[:, :, None], 1), known(torch.zeros_like(driving), 0)
    moving = torch.cat([encode_vae(vae, driving)[0], known(driving, frames)])
    clean = torch.cat([character[None, 4:], encode_vae(vae, drawn.pixels[None])], 2)
    text, driving_text = get_t5_prompt_embeds(
        pipeline.text_encoder,
        pipeline.tokenizer,
        [drawn.caption, "人物动作的参考视频"],
        drawn.max_sequence_length,
        cpu,
    )
    tokens, driving_tokens = (
        clip_visual_encode(pipeline.image_encoder, frame, cpu, torch.float32)[0]
        for frame in (image[0], driving[0, :, 0])
    )
    output = alone(
        pipeline.transformer,
        torch.cat([noisy_latent(drawn, clean)[0], torch.cat([character, before], 1)]),
        drawn.timestep,
        text,
        driving_latents=F.pad(moving, (0, 0, 0, 0, 1, 0)),
        driving_text=driving_text,
        encoder_hidden_states_image=tokens,
        driving_image=driving_tokens,
    )
    error = (output[None] - (drawn.noise[None] - clean)).square()
    return masked_mean(error[:, :, 1:], drawn.shown.get("mask"))


ANIMATE = ("control", "reference")
CLIP = [Image.new("RGB", (48, 32), (80 * number, 120, 200)) for number in range(3)] * 3
RECIPES = {
    "wan-animate-2": RecipeCase(
        tiny="wan-animate-2",
        loss=loss,
        render={"num_inference_steps": 2, "segment_frame_length": 5, "image": CLIP[0], "driving_video": CLIP[:5]},
        max_sequence_length=512,
        shown=(ANIMATE, (*ANIMATE, "mask")),
        needs_shown=True,
        references=(((1, 20, 50),),) * 3,
    )
}
