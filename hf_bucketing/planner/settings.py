"""Settings of a plan of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..buckets.sizes import Size
from ..configuration.run import LaunchConfig, RunConfig, check_run
from ..errors import BucketingError
from ..placement.settings import Precision
from ..settings import build, check_at_least, check_literals, part, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Samples of a step, as a data set would hold them.

    Args:
        sample_size (`list` of `int`, *optional*): Frames, height and width of the samples, in pixels; by default 81
            frames, or as many as the model takes, at the model's own smallest size.
        reference_sizes (`str`, *optional*): Sizes in which each sample's references are shown, as
            `height,width;height,width`, with the frames of a clip before them, in pixels; by default it has none.
        audio_fps (`float`, *optional*): Frames per second of samples whose audio is trained too, which is as long as
            their frames; by default none is.
        cached (`"nothing"`, `"latents"` or `"all"`): What hf_bucketing cache has encoded: with `"latents"` the
            VAE is not loaded, with `"all"` no text encoder either.

    Raises:
        BucketingError: On an impossible value.
    """

    sample_size: list[int] | None = setting(None, common=True, chosen=True)
    reference_sizes: str | None = setting(None, chosen=True)
    audio_fps: float | None = setting(None, chosen=True)
    cached: Literal["nothing", "latents", "all"] = setting("nothing", common=True, chosen=True)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.sample_size is not None and (len(self.sample_size) != 3 or min(self.sample_size) < 1):
            raise BucketingError(
                f"`sample_size` must be frames, height and width, three positive numbers; got {self.sample_size}."
            )
        self.references()
        if self.audio_fps is not None and not self.audio_fps > 0:
            raise BucketingError(f"`audio_fps` must be above 0 frames per second, got {self.audio_fps}.")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What memory is planned for. [`from_flat`][PlanConfig.from_flat] takes all settings by name.

    Args:
        samples ([`SampleConfig`]): Samples of a step.
        run ([`RunConfig`][hf_bucketing.configuration.run.RunConfig]): Settings of the run. Where they name no
            precision, it is `"no"`, which is accelerate's own.
        launch ([`LaunchConfig`][hf_bucketing.configuration.run.LaunchConfig]): Processes of the run.

    Raises:
        BucketingError: If the settings cannot be combined, or memory is not planned for the launch.
    """

    samples: SampleConfig = part(SampleConfig)
    run: RunConfig = part(RunConfig)
    launch: LaunchConfig = part(LaunchConfig)

    def __post_init__(self) -> None:
        if self.launch.sharding not in ("ddp", "fsdp2"):
            raise BucketingError(
                f'memory under `sharding="{self.launch.sharding}"` is not planned, only under DDP and FSDP2.'
            )
        check_run(self.run, self.launch, precision=self.precision, planned=True)

    @classmethod
    def from_flat(cls, **settings: Any) -> PlanConfig:
        """Build a configuration from its settings by name.

        Raises:
            BucketingError: On an unknown name, an impossible value or an impossible combination.
        """
        return build(cls, settings)

    @property
    def precision(self) -> Precision:
        """Precision of activations and of frozen weights."""
        return self.run.mixed_precision or "no"

    @property
    def shards(self) -> int:
        """Processes over which weights, gradients and the optimizer's state are split."""
        return self.launch.num_processes if self.launch.sharding == "fsdp2" else 1


def as_reference_sizes(references: Iterable[Size]) -> str | None:
    """Return sizes of references as [`SampleConfig`] takes them.

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
