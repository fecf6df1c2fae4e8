"""What a run prepares once: accelerator, model, step, optimizer, schedule."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import diffusers
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration

from ..buckets.sizes import LatentSpec
from ..errors import BucketingError, PackingError, quoted
from ..models.enable import enable_packing
from ..models.recipe import Recipe
from .adapters import add_lora, checkpoint_adapters_only, load_lora, read_lora
from .checkpoint import SHARDED
from .config import TrainingConfig
from .data import TrainingData
from .optimizers import make_optimizer
from .steps import BucketStep, PackStep, Step
from .validation import Validation, parse_sizes

logger = get_logger(__name__)


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Return the accelerator of a run; other processes than the first stay silent."""
    folder = Path(config.output_dir)
    accelerator = Accelerator(
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        mixed_precision=config.mixed_precision,
        log_with=None if config.report_to == "none" else config.report_to,
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
    )
    _check_sharding(config, accelerator)
    if not accelerator.is_local_main_process:
        datasets.disable_progress_bars()
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
    return accelerator


def _check_sharding(config: TrainingConfig, accelerator: Accelerator) -> None:
    """Raise BucketingError on settings that need all weights in a process, where they are sharded."""
    given = [name for name in ("lora_rank", "ema_decay", "validation_prompts") if getattr(config, name) is not None]
    if given and accelerator.distributed_type in SHARDED:
        raise BucketingError(
            f"{quoted(given)} need all weights in each process, which {accelerator.distributed_type.value} does "
            "not keep; leave them out, or use DDP."
        )


def load_recipe(config: TrainingConfig, recipe: type[Recipe]) -> Recipe:
    """Load the pipeline as it is."""
    return recipe.load(
        config.pretrained_model_name_or_path,
        max_sequence_length=config.max_sequence_length,
        trained=config.trained_component,
    )


def prepare_recipe(config: TrainingConfig, recipe: Recipe, accelerator: Accelerator) -> TrainingConfig:
    """Choose what of the transformer is trained, and move the frozen parts to the device.

    Returns:
        [`TrainingConfig`]: The settings with the alpha of the adapters.

    Raises:
        BucketingError: If adapters cannot be added, or do not fit the file that they start from.
    """
    if config.lora_rank is not None:
        config = _add_adapters(config, recipe)
        checkpoint_adapters_only(accelerator, recipe.pipeline, component=recipe.trained)
    if config.gradient_checkpointing:
        recipe.transformer.enable_gradient_checkpointing()
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = half.get(accelerator.mixed_precision, torch.float32)
    recipe.to(accelerator.device, dtype=dtype)
    if config.validation_prompts is not None:  # which call all transformers
        for component in recipe.frozen_transformers():
            component.to(accelerator.device, dtype=dtype)
    return config


def _add_adapters(config: TrainingConfig, recipe: Recipe) -> TrainingConfig:
    pipeline, path = recipe.pipeline, config.init_from_adapters
    adapters = None if path is None else read_lora(pipeline, path)
    alpha = config.lora_alpha or (config.lora_rank if adapters is None else adapters.alpha)
    assert config.lora_rank is not None, "asked for"
    options: dict[str, Any] = {"rank": config.lora_rank, "alpha": alpha, "targets": config.lora_targets.split(",")}
    add_lora(pipeline, component=recipe.trained, **options)
    if adapters is not None:
        load_lora(pipeline, adapters, component=recipe.trained)
        logger.info(f"Starting from the adapters of {len(adapters.layers)} layers in {adapters.path}")
    return replace(config, lora_alpha=alpha)


def make_step(config: TrainingConfig, recipe: Recipe) -> Step:
    """Return what computes the losses of a batch; for packs, packing is enabled."""
    options: dict[str, Any] = {
        "recipe": recipe,
        "objective": recipe.objective(
            weighting_scheme=config.weighting_scheme, snr_gamma=config.snr_gamma, seed=config.seed
        ),
        "caption_dropout": config.caption_dropout,
        "seed": config.seed,
    }
    if config.batching == "bucket":
        return BucketStep(**options)
    return PackStep(**options, packing=enable_packing(recipe.transformer, strip_length=config.strip_length))


def check_positions(step: Step, data: TrainingData, spec: LatentSpec) -> None:
    """Raise BucketingError if a sample of a pack lies beyond the positions that the model has."""
    if not isinstance(step, PackStep):
        return
    ids, counts = np.unique(data.bucket_ids[data.num_tokens > 0], return_counts=True)
    for bucket_id, count in zip(ids.tolist(), counts.tolist(), strict=True):
        size = data.table.size(bucket_id)
        try:
            step.packing.family.check_grids(step.recipe.transformer, [spec.grid(size)])
        except PackingError as error:
            raise BucketingError(
                f"The model cannot take the {count} samples of {size}: {error} Clips that are too long are cut by "
                "--max_frames of scripts/prepare_dataset.py."
            ) from error


def optimizer_of(config: TrainingConfig, transformer: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name."""
    return make_optimizer(
        transformer.parameters(),
        name=config.optimizer,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.adam_weight_decay,
        eps=config.adam_epsilon,
    )


def make_validation(config: TrainingConfig, spec: LatentSpec) -> Validation | None:
    """Return what renders the validation prompts, if there are any."""
    if not config.validation_prompts:
        return None
    return Validation(
        prompts=config.validation_prompts,
        sizes=parse_sizes(config.validation_sizes, spec),
        num_inference_steps=config.validation_inference_steps,
        guidance_scale=config.validation_guidance_scale,
        fps=config.validation_fps,
        seed=config.seed,
        folder=Path(config.output_dir) / "validation",
    )


def flat(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings as trackers take them."""
    values = {name: "none" if value is None else value for name, value in asdict(config).items()}
    return {name: "; ".join(value) if isinstance(value, list) else value for name, value in values.items()}
