"""A pipeline of Anima with small random weights."""

from __future__ import annotations

from diffusers import AnimaModularPipeline, AnimaTextConditioner, FlowMatchEulerDiscreteScheduler
from transformers import ByT5Tokenizer, Qwen3Model

from .components import TEXT_DIM, chat_components, qwen_vae
from .cosmos import transformer


def _anima() -> AnimaModularPipeline:
    t5_tokenizer = ByT5Tokenizer()
    pipeline = AnimaModularPipeline()
    pipeline.update_components(
        **chat_components(Qwen3Model, "", 1),
        t5_tokenizer=t5_tokenizer,
        text_conditioner=AnimaTextConditioner(
            source_dim=TEXT_DIM,
            target_dim=TEXT_DIM,
            model_dim=16,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=len(t5_tokenizer),
        ).eval(),
        vae=qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer(0, extra_pos_embed_type=None),
    )
    return pipeline


TINY = {"anima": _anima}
