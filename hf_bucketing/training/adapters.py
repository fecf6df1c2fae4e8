"""Low-rank adapters (LoRA, Hu et al., 2021) on the transformer, by peft, saved as diffusers loads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict

from ..errors import BucketingError
from ..files import complete_parts

ADAPTER = "default"
"""The adapter's name, which diffusers also gives one that it loads without a name."""

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""Projections of every attention, as diffusers names them."""


def add_lora(
    pipeline: Any,
    *,
    rank: int,
    alpha: int | None = None,
    targets: Sequence[str] = TARGETS,
    component: str = "transformer",
) -> None:
    """Freeze a pipeline's transformer and add trainable low-rank adapters to it.

    Args:
        pipeline (`DiffusionPipeline`): With a `transformer`, and able to load LoRA weights.
        rank (`int`): Of the adapters.
        alpha (`int`, *optional*): Adapters are scaled by `alpha ÷ rank`; by default `rank`.
        targets (sequence of `str`): Ends of the names of the linear layers that get one.
        component (`str`): Name of the transformer in the pipeline.

    Raises:
        BucketingError: If the pipeline cannot load LoRA weights, or no layer has such a name.
    """
    if not hasattr(pipeline, "save_lora_weights"):
        raise BucketingError(
            f"{type(pipeline).__name__} cannot load LoRA weights; train the whole transformer (leave out lora_rank)."
        )
    transformer = getattr(pipeline, component)
    transformer.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha or rank, init_lora_weights="gaussian", target_modules=list(targets))
    try:
        transformer.add_adapter(config, adapter_name=ADAPTER)
    except ValueError as error:
        raise BucketingError(f"No adapter fits lora_targets={list(targets)}: {error}") from error


def save_lora(pipeline: Any, folder: str | os.PathLike[str], *, component: str = "transformer") -> None:
    """Write a transformer's adapters as `pytorch_lora_weights.safetensors`, for `pipeline.load_lora_weights(folder)`.

    Those of `transformer_2` are loaded with `load_into_transformer_2=True`.
    """
    transformer = getattr(pipeline, component)
    with complete_parts(folder) as partial:
        type(pipeline).save_lora_weights(
            str(partial),
            transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name=ADAPTER),
            transformer_lora_adapter_metadata=transformer.peft_config[ADAPTER].to_dict(),
        )
