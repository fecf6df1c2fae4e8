"""Pipelines of Wan, Wan VACE, SkyReels-V2 and ChronoEdit with small random weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import (
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5EncoderModel

from .components import CHANNELS, TEXT_DIM, t5_components, wan_vae

_IMAGE_SIDE, _IMAGE_PATCH = 16, 8
_MASK_CHANNELS = 8 * 8
"""Pixels of a mask of Wan VACE for each latent pixel."""


def transformer(**config: Any) -> WanTransformer3DModel:
    """Return a transformer of four blocks."""
    return WanTransformer3DModel(**{**TRANSFORMER, **config})


TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": CHANNELS,
    "out_channels": CHANNELS,
    "text_dim": TEXT_DIM,
    "freq_dim": 64,
    "ffn_dim": 256,
    "num_layers": 4,
    "cross_attn_norm": True,
    "rope_max_seq_len": 128,
}
"""Configuration of a transformer of text-to-video."""
WITH_CONDITION = {"in_channels": 2 * CHANNELS + 4}
"""Channels of image-to-video: the noisy latents, a mask of the given frames, and the latents of these."""
WITH_IMAGE_TOKENS = {**WITH_CONDITION, "image_dim": TEXT_DIM, "added_kv_proj_dim": 4 * 24}
"""Configuration of image-to-video models that attend to the tokens of an image encoder."""


def components(**vae: Any) -> dict[str, Any]:
    """Return the components of a pipeline but for its transformers and its image encoder."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {**t5_components(UMT5EncoderModel), "vae": wan_vae(**vae), "scheduler": scheduler}


def image_components() -> dict[str, Any]:
    """Return an image encoder, which makes five tokens of an image, and its processor."""
    side = {"shortest_edge": _IMAGE_SIDE}
    crop = {"height": _IMAGE_SIDE, "width": _IMAGE_SIDE}
    config = CLIPVisionConfig(
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=_IMAGE_SIDE,
        patch_size=_IMAGE_PATCH,
    )
    encoder = CLIPVisionModel(config).eval()
    return {"image_encoder": encoder, "image_processor": CLIPImageProcessor(size=side, crop_size=crop)}


def _text_to_video() -> DiffusionPipeline:
    return WanPipeline(**components(), transformer=transformer())


def _image_to_video(kind: type[DiffusionPipeline], model_class: type[Any], **config: Any) -> DiffusionPipeline:
    model = model_class(**{**TRANSFORMER, **WITH_IMAGE_TOKENS, **config})
    return kind(**components(), **image_components(), transformer=model)


def _two_experts() -> DiffusionPipeline:
    high, low = transformer(**WITH_CONDITION), transformer(**WITH_CONDITION)
    return WanImageToVideoPipeline(**components(), transformer=high, transformer_2=low, boundary_ratio=0.9)


def _timestep_per_token(pipeline_class: type[DiffusionPipeline]) -> DiffusionPipeline:
    vae = {"is_residual": True, "patch_size": 2, "scale_factor_spatial": 16, "in_channels": 12, "out_channels": 12}
    return pipeline_class(**components(**vae), transformer=transformer(), expand_timesteps=True)


def _vace() -> DiffusionPipeline:
    config = {"vace_layers": [0, 2], "vace_in_channels": 2 * CHANNELS + _MASK_CHANNELS}
    return WanVACEPipeline(**components(), transformer=WanVACETransformer3DModel(**TRANSFORMER, **config))


def _skyreels_v2(kind: type[DiffusionPipeline], *, sees_images: bool = False, **config: Any) -> DiffusionPipeline:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0)
    model = SkyReelsV2Transformer3DModel(**{**TRANSFORMER, **config})
    parts = {**components(), "scheduler": scheduler, "transformer": model}
    return kind(**parts, **(image_components() if sees_images else {}))


TINY = {
    "wan": _text_to_video,
    "wan-i2v": partial(_image_to_video, WanImageToVideoPipeline, WanTransformer3DModel),
    "wan-flf2v": partial(
        _image_to_video,
        WanImageToVideoPipeline,
        WanTransformer3DModel,
        pos_embed_seq_len=2 * (1 + (_IMAGE_SIDE // _IMAGE_PATCH) ** 2),
    ),
    "wan-2.2-i2v": _two_experts,
    "wan-2.2-t2v-5b": partial(_timestep_per_token, WanPipeline),
    "wan-2.2-ti2v": partial(_timestep_per_token, WanImageToVideoPipeline),
    "wan-vace": _vace,
    "skyreels-v2": partial(_skyreels_v2, SkyReelsV2Pipeline),
    "skyreels-v2-i2v": partial(_skyreels_v2, SkyReelsV2ImageToVideoPipeline, sees_images=True, **WITH_IMAGE_TOKENS),
    "skyreels-v2-df": partial(_skyreels_v2, SkyReelsV2DiffusionForcingPipeline, inject_sample_info=True),
    "chronoedit": partial(_image_to_video, ChronoEditPipeline, ChronoEditTransformer3DModel),
}
