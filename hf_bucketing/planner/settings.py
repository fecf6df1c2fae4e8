"""Settings of a plan of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..adapters.settings import AdapterConfig
from ..buckets.sizes import Size
from ..errors import BucketingError
from ..models.conditioning import read_conditions
from ..models.experts import TrainedComponent
from ..optimizers.settings import OptimizerConfig
from ..placement.conflicts import Combination, check_combination
from ..placement.settings import MemoryConfig, Precision
from ..plans.packs import PackPlanConfig
from ..settings import check_at_least, check_literals, part, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What memory is planned for.

    Args:
        sample_size (`list` of `int`, *optional*): Frames, height and width of the samples, in pixels; by default 81
            frames, or as many as the model takes, at the model's own smallest size.
        reference_sizes (`str`, *optional*): Sizes in which each sample's references are shown, as
            `height,width;height,width`, with the frames of a clip before them, in pixels; by default it has none.
        audio_fps (`float`, *optional*): Frames per second of samples whose audio is trained too, which is as long as
            their frames; by default none is.
        train_batch_size (`int`): Samples per process and step.
        max_tokens (`int`, *optional*): Tokens per process and step instead, those of text in the sequence of its
            sample included: as many samples as fit, at least one.
        batching (`"bucket"` or `"pack"`): Stacks of samples of one size, or packs, which the VAE encodes one by one.
        strip_length (`int`): Tokens per strip of a pack.
        cached (`"nothing"`, `"latents"` or `"all"`): What hf_bucketing cache has encoded: with `"latents"` the
            VAE is not loaded, with `"all"` no text encoder either.
        mixed_precision (`"no"`, `"fp16"` or `"bf16"`): Precision of activations and of frozen weights.
        condition (`str`, *optional*): Parts of samples that the model is shown without noise, as in training; the
            models that embed a timestep for each token take more memory then.
        sharding (`"ddp"` or `"fsdp2"`): How several processes share the training: each holds everything, or a part.
        num_processes (`int`): Processes, one per GPU.
        gradient_accumulation_steps (`int`): Batches per optimizer step.
        ema_decay (`float`, *optional*): Decay of averaged weights, which are kept beside the others.
        trained_component (`"transformer"`, `"transformer_2"`, `"both"` or `"transformer_ref"`): Transformers to train.
        max_sequence_length (`int`, *optional*): Text tokens per caption; by default the pipeline's own number.
        device (`"cuda"` or `"cpu"`): Device of the run. On a GPU, a constant of 1 GiB stands for the CUDA context,
            and AdamW works on all weights at once.
        memory ([`MemoryConfig`]): How the model is kept in memory.
        adapters ([`AdapterConfig`]): LoRA.
        optimizer ([`OptimizerConfig`]): The optimizer.
        base_predictions (`int`): Forward passes without adapters per step: 1 for `preservation`, 3 for `slider`.

    Raises:
        BucketingError: On an impossible value, or settings that cannot be combined.
    """

    sample_size: list[int] | None = setting(None, common=True, chosen=True)
    reference_sizes: str | None = setting(None, chosen=True)
    audio_fps: float | None = setting(None, chosen=True)
    train_batch_size: int = setting(1, common=True, chosen=True)
    max_tokens: int | None = setting(None, common=True, chosen=True)
    batching: Literal["bucket", "pack"] = setting("bucket", common=True, chosen=True)
    strip_length: int = PackPlanConfig.strip_length
    cached: Literal["nothing", "latents", "all"] = setting("nothing", common=True, chosen=True)
    mixed_precision: Precision = setting("bf16", common=True)
    condition: str | None = None
    sharding: Literal["ddp", "fsdp2"] = setting("ddp", chosen=True)
    num_processes: int = setting(1, common=True, chosen=True)
    gradient_accumulation_steps: int = 1
    ema_decay: float | None = None
    trained_component: TrainedComponent = "transformer"
    max_sequence_length: int | None = None
    device: Literal["cuda", "cpu"] = "cuda"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    optimizer: OptimizerConfig = part(OptimizerConfig, planned=False)
    base_predictions: int = setting(0, chosen=True)

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(0, self, "base_predictions")
        if self.base_predictions and self.adapters.lora_rank is None:
            raise BucketingError("`base_predictions` are made below adapters; give their rank too (`lora_rank`).")
        check_at_least(
            1, self, "train_batch_size", "max_tokens", "num_processes", "gradient_accumulation_steps",
            "max_sequence_length", "strip_length",
        )  # fmt: skip
        if self.sample_size is not None and (len(self.sample_size) != 3 or min(self.sample_size) < 1):
            raise BucketingError(
                f"`sample_size` must be frames, height and width, three positive numbers; got {self.sample_size}."
            )
        self.references()
        if self.audio_fps is not None and not self.audio_fps > 0:
            raise BucketingError(f"`audio_fps` must be above 0 frames per second, got {self.audio_fps}.")
        if self.condition is not None:
            read_conditions(self.condition)
        check_combination(
            Combination(
                memory=self.memory,
                adapters=self.adapters.lora_rank is not None,
                kind=self.adapters.adapter,
                lora_format=self.adapters.lora_format,
                optimizer=self.optimizer.optimizer,
                lora_plus=self.optimizer.lora_plus_ratio is not None,
                mixed_precision=self.mixed_precision,
                sharding="FSDP2" if self.sharding == "fsdp2" else "ddp",
                num_processes=self.num_processes,
                experts=self.trained_component == "both",
                strip_length=self.strip_length if self.batching == "pack" else None,
                planned=True,
            )
        )

    def references(self) -> tuple[Size, ...]:
        """Return the sizes of each sample's references.

        Raises:
            BucketingError: If they are not sizes.
        """
        texts = self.reference_sizes.split(";") if self.reference_sizes is not None else []
        try:
            sides = [[int(side) for side in text.split(",")] for text in texts]
        except ValueError:
            sides = [[]]
        if any(len(size) not in (2, 3) or min(size) < 1 for size in sides):
            raise BucketingError(
                "`reference_sizes` must be sizes of references, such as 1024,1024;512,768 for two pictures or "
                f"49,256,352 for a clip; got {self.reference_sizes!r}."
            )
        return tuple(Size(*[1, *size][-3:]) for size in sides)


def as_reference_sizes(references: Iterable[Size]) -> str | None:
    """Return sizes of references as [`PlanConfig`] takes them.

    Example:
        >>> as_reference_sizes([Size(1, 64, 96), Size(9, 32, 32)])
        '1,64,96;9,32,32'
    """
    return ";".join(",".join(map(str, size)) for size in references) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """Machine, and how long it trains.

    Args:
        gpu_memory (`float`): GiB of each GPU.
        num_gpus (`int`): GPUs, one process each.
        cpu_memory (`float`, *optional*): GiB of the machine's memory (default: not limited).
        cpus (`int`, *optional*): Processors that decode (default: those of this machine).
        num_train_epochs (`int`): Epochs to train for. A cache is worth it from the second one on.
        checkpoints_total_limit (`int`): Checkpoints that are kept.

    Raises:
        BucketingError: On a number that is not above 0.
    """

    gpu_memory: float
    num_gpus: int = 1
    cpu_memory: float | None = None
    cpus: int | None = None
    num_train_epochs: int = 10
    checkpoints_total_limit: int = 2

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_gpus", "cpus", "num_train_epochs", "checkpoints_total_limit")
        for name in ("gpu_memory", "cpu_memory"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BucketingError(f"`{name}` must be above 0 GiB, got {value}.")
