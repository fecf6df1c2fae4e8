"""All settings of a training run: the flags of its script; how it is launched, and what these exclude."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ..adapters.settings import AdapterConfig
from ..conditions.shares import read_conditions
from ..errors import BucketingError, quoted
from ..loaders.captions import CaptionRule
from ..loaders.faults import FaultRule
from ..media.views import ViewRule
from ..models.experts import TrainedComponent
from ..optimizers.settings import OptimizerConfig
from ..placement.conflicts import READ_FULL_WEIGHTS, Combination, Sharding, check_combination
from ..placement.settings import MemoryConfig, Precision
from ..settings import (
    build,
    check_at_least,
    check_literals,
    check_shares,
    explains_names,
    flatten,
    marked,
    not_default,
    part,
    setting,
)
from ..streaming.config import StreamConfig
from .batches import BatchConfig, LoaderConfig
from .objective import ObjectiveConfig, PreservationConfig
from .outputs import CheckpointConfig, HeldOutConfig, HubConfig, ReportingConfig, ValidationConfig

Config = TypeVar("Config", bound="RunConfig")

COST_MODEL = "cost_model.json"
"""File in the output folder of a run that holds the measured cost of its steps."""


@explains_names
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of a run, but for the model, the data and the folders that it names: what the planner reads.

    Args:
        seed (`int`): Seed of plans, crops, noise and timesteps.
        num_train_epochs (`int`): Epochs to train for, unless `max_train_steps` is given.
        max_train_steps (`int`, *optional*): Optimizer steps to train for; by default those of all epochs.
        gradient_accumulation_steps (`int`): Batches per optimizer step.
        mixed_precision (`"no"`, `"fp16"` or `"bf16"`, *optional*): Precision of activations and of the frozen text
            encoder; by default accelerate's own setting.
        trained_component (`"transformer"`, `"transformer_2"`, `"both"` or `"transformer_ref"`): Transformer to train,
            where a pipeline has two: the second one of Wan 2.2 A14B serves low noise levels. With `"both"`, each
            optimizer step trains one of them at its noise levels; they take turns as often as these are drawn.
            `"transformer_ref"` is that of MiniMax-H3 for samples with references.
        transformer_file (`str`, *optional*): File with the weights of that transformer, of safetensors or GGUF, with
            diffusers' names, the original ones or those of ComfyUI; by default they are those of the pipeline. Its
            configurations and its other parts come from the pipeline all the same. Weights of float8 are dequantised
            when they are loaded; GGUF stays packed, so that LoRA alone trains on it.
        vae_file (`str`, *optional*): File of safetensors with the weights of the VAE, named as that of the transformer
            may be; by default they are those of the pipeline. A cache is compared with it.
        max_sequence_length (`int`, *optional*): Text tokens per caption; by default those of cached texts, or else the
            pipeline's own number.
        trust_cache (`bool`): Whether a cache is trained although it seems to be of another model, or does not say of
            which; by default it is refused.
        ema_decay (`float`, *optional*): Decay of the exponential moving average of the weights, such as 0.999. The
            average is saved in place of the last weights; by default there is none.
        batches ([`BatchConfig`]): Batches or packs.
        memory ([`MemoryConfig`][hf_bucketing.placement.settings.MemoryConfig]): How the model is kept in memory.
        views ([`ViewRule`][hf_bucketing.media.ViewRule]): Crop, frames, flip and decoder.
        captions ([`CaptionRule`][hf_bucketing.loaders.CaptionRule]): Tags of captions.
        faults ([`FaultRule`][hf_bucketing.loaders.FaultRule]): Unreadable samples.
        loader ([`LoaderConfig`]): Worker processes.
        stream ([`StreamConfig`][hf_bucketing.streaming.config.StreamConfig]): Rows from a stream.
        objective ([`ObjectiveConfig`]): Noise levels and loss.
        preservation ([`PreservationConfig`][hf_bucketing.configuration.objective.PreservationConfig]): Samples
            whose targets are predictions of the base model.
        adapters ([`AdapterConfig`][hf_bucketing.adapters.lora.AdapterConfig]): LoRA.
        optimizer ([`OptimizerConfig`][hf_bucketing.optimizers.settings.OptimizerConfig]): Optimizer and schedule.
        validation ([`ValidationConfig`][hf_bucketing.training.ValidationConfig]): Prompts to render.
        held_out ([`HeldOutConfig`][hf_bucketing.configuration.outputs.HeldOutConfig]): Samples that are held out.
        checkpoints ([`CheckpointConfig`][hf_bucketing.training.CheckpointConfig]): Saving and resuming.
        reporting ([`ReportingConfig`]): Trackers, and the page of the run.
        hub ([`HubConfig`][hf_bucketing.training.card.HubConfig]): Upload of the result.

    Raises:
        BucketingError: On an impossible value or combination, or a video decoder that cannot be loaded.
    """

    seed: int = setting(0, on_resume="plan", planned=False)
    num_train_epochs: int = setting(1, on_resume="applied", decides_steps=True, planned=False)
    max_train_steps: int | None = setting(None, on_resume="applied", common=True, planned=False)
    gradient_accumulation_steps: int = setting(
        1, argument="accumulation_steps", on_resume="applied", decides_steps=True
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = setting(None, on_resume="equal", common=True)
    trained_component: TrainedComponent = setting("transformer", on_resume="equal")
    transformer_file: str | None = setting(None, on_resume="weights")
    vae_file: str | None = setting(None, on_resume="weights", planned=False)
    max_sequence_length: int | None = setting(None, on_resume="equal", left_open=None)
    trust_cache: bool = setting(False, on_resume="free", planned=False)
    ema_decay: float | None = setting(None, on_resume="equal")
    batches: BatchConfig = part(BatchConfig, on_resume="plan", planned=False)
    memory: MemoryConfig = part(MemoryConfig, on_resume="applied")
    views: ViewRule = part(ViewRule, on_resume="applied", encoded="media", planned=False)
    captions: CaptionRule = part(CaptionRule, on_resume="applied", encoded="captions", planned=False)
    faults: FaultRule = part(FaultRule, on_resume="applied", planned=False)
    loader: LoaderConfig = part(LoaderConfig, on_resume="free", planned=False)
    stream: StreamConfig = part(StreamConfig, on_resume="plan", planned=False)
    objective: ObjectiveConfig = part(ObjectiveConfig, on_resume="equal", planned=False)
    preservation: PreservationConfig = part(PreservationConfig, on_resume="equal")
    adapters: AdapterConfig = part(AdapterConfig, on_resume="equal")
    optimizer: OptimizerConfig = part(OptimizerConfig, on_resume="applied", planned=False)
    validation: ValidationConfig = part(ValidationConfig, on_resume="free", planned=False)
    held_out: HeldOutConfig = part(HeldOutConfig, on_resume="free", planned=False)
    checkpoints: CheckpointConfig = part(CheckpointConfig, on_resume="free", planned=False)
    reporting: ReportingConfig = part(ReportingConfig, on_resume="free", planned=False)
    hub: HubConfig = part(HubConfig, on_resume="free", planned=False)

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(
            1, self, "num_train_epochs", "max_train_steps", "gradient_accumulation_steps", "max_sequence_length"
        )
        check_at_least(0, self, "seed")
        check_shares(self, "ema_decay")
        if self.preservation.base_predictions and self.adapters.lora_rank is None:
            raise BucketingError(
                "`preservation` and `slider` ask the base model for its predictions, which a run of the whole "
                "transformer changes and no longer has; train adapters (`lora_rank`), or omit them."
            )
        if self.stream.streaming:
            _check_stream(self)
        if self.adapters.init_from_adapters and self.checkpoints.resume_from_checkpoint not in (None, "latest"):
            raise BucketingError(
                "`init_from_adapters` begins a new run and `resume_from_checkpoint` continues one; omit one of them, "
                'or give `resume_from_checkpoint="latest"`, which continues once there is a checkpoint.'
            )

    @property
    def weight_files(self) -> dict[str, str]:
        """Files of weights that stand for those of the pipeline's folder, by the name of their setting."""
        files = {"transformer_file": self.transformer_file, "vae_file": self.vae_file}
        return {name: file for name, file in files.items() if file is not None}

    @classmethod
    def from_flat(cls: type[Config], **settings: Any) -> Config:
        """Build the configuration from all its settings by name, such as those in `training_config.json`.

        Raises:
            BucketingError: On an unknown name, an impossible value or an impossible combination.
        """
        return build(cls, settings)

    def flat(self) -> dict[str, Any]:
        """Return all settings by name, as `training_config.json` holds them."""
        return flatten(self)


@explains_names
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig(RunConfig):
    """Settings of [`train`][hf_bucketing.training.train]: those of [`RunConfig`], and what the run reads and writes.

    The names of all settings, those of its parts included, are the flags of `hf_bucketing train` and
    follow diffusers' training examples. [`from_flat`][RunConfig.from_flat] takes them all by name.

    Args:
        pretrained_model_name_or_path (`str`): Diffusers pipeline to fine-tune, on the hub or in a folder.
        dataset_dir (`str`): Folder that hf_bucketing prepare or hf_bucketing cache wrote.
        output_dir (`str`): Folder that receives the pipeline or the adapters, checkpoints and logs.
        dry_run (`bool`): Whether to print the plan, its cost and an estimate of memory, and to train nothing.

    Raises:
        BucketingError: On an impossible value or combination, or a video decoder that cannot be loaded.
    """

    pretrained_model_name_or_path: str = field(metadata={"on_resume": "weights"})
    dataset_dir: str = field(metadata={"on_resume": "plan"})
    output_dir: str = field(metadata={"on_resume": "free"})
    dry_run: bool = setting(False, on_resume="free", common=True)

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)  # super() does not find it, as dataclasses with slots are made anew
        written, cost_model = Path(self.output_dir) / COST_MODEL, self.batches.cost_model
        if cost_model is not None and Path(cost_model).resolve() == written.resolve():
            raise BucketingError(
                f"`cost_model` is {cost_model}, which this run replaces by its own; copy the file to another place, "
                "or give another `output_dir`."
            )
        validation = self.held_out.validation_dataset_dir
        if validation is not None and Path(validation).resolve() == Path(self.dataset_dir).resolve():
            raise BucketingError(
                f"`validation_dataset_dir` is {validation}, as `dataset_dir` is; hold some of its rows out with "
                "`validation_split`."
            )

    @property
    def run(self) -> RunConfig:
        """The settings without the model, the data and the folders."""
        return RunConfig(**{field.name: getattr(self, field.name) for field in fields(RunConfig)})


def _check_stream(config: RunConfig) -> None:
    """Raise BucketingError for settings that need the rows to be known before they come."""
    needs_rows = marked(RunConfig, "needs_rows")
    if unused := not_default(config, *needs_rows):
        reasons = "; ".join(f"`{name}`: {needs_rows[name]}" for name in unused)
        raise BucketingError(f"Omit {quoted(unused)} with `streaming=True`: {reasons}.")
    if config.batches.max_tokens == "auto":
        raise BucketingError(
            '`max_tokens="auto"` searches the most expensive step of a plan, which a stream has not; give a number of '
            "tokens (hf_bucketing plan says what fits)."
        )
    if config.max_train_steps is None and config.stream.steps_per_epoch is None:
        raise BucketingError(
            "A stream has no known length: give `max_train_steps`, or `steps_per_epoch` and `num_train_epochs`."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Processes of a run, which accelerate's configuration and the command that launches it name.

    Args:
        sharding (`"ddp"`, `"fsdp2"`, `"fsdp"`, `"deepspeed"` or `"deepspeed stage 3"`): How several processes share
            the training: each holds everything, or a part. Memory is planned for the first two.
        num_processes (`int`): Processes, one per GPU.
        device (`"cuda"` or `"cpu"`): Device of the run. On a GPU, a constant of 1 GiB stands for the CUDA context,
            and AdamW works on all weights at once.
        loads_once (`bool`): Whether one process loads the weights and sends the others their shares.
        grouped (`bool`): Whether accelerate's parallelism_config groups the processes.
        dynamo (`bool`): Whether accelerate compiles what it prepares.
        wraps_blocks (`bool`): Whether FSDP checkpoints all blocks (`fsdp_activation_checkpointing`).

    Raises:
        BucketingError: On an impossible value.
    """

    sharding: Sharding = setting("ddp", chosen=True)
    num_processes: int = setting(1, common=True, chosen=True)
    device: Literal["cuda", "cpu"] = "cuda"
    loads_once: bool = setting(False, flag=False)
    grouped: bool = setting(False, flag=False)
    dynamo: bool = setting(False, flag=False)
    wraps_blocks: bool = setting(False, flag=False)

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "num_processes")


def configured_precision() -> Precision:
    """Return the precision of runs that name none: that of accelerate's own configuration, or "no"."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    configured = load_config_from_file(None).mixed_precision if Path(default_config_file).is_file() else "no"
    return cast("Precision", str(os.environ.get("ACCELERATE_MIXED_PRECISION") or configured or "no").lower())


def check_run(run: RunConfig, launch: LaunchConfig, *, precision: str, planned: bool = False) -> None:
    """Raise BucketingError for settings that cannot be combined with each other or with the launch.

    Args:
        run ([`RunConfig`]): Settings of the run.
        launch ([`LaunchConfig`]): Its processes.
        precision (`str`): Mixed precision, theirs or that of accelerate's configuration.
        planned (`bool`): Whether only memory is planned. A plan for the CPU is made for GPUs all the same.
    """
    flat, batches, condition = run.flat(), run.batches, run.objective.condition
    accumulates = run.gradient_accumulation_steps > 1
    check_combination(
        Combination(
            memory=run.memory,
            adapters=run.adapters.lora_rank is not None,
            kind=run.adapters.adapter,
            lora_format=run.adapters.lora_format,
            optimizer=run.optimizer.optimizer,
            lora_plus=run.optimizer.lora_plus_ratio is not None,
            mixed_precision=precision,
            sharding=launch.sharding,
            num_processes=launch.num_processes,
            on_cpu=launch.device == "cpu" and not planned,
            experts=run.trained_component == "both",
            file=run.transformer_file,
            joined=tuple(name for name in READ_FULL_WEIGHTS if flat[name] is not None),
            searches=batches.max_tokens == "auto",
            loads_once=launch.loads_once,
            grouped=launch.grouped,
            dynamo=launch.dynamo,
            replaces=run.faults.on_error != "raise",
            strip_length=batches.strips,
            weighs_late=accumulates and condition is not None and read_conditions(condition).weighs,
            wraps_blocks=launch.wraps_blocks,
            planned=planned,
        )
    )
