"""All settings of a training run: the flags of `scripts/train_text_to_video.py`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from ..errors import BucketingError


def _flag(default: Any = MISSING, *, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of [`train`][hf_bucketing.training.train], named as the flags of diffusers' training examples.

    Raises:
        BucketingError: On an impossible value or combination.
    """

    pretrained_model_name_or_path: str = _flag(help="A diffusers pipeline, on the hub or in a folder.")
    dataset_dir: str = _flag(help="A folder that scripts/prepare_dataset.py wrote.")
    output_dir: str = _flag(help="Receives the pipeline, checkpoints and logs.")
    batching: Literal["bucket", "pack"] = _flag("bucket", help="Stacks of one size, or packs of any sizes.")
    train_batch_size: int = _flag(4, help="Samples per process and step, for buckets without --capacity.")
    capacity: int | None = _flag(None, help="Tokens per process and step; packs need it.")
    strip_length: int = _flag(64, help="Tokens per strip of a pack.")
    num_train_epochs: int = _flag(1, help="Unused if --max_train_steps is given.")
    max_train_steps: int | None = _flag(None, help="Optimizer steps.")
    gradient_accumulation_steps: int = _flag(1, help="Batches per optimizer step.")
    gradient_checkpointing: bool = _flag(False, help="Compute blocks again in backward, to save memory.")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = _flag(None, help="By default accelerate's own setting.")
    learning_rate: float = _flag(1e-4, help="Of AdamW.")
    lr_scheduler: str = _flag("constant", help="One of diffusers' schedules, such as cosine.")
    lr_warmup_steps: int = _flag(0, help="Optimizer steps.")
    adam_beta1: float = _flag(0.9, help="Of AdamW.")
    adam_beta2: float = _flag(0.999, help="Of AdamW.")
    adam_weight_decay: float = _flag(1e-2, help="Of AdamW.")
    adam_epsilon: float = _flag(1e-8, help="Of AdamW.")
    max_grad_norm: float = _flag(1.0, help="Gradients are clipped to this norm.")
    weighting_scheme: Literal["logit_normal", "uniform"] = _flag("logit_normal", help="Draw of the noise level.")
    max_sequence_length: int = _flag(512, help="Text tokens per caption, zero-padded as the pipeline does.")
    seed: int = _flag(0, help="Of plans, crops, noise and timesteps.")
    dataloader_num_workers: int = _flag(2, help="Decoding processes per training process.")
    dataloader_timeout: int = _flag(600, help="Seconds without a batch after which a worker counts as hung; 0: never.")
    on_error: Literal["raise", "replace"] = _flag(
        "raise", help="An unreadable sample ends the run, or is replaced by one of its bucket, and logged."
    )
    max_errors: int = _flag(100, help="Unreadable samples in a row that are borne.")
    max_error_share: float = _flag(0.01, help="Share of the data set that may be unreadable in an epoch.")
    checkpointing_steps: int | None = _flag(None, help="Optimizer steps between checkpoints; none by default.")
    checkpoints_total_limit: int | None = _flag(None, help="Older checkpoints are removed.")
    resume_from_checkpoint: str | None = _flag(None, help='A checkpoint\'s name or path, or "latest".')
    report_to: str = _flag("tensorboard", help='One of accelerate\'s trackers, or "none".')

    def __post_init__(self) -> None:
        choices = {
            "batching": ("bucket", "pack"),
            "mixed_precision": (None, "no", "fp16", "bf16"),
            "weighting_scheme": ("logit_normal", "uniform"),
            "on_error": ("raise", "replace"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise BucketingError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if self.batching == "pack" and self.capacity is None:
            raise BucketingError("Packing needs capacity, the tokens per process and step (--capacity).")
        at_least_one = (
            *("train_batch_size", "capacity", "strip_length", "num_train_epochs", "max_train_steps"),
            *("gradient_accumulation_steps", "max_sequence_length"),
            *("checkpointing_steps", "checkpoints_total_limit"),
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BucketingError(f"{name} must be at least 1, got {value}.")
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise BucketingError("lr_warmup_steps needs another schedule: --lr_scheduler constant_with_warmup.")
        for name in ("seed", "dataloader_num_workers", "dataloader_timeout"):
            if getattr(self, name) < 0:
                raise BucketingError(f"{name} must not be negative, got {getattr(self, name)}.")
