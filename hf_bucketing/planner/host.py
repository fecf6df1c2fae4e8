"""Memory of the machine and space on its disk that a run needs beside its GPUs, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import BucketingError
from ..units import format_bytes
from .memory import PLAN_ERROR, MemoryPlan, optimizer_bytes, verdict_on
from .phases import ByteCounts, Phases
from .settings import PlanConfig

PROCESS = 530 * 2**20
"""Bytes of a training process with its libraries and nothing loaded, as measured with torch for the CPU."""

CUDA_PROCESS = 2 * 2**30
"""Bytes that CUDA's libraries and its context add to a process: a guess."""

WORKER = 100 * 2**20
"""Bytes of a process that decodes samples, and of the one that starts them, as measured."""

_PREFETCHED = 2
"""Batches that each worker of a `DataLoader` has ready."""

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts(ByteCounts):
    """Bytes that all processes of a run need together in the memory of a machine, by kind.

    Attributes:
        processes (`int`): Python and its libraries.
        weights (`int`): Weights that are loaded, that wait there, or that the run trains there.
        activations (`int`): Activations that wait there, or that a run on the CPU makes.
        workers (`int`): Processes that decode samples.
        batches (`int`): Batches that are decoded and wait.
    """

    processes: int = 0
    weights: int = 0
    activations: int = 0
    workers: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan(Phases[HostParts]):
    """Memory of one machine that all processes of a run need together, of loading, training and saving."""


def plan_host(plan: MemoryPlan, config: PlanConfig, *, num_workers: int, cached_bytes: int = 0) -> HostPlan:
    """Plan the memory of a machine from what was planned for its GPUs.

    Every process loads all weights that it calls before it moves them to its GPU, so that loading is the highest
    moment of many processes without offload. Page-locked memory of offload is counted in powers of two, as torch takes
    it. Not counted: rows and caches, which are mapped files and leave memory when it is needed.

    Args:
        plan ([`MemoryPlan`]): What each process needs on its device.
        config ([`PlanConfig`]): What it was planned for; all of `num_processes` are on this machine.
        num_workers (`int`): Decoding processes of each process.
        cached_bytes (`int`): Bytes of the latents and texts of a step that is read from a cache.
    """
    count, sharded = config.launch.num_processes, config.launch.sharding == "fsdp2"
    on_gpu = config.launch.device == "cuda"
    step = plan.phases["optimizer"]
    pixels = 3 * _FLOAT32 * plan.shape.pixels if config.samples.cached == "nothing" else cached_bytes
    ready = count * pixels * (_PREFETCHED * num_workers or 1)
    base = HostParts(
        processes=count * (PROCESS + (CUDA_PROCESS if on_gpu else 0)),
        workers=count * WORKER * (num_workers + 1 if num_workers else 0),
    )
    called = sum(expert.weights for expert in plan.experts) + step.text_encoder + step.vae
    trained = sum(expert.trained_bytes for expert in plan.experts)
    loading = _with(base, weights=count * called)
    if not on_gpu:
        peak = plan.total - plan.peak.weights
        training = _with(base, weights=count * plan.peak.weights, activations=count * peak, batches=ready)
        return HostPlan(phases={"loading": loading, "training": training})
    waiting = _waiting_weights(plan, config)
    activations = count * plan.experts[0].waiting
    training = _with(base, weights=count * waiting, activations=activations, batches=2 * ready)  # pinned once more
    # the main process gathers weights that are sharded, and builds the model again to save it
    saving = _with(base, weights=count * waiting + (2 if sharded else 1) * trained, batches=2 * ready)
    return HostPlan(phases={"loading": loading, "training": training, "saving": saving})


def _with(parts: HostParts, **counts: float) -> HostParts:
    return replace(parts, **{name: round(count) for name, count in counts.items()})


def _waiting_weights(plan: MemoryPlan, config: PlanConfig) -> float:
    """Return the bytes of frozen weights that wait on the CPU, in page-locked memory."""
    if config.run.memory.offload_idle_expert:
        return sum(expert.pinned for expert in plan.experts)
    blocks = config.run.memory.offload_blocks / plan.blocks
    frozen = (expert.frozen_bytes / max(expert.weights - expert.trained_bytes, 1) for expert in plan.experts)
    return sum(blocks * share * expert.pinned for share, expert in zip(frozen, plan.experts, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Bytes on disk that a run writes.

    Attributes:
        checkpoint (`int`): One checkpoint: what is trained, the optimizer's state and averages.
        checkpoints (`int`): All that exist at one time: as many as are kept, and the one that is being written.
        result (`int`): What the run saves at its end: adapters, or the whole pipeline.
        cache (`int`): Cached latents and texts.
    """

    checkpoint: int
    checkpoints: int
    result: int
    cache: int = 0

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.checkpoints + self.result + self.cache

    def __str__(self) -> str:
        kept = f"checkpoints {format_bytes(self.checkpoints)} ({format_bytes(self.checkpoint)} each)"
        return f"cache {format_bytes(self.cache)}, {kept}, result {format_bytes(self.result)}"


def plan_disk(plan: MemoryPlan, config: PlanConfig, *, checkpoints: int, cache: int = 0) -> DiskPlan:
    """Plan the space on disk that a run needs.

    Args:
        plan ([`MemoryPlan`]): What each process needs on its device.
        config ([`PlanConfig`]): What it was planned for.
        checkpoints (`int`): Checkpoints that are kept.
        cache (`int`): Bytes of cached latents and texts.
    """
    averages = 0 if config.run.ema_decay is None else _FLOAT32
    checkpoint = sum(
        expert.trained_bytes + optimizer_bytes(expert, config) + averages * expert.trained for expert in plan.experts
    )
    trained = sum(expert.trained_bytes for expert in plan.experts)
    frozen = 0.0
    if config.run.adapters.lora_rank is None:  # a whole pipeline, with its other parts copied
        frozen = sum(expert.weights - expert.trained_bytes for expert in plan.experts)
    return DiskPlan(
        checkpoint=round(checkpoint),
        checkpoints=round(checkpoint) * (checkpoints + 1 if checkpoints else 0),
        result=round(trained + frozen),
        cache=cache,
    )


def check_host(plan: HostPlan, *, cpu_memory: float) -> str:
    """Return in a sentence how much of a machine's memory a run needs.

    Args:
        plan ([`HostPlan`]): What it needs.
        cpu_memory (`float`): GiB of the machine.

    Raises:
        BucketingError: If it needs more than there is.
    """
    verdict = verdict_on(plan.total, cpu_memory * 2**30)
    if verdict == "does not fit":
        raise BucketingError(
            f"The run needs {format_bytes(plan.total)} in the machine's memory, highest in {plan.highest}, and "
            f"`cpu_memory` is {cpu_memory:g} GiB ({plan}).",
            advice=[
                "start fewer processes (`num_processes`)",
                "lower `dataloader_num_workers`",
                "cache texts and latents",
            ],
        )
    warning = f"; runs may take {PLAN_ERROR:.0%} more than planned" if verdict == "tight" else ""
    return f"{verdict[0].upper()}{verdict[1:]} in {cpu_memory:g} GiB of the machine: {plan}{warning}."
