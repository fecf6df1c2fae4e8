"""Floating-point operations of the steps of a run, and the peak of its GPUs, of which they are a share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..batching.run_data import RunData
from ..batching.steps import Computed
from ..buckets.arrays import BoolArray
from ..buckets.sizes import LatentSpec, Size
from ..planner.gpus import peak_of_device
from ..planner.settings import PlanConfig
from ..planner.time import TrainingFlops, training_flops
from .estimate import components_of, describe_error, planned_run
from .opened import OpenedRun

logger = get_logger(__name__)

_TRACED_SIZES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Operations of batches by the tokens of their samples; nothing is traced or read from the device for a batch.

    Args:
        training ([`TrainingFlops`][hf_bucketing.planner.time.TrainingFlops]): Operations of a sample.
        peak (`float`, *optional*): Peak of a GPU in TFLOP/s; None where it is not known.
    """

    training: TrainingFlops
    peak: float | None = None

    def of_batch(self, computed: Computed, counted: BoolArray, *, base: bool) -> tuple[float, float]:
        """Return the operations that a batch is trained for, without recomputation, and all that it computes.

        Args:
            computed ([`Computed`][hf_bucketing.batching.steps.Computed]): Tokens of the batch.
            counted (array of `bool`, shape `(n,)`): Whether each sample counts; others fill the batch.
            base (`bool`): Whether the base model predicted targets.
        """
        model = self.training.model.plus(self.training.base) if base else self.training.model
        hardware = model.plus(self.training.recomputed)
        useful = model.of_samples(computed.lengths[counted]).sum()
        return float(useful), float(hardware.of_samples(computed.lengths).sum() + hardware.linear * computed.padding)


def count_flops(opened: OpenedRun, data: RunData) -> StepFlops | None:
    """Return the operations of a run's steps, which every process counts for itself; None if they are not logged.

    A model that cannot be traced gets a warning that says why.
    """
    config, device = opened.config, opened.accelerator.device
    wanted = config.reporting.log_tflops
    if wanted is False or (wanted is None and device.type == "cpu"):
        return None
    sizes = {data.table.size(bucket) for bucket in data.bucket_counts()} or set(data.largest_step().sizes)
    try:
        components = components_of(opened)
        family, model = components.recipe.family, components.transformer.build()

        def refused(size: Size) -> bool:
            return family.refusal(model, data.spec.grid(size)) is not None

        flops = training_flops(components, _alone(opened), traced_sizes(sizes, data.spec, refused=refused))
    except Exception as error:  # as in describe_memory
        logger.warning(f"No TFLOP/s are logged, as operations are not counted: {describe_error(error)}")
        return None
    return StepFlops(training=flops, peak=_peak_of(opened.accelerator))


def _alone(opened: OpenedRun) -> PlanConfig:
    """Return what one process would plan that computes samples whole and keeps everything on its device."""
    return planned_run(
        opened, sharding="ddp", num_processes=1, wraps_blocks=False, context_parallel_degree=1, offload_blocks=0,
        offload_idle_expert=False, offload_activations=False,
    )  # fmt: skip


def traced_sizes(sizes: Iterable[Size], spec: LatentSpec, *, refused: Callable[[Size], bool]) -> list[Size]:
    """Return sizes with different numbers of tokens: of samples and, if they are fewer than three, of parts of one.

    Packs compute other numbers of tokens than those of whole samples, whose operations one size would not tell.

    Args:
        sizes (iterable of [`Size`][hf_bucketing.Size]): Sizes of samples in pixels, at least one.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        refused (callable): Returns whether the model cannot take samples of a size.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> [tuple(size) for size in traced_sizes([Size(1, 64, 96)], spec, refused=lambda size: False)]
        [(1, 64, 32), (1, 64, 48), (1, 64, 96)]
    """
    by_tokens = {spec.num_tokens(size): size for size in sizes}
    largest = by_tokens[max(by_tokens)]
    for rows, columns in product((1, 2, 3), repeat=2):
        part = spec.snap(largest._replace(height=-(-largest.height // rows), width=-(-largest.width // columns)))
        if len(by_tokens) < _TRACED_SIZES and not refused(part):
            by_tokens.setdefault(spec.num_tokens(part), part)
    return [by_tokens[tokens] for tokens in sorted(by_tokens)]


def _peak_of(accelerator: Accelerator) -> float | None:
    """Return the peak of the GPU that computes in half precision; None where it is not known."""
    if accelerator.device.type != "cuda" or accelerator.mixed_precision == "no":
        return None
    return peak_of_device(torch.cuda.get_device_name(accelerator.device))
