"""Components of pipelines with small random weights, for the demo and tests: text encoders, VAEs, schedulers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
    UMT5EncoderModel,
)

from ...models.families.flux import BLOCK

CHANNELS = 4
"""Channels of a latent."""
TEXT_DIM = 32
"""Channels of a text embedding."""
CLIP_DIM = 16
"""Channels of an embedding of CLIP, pooled or not."""


def t5_components(encoder: type[T5EncoderModel | UMT5EncoderModel]) -> dict[str, Any]:
    """Return a tokenizer that works on bytes and needs no vocabulary file, and a T5 of two layers."""
    tokenizer = ByT5Tokenizer()
    shape = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = encoder.config_class(vocab_size=len(tokenizer), **shape)
    return {"tokenizer": tokenizer, "text_encoder": encoder(config).eval()}


def clip_components(encoder: type[CLIPTextModel | CLIPTextModelWithProjection]) -> dict[str, Any]:
    """Return a tokenizer of CLIP that knows single letters, and a text encoder of two layers for 77 tokens."""
    tokenizer, shape = clip_tokenizer(), {"hidden_size": CLIP_DIM, "projection_dim": CLIP_DIM, "intermediate_size": 32}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = encoder.config_class(vocab_size=len(tokenizer), **depth, **shape, **ends)
    return {"tokenizer": tokenizer, "text_encoder": encoder(config).eval()}


def clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer whose vocabulary are the letters, inside and at the end of a word, without merges."""
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:  # releases of transformers differ in what the class itself takes
        Path(folder, "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=77)


def template_tokenizer(
    prefix: str, count: int, *, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that makes `count` tokens of what a pipeline's template puts before a prompt.

    Pipelines crop that many tokens. All of them but the first are single characters. `special_tokens` are further
    tokens by the name of the tokenizer's attribute.
    """
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(prefix[: len(prefix) - count + 1], normalized=False)])
    options: dict[str, Any] = {"chat_template": chat_template, "pad_token": "<|pad|>", "padding_side": "right"}
    if special_tokens is not None:
        options["extra_special_tokens"] = dict(special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


BEGIN = "<|im_start|>"
"""Token that begins a message of Qwen's chat."""


def message_tokenizer(content: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose chat is, of every message, one token that begins it and what `content` names."""
    chat = "{% for message in messages %}" + BEGIN + "{{ " + content + " }}{% endfor %}"
    return template_tokenizer(BEGIN, 1, chat_template=chat)


def empty_pipeline(kind: Any) -> Any:
    """Return a pipeline of a class without components, to read the templates of its prompts."""
    parameters = signature(kind).parameters.values()
    return kind(**{parameter.name: None for parameter in parameters if parameter.default is parameter.empty})


VISION_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "image_token": "<|image_pad|>",
    "vision_end_token": "<|vision_end|>",
}
"""Tokens around a picture and of its parts in a prompt of Qwen2.5-VL."""


def causal_encoder(kind: Any, tokenizer: Any) -> Any:
    """Return a text encoder of three layers, of a class of transformers such as `Qwen3Model`, for a tokenizer."""
    config = kind.config_class(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
    )
    return kind(config).eval()


def chat_components(kind: Any, before: str, count: int) -> dict[str, Any]:
    """Return a tokenizer with the chat of Qwen3, and a text encoder of three layers, of a class such as `Qwen3Model`.

    `before` stands before each prompt; with the chat's own words it is `count` tokens.
    """
    user, reply = "<|im_start|>user\n", "<|im_end|>\n"
    chat = "{% for message in messages %}" + user + "{{ message['content'] }}" + reply + "{% endfor %}"
    tokenizer = template_tokenizer(user + before, count, chat_template=chat)
    return {"tokenizer": tokenizer, "text_encoder": causal_encoder(kind, tokenizer)}


def qwen_components(pipeline: Any) -> dict[str, Any]:
    """Return a tokenizer for the template of a pipeline's class, and a Qwen2.5-VL of three layers.

    Pipelines that have a processor also get one, which shows the model pictures of at most six tokens.
    """
    empty = empty_pipeline(pipeline)
    template = getattr(empty, "prompt_template_encode", None) or empty.prompt_template
    prefix, _, _ = template.partition("{}")
    prefix, _, _ = prefix.partition(VISION_TOKENS["vision_start_token"])
    vision_tokens = VISION_TOKENS if "processor" in empty.components else None
    tokenizer = template_tokenizer(prefix, empty.prompt_template_encode_start_idx, special_tokens=vision_tokens)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in (vision_tokens or {}).items()}
    processor = {} if vision_tokens is None else {"processor": picture_processor(tokenizer)}
    return {"tokenizer": tokenizer, "text_encoder": qwen_encoder(len(tokenizer), **ids), **processor}


def qwen_encoder(vocab_size: int, **ids: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a Qwen2.5-VL of three layers, with the numbers of the tokens around a picture."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.1, "rope_parameters": rope}
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 3}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    config = Qwen2_5_VLConfig(
        text_config={"vocab_size": vocab_size, **shape, **heads},
        vision_config={**vision, "fullatt_block_indexes": [0]},
        **ids,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def picture_processor(tokenizer: PreTrainedTokenizerFast, *, side: int = 28, chat_template: str | None = None) -> Any:
    """Return a processor that does with pictures what Qwen2-VL's does, whose part for videos needs torchvision.

    A token covers `side` pixels each way, and a picture has six at most.
    """
    from transformers import PaddleOCRVLProcessor, Qwen2VLImageProcessor

    pixels = {"min_pixels": side**2, "max_pixels": 6 * side**2}
    image_processor = Qwen2VLImageProcessor(patch_size=side // 2, **pixels)
    return PaddleOCRVLProcessor(image_processor, tokenizer, chat_template=chat_template)


def qwen3_vl(vocab_size: int, *, kind: Any, layers: int = 3, **ids: int) -> Any:
    """Return a Qwen3-VL of a few layers, of a class that an older transformers may not have.

    `ids` are the numbers of the tokens around a picture.
    """
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": layers, "initializer_range": 0.1}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    config = Qwen3VLConfig(
        text_config={"vocab_size": vocab_size, **shape, **heads},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **ids,
    )
    return kind(config).eval()


def numbered(components: dict[str, Any], number: int) -> dict[str, Any]:
    """Return components under the names that a pipeline gives its second or third text encoder and tokenizer."""
    return {f"{name}_{number}": component for name, component in components.items()}


def wan_vae(**config: Any) -> AutoencoderKLWan:
    """Return a VAE of Wan, by default of 2.1, whose latents have mean 0 and deviation 1, as those of a trained one."""
    statistics = {"latents_mean": [0.0] * CHANNELS, "latents_std": [1.0] * CHANNELS}
    return with_statistics(AutoencoderKLWan(**_CAUSAL, **statistics, **config).eval())


def qwen_vae() -> AutoencoderKLQwenImage:
    """Return a VAE of Qwen-Image whose latents have mean 0 and deviation 1, as those of a trained one."""
    return with_statistics(AutoencoderKLQwenImage(**_CAUSAL).eval())


_CAUSAL = {"base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 0}


def with_statistics(vae: Any, *, frames: int = 5, channels: int = 3) -> Any:
    """Return a VAE whose latents have mean 0 and deviation 1 by the statistics of its configuration."""
    latents = latents_of_smooth_clips(vae, frames=frames, channels=channels)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
    return vae


def with_scale(vae: Any, *, images: bool = False) -> Any:
    """Return a VAE, of clips or of images, whose latents have deviation 1 once scaled by its configuration."""
    vae.register_to_config(scaling_factor=1 / float(latents_of_smooth_clips(vae, images=images).std()))
    return vae


def hunyuan_vae() -> AutoencoderKLHunyuanVideo:
    """Return a VAE of HunyuanVideo whose latents have deviation 1, once scaled."""
    shape = {"latent_channels": CHANNELS, "block_out_channels": (8,) * 4, "layers_per_block": 0, "norm_num_groups": 4}
    return with_scale(AutoencoderKLHunyuanVideo(**shape).eval())


def image_vae(**config: Any) -> AutoencoderKL:
    """Return a VAE of images whose latents have deviation 1, once scaled."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    channels = {"latent_channels": CHANNELS, "block_out_channels": (8,) * 4, "norm_num_groups": 4}
    return with_scale(AutoencoderKL(**(blocks | channels | config)).eval(), images=True)


@torch.no_grad()
def block_vae() -> AutoencoderKLFlux2:
    """Return a VAE of Flux.2 with the statistics of its latents by block, as the trained one has."""
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (8,) * 4,
    }
    vae = AutoencoderKLFlux2(**blocks, latent_channels=CHANNELS, norm_num_groups=4).eval()
    latents = latents_of_smooth_clips(vae, images=True)
    for statistic, values in (("running_mean", latents.mean(1)), ("running_var", latents.var(1))):
        spread = 1 + 0.1 * torch.rand(CHANNELS * BLOCK**2)
        getattr(vae.bn, statistic).copy_(values.repeat_interleave(BLOCK**2) * spread)
    return vae


@torch.no_grad()
def latents_of_smooth_clips(vae: Any, *, images: bool = False, frames: int = 5, channels: int = 3) -> torch.Tensor:
    """Return the latents of eight random smooth clips of 64×64 pixels, or of their first frames: `(C, numbers)`."""
    coarse = torch.rand(8, channels, 3, 6, 6) * 2 - 1
    clips = torch.nn.functional.interpolate(coarse, size=(5, 64, 64), mode="trilinear")
    pixels = clips[:, :, 0] if images else clips[:, :, :frames]
    latents: torch.Tensor = vae.encode(pixels).latent_dist.mode().transpose(0, 1).flatten(1)
    return latents
