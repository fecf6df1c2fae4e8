"""Pipelines of Cosmos and Anima with small random weights.

Earlier releases of diffusers lack the classes of Anima: these are looked up when its pipeline is made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from diffusers import (
    AutoencoderKLCosmos,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    CosmosVideoToWorldPipeline,
    DiffusionPipeline,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import ByT5Tokenizer, Qwen3Model, T5EncoderModel

from ...models.families.cosmos import CosmosRecipe
from .components import CHANNELS, TEXT_DIM, chat_components, latents_of_smooth_clips, qwen_vae, t5_components, wan_vae

_LATENT_FRAMES = 16


def _predict1(pipeline_class: type[Any], *, condition: int) -> DiffusionPipeline:
    return _pipeline(
        pipeline_class,
        vae=_vae(),
        scheduler=EDMEulerScheduler(sigma_data=0.5),
        transformer=_transformer(condition, extra_pos_embed_type="learnable"),
    )


def _predict2(pipeline_class: type[Any], *, condition: int) -> DiffusionPipeline:
    return _pipeline(
        pipeline_class,
        vae=wan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        transformer=_transformer(condition, extra_pos_embed_type=None),
    )


def _pipeline(pipeline_class: type[Any], **components: Any) -> DiffusionPipeline:
    """Make a pipeline that is saved without its guardrail, as those on the hub are."""
    components |= t5_components(T5EncoderModel) | CosmosRecipe.replaced_components()
    pipeline: DiffusionPipeline = pipeline_class(**components)
    pipeline.register_modules(safety_checker=None)
    return pipeline


def _anima() -> Any:
    t5_tokenizer = ByT5Tokenizer()
    pipeline = diffusers.AnimaModularPipeline()
    pipeline.update_components(
        **chat_components(Qwen3Model, "", 1),
        t5_tokenizer=t5_tokenizer,
        text_conditioner=diffusers.AnimaTextConditioner(
            source_dim=TEXT_DIM,
            target_dim=TEXT_DIM,
            model_dim=16,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=len(t5_tokenizer),
        ).eval(),
        vae=qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=_transformer(0, extra_pos_embed_type=None),
    )
    return pipeline


def _transformer(condition: int, **config: Any) -> CosmosTransformer3DModel:
    """Return a transformer of two blocks with that many channels of conditions."""
    return CosmosTransformer3DModel(
        in_channels=CHANNELS + condition,
        out_channels=CHANNELS,
        num_attention_heads=4,
        attention_head_dim=18,
        num_layers=2,
        text_embed_dim=TEXT_DIM,
        adaln_lora_dim=8,
        max_size=(32, 64, 64),
        concat_padding_mask=False,  # which needs torchvision
        **config,
    )


def _vae() -> AutoencoderKLCosmos:
    vae = AutoencoderKLCosmos(
        latent_channels=CHANNELS,
        encoder_block_out_channels=(8,) * 4,
        decode_block_out_channels=(8,) * 4,
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=2,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        latents_mean=None,
        latents_std=None,
    ).eval()
    latents = latents_of_smooth_clips(vae)
    statistics = (latents.mean(1), latents.std(1))
    mean, std = (values.repeat_interleave(_LATENT_FRAMES).tolist() for values in statistics)
    vae.register_to_config(latents_mean=mean, latents_std=std)
    return vae


TINY = {
    "cosmos": partial(_predict1, CosmosTextToWorldPipeline, condition=0),
    "cosmos-v2w": partial(_predict1, CosmosVideoToWorldPipeline, condition=1),
    "cosmos2-t2i": partial(_predict2, Cosmos2TextToImagePipeline, condition=0),
    "cosmos2-v2w": partial(_predict2, Cosmos2VideoToWorldPipeline, condition=1),
    **({"anima": _anima} if hasattr(diffusers, "AnimaModularPipeline") else {}),
}
