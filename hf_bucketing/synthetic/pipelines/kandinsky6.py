"""A pipeline of Kandinsky 6 with small random weights."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
    MMAudioVAE,
    MMAudioVocoder,
)
from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6Modulation
from diffusers.pipelines.kandinsky6 import pipeline_kandinsky6_ti2va as stock
from transformers import CLIPTextModel

from .components import (
    clip_components,
    hunyuan_vae,
    numbered,
    qwen_encoder,
    template_tokenizer,
)
from .kandinsky5 import kandinsky_transformer

_SOUND = 6
"""Channels of latents of sound."""


def _text_to_video() -> DiffusionPipeline:
    tokenizer = template_tokenizer(stock._PROMPT_TEMPLATE.partition("{}")[0], stock._QWEN_CROP_START)
    return Kandinsky6TI2VAPipeline(
        tokenizer=tokenizer,
        text_encoder=qwen_encoder(len(tokenizer)),
        **numbered(clip_components(CLIPTextModel), 2),
        vae=hunyuan_vae(),
        audio_vae=MMAudioVAE(
            mel_bins=8,
            latent_channels=_SOUND,
            hidden_channels=8,
            channel_multipliers=(1, 1),
            layers_per_block=1,
            sample_rate=16000,
            n_fft=1024,
            hop_length=320,
        ).eval(),
        vocoder=MMAudioVocoder(
            num_mels=8,
            upsample_initial_channel=32,
            upsample_rates=(8, 8, 5),
            upsample_kernel_sizes=(16, 16, 9),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3, 5),),
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=kandinsky_transformer(
            Kandinsky6Transformer3DModel,
            Kandinsky6Modulation,
            in_audio_dim=_SOUND,
            out_audio_dim=_SOUND,
            ca_rope=True,
            cross_gates=True,
            fix_modulation=True,
            visual_token_type_num_embeddings=2,
        ),
    )


TINY = {"kandinsky6": _text_to_video}
