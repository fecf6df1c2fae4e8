"""Rules for settings that changed since the checkpoint: applied, refused by name, or free to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from accelerate import Accelerator

from ..errors import BucketingError
from ..placement.shards import SHARDED
from ..settings import changed
from .config import TrainingConfig

Rule = Literal["applied", "equal", "plan", "weights", "free"]

_NAMES: dict[Rule, tuple[str, ...]] = {
    # Take effect from the next step on, and are logged: the optimizer, the length of the run, the views
    # and the order of tags.
    "applied": (
        *("learning_rate", "lr_scheduler", "lr_warmup_steps", "adam_beta1", "adam_beta2", "adam_weight_decay"),
        *("adam_epsilon", "max_grad_norm", "num_train_epochs", "max_train_steps", "gradient_accumulation_steps"),
        *("max_skipped_steps", "random_crop", "frame_picking", "flip_probability", "video_decoder", "caption_dropout"),
        *("shuffle_tags", "tag_separator", "keep_tags"),
        *(
            "on_error",
            "max_errors",
            "max_error_share",
            "gradient_checkpointing",
            "offload_blocks",
            *("offload_activations", "vae_tiling"),
        ),
    ),
    # Decide the meaning of the weights and of the optimizer's state in a checkpoint, or the objective. The sampler's
    # state does not know the sizes that random_resize draws: it holds the tokens of one epoch. With another split, the
    # model would train on what was held out.
    "equal": (
        *("batching", "trained_component", "mixed_precision", "lora_rank", "lora_alpha", "lora_targets", "ema_decay"),
        *(
            "optimizer",
            "weighting_scheme",
            "shift",
            "guidance",
            "snr_gamma",
            "loss_reduction",
            "max_sequence_length",
            "random_resize",
        ),
        *("positions", "base_size", "token_drop_rate", "token_drop_mode", "trained_dtype", "quantize_base"),
        "validation_split",
        "streaming",
    ),
    # The sampler refuses to load its state if its plan differs. Paths may change, rows may not.
    "plan": (
        *("dataset_dir", "train_batch_size", "max_tokens", "remainder", "pack_strategy", "balance", "strip_length"),
        *("longest_first", "seed", "context_parallel_degree", "cost_model"),
        *("shuffle_buffer", "max_buffered", "max_buffered_bytes", "steps_per_epoch"),
    ),
    # Compared by a fingerprint of the weights, so that a model may move to another folder.
    "weights": ("pretrained_model_name_or_path",),
    # Change nothing about what is learned.
    "free": (
        *("output_dir", "dry_run", "dataloader_num_workers", "dataloader_timeout"),
        *("validation_prompts", "validation_images", "validation_sizes", "validation_steps"),
        *(
            "validation_inference_steps",
            "validation_guidance_scale",
            "validation_fps",
            *("validation_dataset_dir", "validation_loss_steps", "validation_noise_levels"),
            "checkpointing_steps",
            "checkpoints_total_limit",
        ),
        *("resume_from_checkpoint", "init_from_adapters", "report_to", "attention_backend"),
        *("push_to_hub", "hub_model_id", "hub_private_repo"),
    ),
}

ON_RESUME: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names}
"""The rule of each setting of [`TrainingConfig`]."""

_LEFT_OPEN: dict[str, object] = {"max_tokens": "auto", "lora_alpha": None, "lora_targets": None}
"""Values that let the run choose a setting: a resumed run takes the choice of the saved run."""

_NOT_SETTINGS = ("distributed_type",)
"""Values that must stay equal beside the settings."""


def settings_of(config: TrainingConfig, accelerator: Accelerator) -> dict[str, Any]:
    """Return the settings of a run as JSON values, including those that accelerate chose, for its checkpoint."""
    kind = accelerator.distributed_type
    return {
        **config.flat(),
        "mixed_precision": accelerator.mixed_precision,
        "distributed_type": kind.value if kind in SHARDED else "not sharded",
    }


def resumed_config(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
    """Return the settings of a resumed run, with those left open taken from the saved run.

    Precision and distributed type of the accelerator count as settings, as in [`settings_of`].

    Raises:
        BucketingError: If a setting that must stay equal differs; the message names its value then and now.
    """
    saved = {"streaming": False, **saved}  # checkpoints of earlier releases do not name it
    given = config.flat()
    left_open = {
        name: saved[name] for name, value in _LEFT_OPEN.items() if given[name] == value and saved[name] is not None
    }
    present = {**settings_of(config, accelerator), **left_open}
    fixed = [*(name for name, rule in ON_RESUME.items() if rule == "equal"), *_NOT_SETTINGS]
    differences = _differences(saved, present, fixed)
    if differences:
        listed = "; ".join(f"{name} was {_text(was)} and is {_text(now)}" for name, was, now in differences)
        raise BucketingError(
            f"The checkpoint cannot be resumed with other settings: {listed}. Give those of the saved run, or start "
            "a new run in another --output_dir (--init_from_adapters starts from the adapters of this one)."
        )
    return changed(config, **left_open)


def check_weights(saved: Mapping[str, str], present: Mapping[str, str], *, source: str) -> None:
    """Refuse to resume a run on other weights than it began with: fingerprints by component of the pipeline.

    Compared are the components that both runs load; which ones these are depends on caches and validation.

    Raises:
        BucketingError: If components differ; the message names them.
    """
    differences = _differences(saved, present, sorted(saved.keys() & present.keys()))
    if differences:
        listed = "; ".join(f"{name} had fingerprint {was} and has {now}" for name, was, now in differences)
        raise BucketingError(
            f"The run began with other weights than those of {source}: {listed}. Give the pipeline that it began with "
            "(--pretrained_model_name_or_path), or start a new run in another --output_dir (--init_from_adapters "
            "starts from the adapters of this one)."
        )


def applied_changes(saved: Mapping[str, Any], config: TrainingConfig, accelerator: Accelerator) -> list[str]:
    """Return the settings that take a new value, each as `"learning_rate 0.0001 → 5e-05"`."""
    names = [name for name, rule in ON_RESUME.items() if rule == "applied"]
    differences = _differences(saved, settings_of(config, accelerator), names)
    return [f"{name} {_text(was)} → {_text(now)}" for name, was, now in differences]


def _differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, object, object]]:
    values = ((name, saved.get(name), present.get(name)) for name in names)
    return [(name, was, now) for name, was, now in values if was != now]


def _text(value: object) -> str:
    return "not given" if value is None else str(value)
