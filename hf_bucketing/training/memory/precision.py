"""Parts of a pipeline that a run loads, and their precision."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from ...columns.prepared import PreparedDataset
from ...errors import BucketingError
from ...models.loading import PARTS, Loading, Part
from ..config import TrainingConfig
from .quantization import quantization_of
from .sharding import loads_empty
from .shards import SHARDED

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def trained_dtype(config: TrainingConfig) -> torch.dtype:
    """Return the precision of what is trained."""
    return torch.bfloat16 if config.memory.trained_dtype == "bf16" else torch.float32


def parts_called(config: TrainingConfig) -> tuple[Part, ...]:
    """Return the frozen parts of the pipeline that every step calls: those whose results are not cached.

    Raises:
        BucketingError: If there is no prepared data set.
    """
    cache = None if config.stream.streaming else PreparedDataset.load(config.dataset_dir).cache
    if cache is None:
        return "text_encoders", "vae"
    return ("text_encoders",) if cache.text_model is None else ()


def loading_of(config: TrainingConfig, accelerator: Accelerator, called: tuple[Part, ...]) -> Loading:
    """Return what to load: what is trained, what steps call, and for validation everything where it renders.

    Frozen weights are loaded in the precision of activations.

    Raises:
        BucketingError: If settings of precision contradict each other, or `vae_tiling` has no effect.
    """
    memory, mixed = config.memory, accelerator.mixed_precision
    if memory.trained_dtype == "bf16" and mixed != "bf16":
        raise BucketingError(f'`trained_dtype="bf16"` needs `mixed_precision="bf16"`, not "{mixed}".')
    validates = config.validation.validation_prompts is not None
    if memory.vae_tiling and not validates and "vae" not in called:
        raise BucketingError(
            "Omit `vae_tiling`: latents are cached and nothing is rendered, so that no VAE runs. It is a setting of "
            "scripts/cache_latents.py too."
        )
    renders = validates and (accelerator.is_main_process or accelerator.distributed_type in SHARDED)
    dtype = _HALF.get(mixed, torch.float32)
    return Loading(
        parts=PARTS if renders else ("trained", *called),
        dtype=dtype,
        trained_dtype=trained_dtype(config) if config.adapters.lora_rank is None else dtype,
        quantization=quantization_of(config, dtype),
        empty=loads_empty(accelerator),
        vae_tiling=memory.vae_tiling and (renders or "vae" in called),
    )
