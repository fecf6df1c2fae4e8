"""A pipeline of Kandinsky 6 with small random weights, without what makes sound."""

from __future__ import annotations

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
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


def _text_to_video() -> DiffusionPipeline:
    tokenizer = template_tokenizer(stock._PROMPT_TEMPLATE.partition("{}")[0], stock._QWEN_CROP_START)
    return Kandinsky6TI2VAPipeline(
        tokenizer=tokenizer,
        text_encoder=qwen_encoder(len(tokenizer)),
        **numbered(clip_components(CLIPTextModel), 2),
        vae=hunyuan_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=kandinsky_transformer(
            Kandinsky6Transformer3DModel,
            Kandinsky6Modulation,
            in_audio_dim=6,
            out_audio_dim=6,
            ca_rope=True,
            cross_gates=True,
            fix_modulation=True,
            visual_token_type_num_embeddings=2,
        ),
    )


TINY = {"kandinsky6": _text_to_video}
