"""The part of scripts/benchmark_gpu.py that compares planned with measured memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.placement.settings import MemoryConfig
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.settings import PlanConfig

from .models import RANK, Scale, load_transformer, make_transformer


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One combination whose memory is planned and measured.

    Attributes:
        lora: Whether adapters are trained, or the whole transformer.
        checkpointing: Whether the backward pass recomputes activations.
        trained_dtype, quantize_base: As in the training script.
        long: Whether samples are long clips, or short ones.
        samples: Samples of the step.
    """

    lora: bool = True
    checkpointing: bool = True
    trained_dtype: str = "float32"
    quantize_base: str | None = None
    long: bool = True
    samples: int = 1


SETTINGS = {
    "LoRA": Setting(),
    "LoRA, 4 samples": Setting(samples=4),
    "LoRA, no checkpointing": Setting(checkpointing=False, long=False),
    "LoRA, int8 base": Setting(quantize_base="int8"),
    "LoRA, nf4 base": Setting(quantize_base="nf4"),
    "full": Setting(lora=False),
    "full, bf16": Setting(lora=False, trained_dtype="bf16"),
    "full, no checkpointing": Setting(lora=False, checkpointing=False, long=False),
}


def plan(scale: Scale, folder: Path, setting: Setting) -> float:
    """Return the planned peak in GiB, without the constant for the CUDA context, which torch does not count."""
    planned = plan_memory(
        str(folder),
        PlanConfig(
            sample_size=list(size_of(scale, setting)),
            train_batch_size=setting.samples,
            cached="all",
            max_sequence_length=scale.text_length,
            device=scale.device,  # type: ignore[arg-type]
            memory=MemoryConfig(
                gradient_checkpointing=setting.checkpointing,
                trained_dtype=setting.trained_dtype,  # type: ignore[arg-type]
                quantize_base=setting.quantize_base,  # type: ignore[arg-type]
            ),
            adapters=AdapterConfig(lora_rank=RANK if setting.lora else None),
        ),
    )
    return (planned.total - planned.peak.context) / 2**30


def size_of(scale: Scale, setting: Setting) -> tuple[int, int, int]:
    """Return frames, height and width of the samples of a setting."""
    return scale.long_clip if setting.long else scale.short_clip


def model_of(scale: Scale, folder: Path, setting: Setting) -> Any:
    """Return the transformer of a setting, without adapters."""
    if setting.quantize_base is not None:
        return load_transformer(scale, folder, setting.quantize_base)
    half = setting.lora or setting.trained_dtype == "bf16"
    return make_transformer(scale, layers=scale.layers, dtype=torch.bfloat16 if half else torch.float32)
