"""LTX-2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from PIL import Image

from hf_bucketing.models.first_frame import pictures
from tests.models.cases import FamilyCase
from tests.models.families.ltx import IN_CONTEXT, image_to_video_loss, text_to_video_loss, tokens
from tests.models.recipe_cases import BLOCKS_OF_32, FIRST_FRAME, REFERENCE, Drawn, RecipeCase


def make_ltx2(**config: Any) -> LTX2VideoTransformer3DModel:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "cross_attention_dim": 32,
        "caption_channels": 16,
        "rope_type": "split",
        "audio_in_channels": 6,
        "audio_out_channels": 6,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
    }
    return LTX2VideoTransformer3DModel(**{**settings, **config})


def ltx2_alone(
    model: Any,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    *,
    fps: torch.Tensor,
    sigma: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call the model as its pipeline does, on an audio of the video's duration that is isolated from it."""
    frames, height, width = latent.shape[1:]
    sides = {"patch_size": model.config.patch_size, "patch_size_t": model.config.patch_size_t}
    audio, audio_text = torch.randn(1, 25, 6), torch.randn(1, len(text) + 3, 16)
    mask = (torch.arange(len(text) + 3)[None] < len(text)).to(text.dtype)
    output = model(
        hidden_states=LTX2Pipeline._pack_latents(latent[None], **sides),
        audio_hidden_states=audio.to(latent.dtype),
        encoder_hidden_states=torch.cat([text, text.new_full((3, text.shape[1]), 7.0)])[None],
        audio_encoder_hidden_states=audio_text.to(latent.dtype),
        timestep=timestep[None],
        audio_timestep=torch.tensor([500.0]),
        sigma=torch.tensor([500.0]) if sigma is None else sigma[None],
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=frames,
        height=height,
        width=width,
        fps=float(fps),
        audio_num_frames=25,
        video_coords=model.rope.prepare_video_coords(1, frames, height, width, "cpu", fps=float(fps)),
        audio_coords=model.audio_rope.prepare_audio_coords(1, 25, "cpu"),
        isolate_modalities=True,
        use_cross_timestep=True,
    ).sample
    grid = frames // sides["patch_size_t"], height // sides["patch_size"], width // sides["patch_size"]
    return LTX2Pipeline._unpack_latents(output, *grid, **sides)[0]


def predict(pipeline: Any, drawn: Drawn, noisy: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Call the transformer as the pipeline does for guidance without the other modality, with a random audio."""
    states, mask, _, _ = pipeline.encode_prompt(
        drawn.caption, do_classifier_free_guidance=False, max_sequence_length=drawn.max_sequence_length
    )
    text, audio_text, mask = pipeline.connectors(states, mask, padding_side="left")
    size = dict(zip(("num_frames", "height", "width"), noisy.shape[2:], strict=True))
    rope, sigma, own = pipeline.transformer.rope, drawn.timestep[None], tokens(pipeline, noisy)
    located, shown = rope.prepare_video_coords(1, *size.values(), "cpu", fps=drawn.fps), own[:, :0]
    for pixels in drawn.shown.get("reference", ()):
        latents, places, _, _ = encode_reference(pipeline, pixels, drawn)
        shown, located = torch.cat([shown, latents], 1), torch.cat([located, places], 2)
    if shown.shape[1]:
        timestep = F.pad(timestep[:, None].expand(-1, own.shape[1]), (0, shown.shape[1]))
    return pipeline.transformer(
        hidden_states=torch.cat([own, shown], 1),
        audio_hidden_states=torch.randn(1, 9, pipeline.transformer.config.audio_in_channels),
        encoder_hidden_states=text,
        audio_encoder_hidden_states=audio_text,
        timestep=timestep,
        audio_timestep=sigma,
        sigma=sigma,
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        **size,
        fps=drawn.fps,
        audio_num_frames=9,
        video_coords=located,
        isolate_modalities=True,
        use_cross_timestep=True,
        return_dict=False,
    )[0][:, : own.shape[1]]


def encode_reference(pipeline: Any, pixels: torch.Tensor, drawn: Drawn) -> Any:
    """Return tokens and positions of a reference `(3, F, h, w)` as the pipeline makes them."""
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

    frames, height, width = drawn.pixels.shape[1:]
    return pipeline._encode_reference_conditions(
        [LTX2ReferenceCondition(frames=pictures(pixels.transpose(0, 1)))],
        height,
        width,
        frames,
        reference_downscale_factor=height // pixels.shape[2],
        frame_rate=drawn.fps,
        dtype=torch.float32,
        device="cpu",
    )


LTX2 = FamilyCase(
    make=make_ltx2,
    alone=ltx2_alone,
    conditioning=lambda draw, count: {"fps": torch.tensor([12.0 + sample for sample in range(count)])},
    without_gradient=("audio", "av_cross_attn", "video_a2v", "keyframes"),
)
LTX23_SETTINGS = {
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
CASES = {
    "ltx2": LTX2,
    "ltx2 interleaved patches": replace(
        LTX2, make=partial(make_ltx2, rope_type="interleaved", patch_size=2, in_channels=16, out_channels=16)
    ),
    "ltx2.3": replace(
        LTX2,
        make=partial(make_ltx2, **LTX23_SETTINGS),
        text_dim=32,
        conditioning=lambda draw, count: {
            "fps": torch.tensor([12.0 + sample for sample in range(count)]),
            "sigma": torch.tensor([800.0 - 100 * sample for sample in range(count)]),
        },
    ),
    "ltx2.5": replace(
        LTX2,
        make=partial(
            make_ltx2,
            **LTX23_SETTINGS,
            use_prompt_adaln_single=False,
            ff_bias=False,
            use_keyframes_abs_pos_embedding=True,
        ),
        text_dim=32,
    ),
}
STRIDES = {"buckets": BLOCKS_OF_32, "bucket_frames": "1,9"}
RENDER = {
    "num_inference_steps": 2,
    "num_frames": 5,
    "max_sequence_length": 64,
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}
RECIPES = {
    "ltx2": RecipeCase(tiny="ltx2", loss=partial(text_to_video_loss, predict=predict), render=RENDER, **STRIDES),
    "ltx2-i2v": RecipeCase(
        tiny="ltx2-i2v",
        loss=partial(image_to_video_loss, predict=predict),
        render={**RENDER, "image_crf": 0},
        **STRIDES,
        shown=FIRST_FRAME,
    ),
    "ltx2-in-context": RecipeCase(
        tiny="ltx2-in-context",
        loss=partial(text_to_video_loss, predict=predict),
        render={
            **RENDER,
            "reference_conditions": [SimpleNamespace(frames=[Image.new("RGB", (32, 16), "white")], strength=1.0)],
            "reference_downscale_factor": 2,
        },
        **STRIDES,
        shown=REFERENCE,
        references=IN_CONTEXT,
    ),
}
