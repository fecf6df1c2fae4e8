"""All settings of a training run: the flags of `scripts/train_text_to_video.py`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from ..errors import BucketingError, quoted
from ..media.decode import DecoderName, check_decoder


def _flag(default: Any = MISSING, *, help: str, argument: str | None = None) -> Any:
    """Declare a flag; `argument` is what the library calls the setting, if that is another name."""
    return field(default=default, metadata={"help": help, "argument": argument})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of [`train`][hf_bucketing.training.train], named as the flags of diffusers' training examples.

    Raises:
        BucketingError: On an impossible value or combination, or a video decoder that cannot be loaded.
    """

    pretrained_model_name_or_path: str = _flag(help="A diffusers pipeline, on the hub or in a folder.")
    dataset_dir: str = _flag(help="A folder that scripts/prepare_dataset.py wrote.")
    output_dir: str = _flag(help="Receives the pipeline or the adapters, checkpoints and logs.")
    dry_run: bool = _flag(False, help="Print plan, cost and an estimate of memory, and train nothing.")

    batching: Literal["bucket", "pack"] = _flag("bucket", help="Stacks of one size, or packs of any sizes.")
    train_batch_size: int = _flag(
        4, help="Samples per process and step, for buckets without --capacity.", argument="batch_size"
    )
    capacity: str | None = _flag(
        None, help='Tokens per process and step, which packs need; "auto" finds the most that fit in memory.'
    )
    tail: Literal["short", "drop", "repeat", "catch_all"] = _flag(
        "short", help="What becomes of a bucket's remainder."
    )
    pack_strategy: Literal["sequential", "first_fit", "best_fit_decreasing"] = _flag(
        "first_fit", help="How samples are dealt into packs.", argument="strategy"
    )
    balance: Literal["none", "cost"] = _flag("none", help="Whether packs of one step cost alike on all processes.")
    strip_length: int = _flag(64, help="Tokens per strip of a pack.", argument="multiple")
    longest_first: bool = _flag(
        False, help="Begin with the most expensive step, to run out of memory at once or never."
    )
    center_crop: bool = _flag(False, help="Crop in the middle and start at the first frame, instead of at random.")
    frame_picking: Literal["start", "uniform", "random"] | None = _flag(
        None, help="Which frames: the first, spread over the sample, or from a random one on (as --center_crop says)."
    )
    flip_probability: float = _flag(0.0, help="Of swapping left and right.")
    video_decoder: DecoderName = _flag(  # noqa: RUF009 (a field as the others)
        "pyav", help="The second needs torchcodec and the shared libraries of FFmpeg."
    )
    random_resize: int | None = _flag(
        None, help="Draw each side of a packed sample from these pixels to its own.", argument="resize"
    )

    num_train_epochs: int = _flag(1, help="Unused if --max_train_steps is given.")
    max_train_steps: int | None = _flag(None, help="Optimizer steps.")
    gradient_accumulation_steps: int = _flag(1, help="Batches per optimizer step.", argument="accumulation_steps")
    gradient_checkpointing: bool = _flag(False, help="Compute blocks again in backward, to save memory.")
    trained_component: Literal["transformer", "transformer_2"] = _flag(
        "transformer", help="The second of Wan 2.2 A14B is called at low noise."
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = _flag(None, help="By default accelerate's own setting.")
    lora_rank: int | None = _flag(None, help="Train adapters of this rank instead of the whole transformer.")
    lora_alpha: int | None = _flag(None, help="Adapters are scaled by alpha / rank; by default rank.")
    lora_targets: str = _flag("to_q,to_k,to_v,to_out.0", help="Ends of the names of the layers that get adapters.")
    init_from_adapters: str | None = _flag(
        None, help="LoRA weights to start from: a file, or a folder with pytorch_lora_weights.safetensors."
    )
    ema_decay: float | None = _flag(None, help="Average weights with this decay, such as 0.999, and save the average.")

    optimizer: Literal["adamw", "adamw_8bit"] = _flag("adamw", help="The second needs bitsandbytes (extra 8bit).")
    learning_rate: float = _flag(1e-4, help="Of the optimizer.")
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = _flag("constant", help="How the learning rate changes over the run, as diffusers' schedules do.")
    lr_warmup_steps: int = _flag(0, help="Optimizer steps.")
    adam_beta1: float = _flag(0.9, help="Of AdamW.")
    adam_beta2: float = _flag(0.999, help="Of AdamW.")
    adam_weight_decay: float = _flag(1e-2, help="Of AdamW.")
    adam_epsilon: float = _flag(1e-8, help="Of AdamW.")
    max_grad_norm: float = _flag(1.0, help="Gradients are clipped to this norm.")

    weighting_scheme: Literal["logit_normal", "uniform"] | None = _flag(
        None, help="Draw of a flow's noise level, by default logit_normal; not for denoising (Latte)."
    )
    snr_gamma: float | None = _flag(None, help="Min-SNR weighting of denoising losses (Latte), such as 5.0.")
    loss_reduction: Literal["sample", "token"] = _flag("sample", help="What counts alike in the loss.")
    max_sequence_length: int | None = _flag(None, help="Text tokens per caption; by default the pipeline's own.")
    caption_dropout: float = _flag(0.0, help="Share of captions left empty, for classifier-free guidance.")
    seed: int = _flag(0, help="Of plans, crops, noise and timesteps.")

    dataloader_num_workers: int = _flag(2, help="Decoding processes per training process.", argument="num_workers")
    dataloader_timeout: int = _flag(
        600, help="Seconds without a batch after which a worker counts as hung; 0: never.", argument="timeout"
    )
    on_error: Literal["raise", "replace"] = _flag(
        "raise", help="An unreadable sample ends the run, or is replaced by one of its bucket, and logged."
    )
    max_errors: int = _flag(100, help="Unreadable samples in a row that are borne.")
    max_error_share: float = _flag(0.01, help="Share of the data set that may be unreadable in an epoch.")

    validation_prompts: list[str] | None = _flag(  # noqa: RUF009 (a field as the others)
        None, help="Rendered while training, to mp4 files and the tracker."
    )
    validation_sizes: str = _flag("17,480,832", help='"frames,height,width;…" of the rendered prompts.')
    validation_steps: int = _flag(500, help="Optimizer steps between renderings.")
    validation_inference_steps: int = _flag(30, help="Scheduler steps of a rendering.")
    validation_guidance_scale: float = _flag(5.0, help="Of a rendering.")
    validation_fps: float = _flag(16.0, help="Frame rate of the rendered files.")
    checkpointing_steps: int | None = _flag(None, help="Optimizer steps between checkpoints; none by default.")
    checkpoints_total_limit: int | None = _flag(None, help="Older checkpoints are removed.")
    resume_from_checkpoint: str | None = _flag(
        None, help='A checkpoint\'s name or path, or "latest", which begins anew where none was saved.'
    )
    report_to: str = _flag("tensorboard", help='One of accelerate\'s trackers, or "none".')

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {
            "batching": ("bucket", "pack"),
            "tail": ("short", "drop", "repeat", "catch_all"),
            "pack_strategy": ("sequential", "first_fit", "best_fit_decreasing"),
            "balance": ("none", "cost"),
            "trained_component": ("transformer", "transformer_2"),
            "mixed_precision": (None, "no", "fp16", "bf16"),
            "optimizer": ("adamw", "adamw_8bit"),
            "lr_scheduler": get_args(get_type_hints(type(self))["lr_scheduler"]),
            "weighting_scheme": (None, "logit_normal", "uniform"),
            "loss_reduction": ("sample", "token"),
            "frame_picking": (None, "start", "uniform", "random"),
            "on_error": ("raise", "replace"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise BucketingError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}.")
        if isinstance(self.capacity, int):
            object.__setattr__(self, "capacity", str(self.capacity))
        if self.capacity not in (None, "auto") and not str(self.capacity).isdecimal():
            raise BucketingError(f'`capacity` must be a number of tokens or "auto", got {self.capacity!r}.')
        self._check_numbers()
        self._check_pairs()
        check_decoder(self.video_decoder)

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens per process and step; None without a capacity.

        Raises:
            BucketingError: If it is still to be found.
        """
        if self.capacity == "auto":
            raise BucketingError('`capacity="auto"` has not been replaced by a number of tokens yet.')
        return None if self.capacity is None else int(self.capacity)

    def _check_numbers(self) -> None:
        at_least_one: dict[str, float | None] = {
            name: getattr(self, name)
            for name in (
                *("train_batch_size", "strip_length", "num_train_epochs", "max_train_steps", "validation_steps"),
                *("gradient_accumulation_steps", "max_sequence_length", "lora_rank", "lora_alpha"),
                "random_resize",
                *("checkpointing_steps", "checkpoints_total_limit", "validation_inference_steps"),
            )
        }
        if self.capacity != "auto":
            at_least_one["capacity"] = self.capacity_tokens
        for name, value in at_least_one.items():
            if value is not None and value < 1:
                raise BucketingError(f"`{name}` must be at least 1, got {value}.")
        for name in ("seed", "dataloader_num_workers", "dataloader_timeout"):
            if getattr(self, name) < 0:
                raise BucketingError(f"`{name}` must not be negative, got {getattr(self, name)}.")
        for name in ("caption_dropout", "ema_decay", "flip_probability"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise BucketingError(f"`{name}` must be from 0 to 1, got {getattr(self, name)}.")

    def _check_pairs(self) -> None:
        if self.batching == "pack" and self.capacity is None:
            raise BucketingError("Packing needs `capacity`, the tokens per process and step.")
        if self.lr_warmup_steps and self.lr_scheduler == "constant":
            raise BucketingError('`lr_warmup_steps` needs another schedule: `lr_scheduler="constant_with_warmup"`.')
        if self.lora_alpha is not None and self.lora_rank is None:
            raise BucketingError("`lora_alpha` scales adapters; give their rank too (`lora_rank`).")
        if self.init_from_adapters is not None and self.lora_rank is None:
            raise BucketingError("`init_from_adapters` starts from LoRA weights; give their rank too (`lora_rank`).")
        if self.init_from_adapters is not None and self.resume_from_checkpoint not in (None, "latest"):
            raise BucketingError(
                "`init_from_adapters` begins a new run and `resume_from_checkpoint` continues one; leave one of them "
                'out, or give `resume_from_checkpoint="latest"`, which continues once there is a checkpoint.'
            )
        foreign = ["tail"] if self.batching == "pack" else ["pack_strategy", "balance", "random_resize"]
        if given := self.not_default(*foreign):
            raise BucketingError(f"{quoted(given)} do nothing with `batching={self.batching}`; leave them out.")

    def not_default(self, *names: str) -> list[str]:
        """Return which of the named settings have another value than by default."""
        defaults = type(self).__dataclass_fields__
        return [name for name in names if getattr(self, name) != defaults[name].default]
