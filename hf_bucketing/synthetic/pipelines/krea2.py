"""A pipeline of Krea 2 with small random weights."""

from __future__ import annotations

from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from tokenizers import AddedToken
from transformers import Qwen3VLModel

from ...models.families.flux import BLOCK
from .components import CHANNELS, TEXT_DIM, empty_pipeline, qwen3_vl, qwen_vae, template_tokenizer

LAYERS = (1, 3)
"""Layers of the text encoder that the transformer is given."""


def _text_to_image() -> DiffusionPipeline:
    empty = empty_pipeline(Krea2Pipeline)
    tokenizer = template_tokenizer(empty.prompt_template_encode_prefix, empty.prompt_template_encode_start_idx)
    suffix, count = empty.prompt_template_encode_suffix, empty.prompt_template_encode_num_suffix_tokens
    tokenizer.add_tokens([AddedToken(suffix[: len(suffix) - count + 1], normalized=False)])
    return Krea2Pipeline(
        tokenizer=tokenizer,
        text_encoder=qwen3_vl(len(tokenizer), kind=Qwen3VLModel),
        vae=qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64, base_shift=0.5, max_shift=1.15
        ),
        text_encoder_select_layers=LAYERS,
        is_distilled=False,
        patch_size=BLOCK,
        transformer=Krea2Transformer2DModel(
            in_channels=CHANNELS * BLOCK**2,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            timestep_embed_dim=16,
            text_hidden_dim=TEXT_DIM,
            num_text_layers=len(LAYERS),
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
    )


TINY = {"krea2": _text_to_image}
