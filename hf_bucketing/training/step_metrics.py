"""What is measured of an optimizer step over its batches and all processes: losses, norms, times and operations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.distributed.tensor import DTensor

from ..batching.run_data import RunData
from ..batching.steps import Computed
from ..buckets.arrays import BoolArray, FloatArray
from ..buckets.sizes import LatentSpec, Size
from ..devices import Reading, to_device
from ..planner.gpus import peak_of_device
from ..planner.settings import PlanConfig
from ..planner.time import TrainingFlops, training_flops
from .estimate import components_of, describe_error, planned_run
from .opened import OpenedRun

_BINS = 10
"""Bins of noise levels."""

_FIRST = ("grad_norm", "stop", "train_loss")
"""What a process gathers first of a step; sums of losses and counts follow."""

_COUNTS = 8  # samples, tokens, cost, batches, pairs of tokens, operations of the model and all, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMetrics:
    """Metrics of an optimizer step over all processes, on their way from the device.

    Attributes:
        rows (`torch.Tensor` of shape `(num_processes, n)`): What was gathered, on the device.
        read (callable): Waits for the device, and returns the metrics and the losses of the samples of each batch of
            this process. Call it once, in the order of the steps.
    """

    rows: torch.Tensor
    read: Callable[[], tuple[dict[str, float], list[FloatArray]]]

    def found_inf(self) -> torch.Tensor:
        """Return on the device, as one number in float32, 1 if the loss or the gradients' norm is not finite."""
        return (~self.rows[:, : len(_FIRST)].isfinite()).any().float()


class StepMetrics:
    """Sum what is logged of an optimizer step over its batches and all processes.

    Args:
        accelerator (`Accelerator`): Accelerator that gathers the sums, in one call per optimizer step.
        max_tokens (`int`, *optional*): Tokens per process and batch, to compute the fill.
        degree (`int`): Neighbouring processes that take the same samples, which count once.
        groups (mapping of `str` to sequences of `str`): Groups of samples whose losses are summed apart, by what
            divides them, such as `{"source": ["clips", "faces"]}`.
        peak_tflops (`float`, *optional*): Peak of the device of each process, to compute its share.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        max_tokens: int | None,
        degree: int = 1,
        groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
        peak_tflops: float | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.peak_tflops = peak_tflops
        self.groups = groups
        self._names = [f"noise/{level / _BINS:.1f}" for level in range(_BINS)]
        self._names += [f"{division}/{name}" for division, names in groups.items() for name in names]
        self.degree = degree
        self.max_tokens = max_tokens
        self._start = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        # The loss; and by noise level and by group, the sum of the losses and the number of samples.
        self._sums = torch.zeros(1 + 2 * len(self._names), device=self.accelerator.device)
        self._counts = np.zeros(_COUNTS - 1)  # all but the seconds

    def add(
        self,
        values: torch.Tensor,
        noise_levels: torch.Tensor,
        *,
        weights: torch.Tensor,
        tokens: npt.NDArray[np.int64],
        cost: float,
        groups: Mapping[str, npt.NDArray[np.int64]] = MappingProxyType({}),
        flops: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Add a batch.

        Args:
            values (`torch.Tensor` of shape `(n,)`): Losses of the samples.
            noise_levels (`torch.Tensor` of shape `(n,)`): Timesteps over the schedule's length, in [0, 1].
            weights (`torch.Tensor` of shape `(n,)`): Weight of each sample in the loss of the step over all processes.
            tokens (array of `int`, shape `(n,)`): Tokens of each sample and of the text in its sequence.
            cost (`float`): Cost of the samples, in any unit.
            groups (mapping of `str` to arrays of `int`, shape `(n,)`): Group of each sample, by what divides them.
            flops (`tuple` of two `float`): Floating-point operations that the samples are trained for, and all that
                the device computes; 0 where they are not counted.
        """
        values = values.detach().float()
        bins = (noise_levels.detach().float() * _BINS).long().clamp(0, _BINS - 1)
        self._sums[0] += (values * weights.to(values)).sum()
        if groups:
            first = dict(zip(self.groups, _BINS + np.cumsum([0, *map(len, self.groups.values())]), strict=False))
            further = np.concatenate([first[division] + number for division, number in groups.items()])
            bins = torch.cat([bins, to_device(torch.from_numpy(further), bins.device, dtype=bins.dtype)])
            values = values.repeat(1 + len(groups))
        self._sums.index_add_(0, 1 + bins, values)
        self._sums.index_add_(0, 1 + len(self._names) + bins, torch.ones_like(values))
        pairs = np.square(tokens, dtype=np.float64).sum()
        self._counts += (len(tokens), tokens.sum(), cost, 1, pairs, *flops)

    def finish(
        self,
        factor: float = 1.0,
        *,
        seconds: Callable[[], float],
        losses: Sequence[torch.Tensor] = (),
        grad_norm: torch.Tensor | float | None = None,
        stop: int = 0,
        late: bool = False,
    ) -> PendingMetrics:
        """Gather the step's metrics over all processes, and start the next step; call it on every process.

        All that is read of a step is read by what this returns, in one wait for the device: with the metrics also
        `losses`, those of the samples of each batch of this process, which are returned as arrays.

        `seconds` returns the time of this process's batches, each from its arrival to the end of its backward pass,
        and may wait for it. It is called before anything is gathered or, if the step is read `late`, with what is
        read: then each process knows its own time alone. The weights that were added are multiplied by `factor`, where
        they were not known before the step's end. `grad_norm`, the norm of the gradients before they are clipped, and
        `stop`, the number of a signal to stop, are the largest of all processes; they are among the metrics where
        there are any.

        `train_loss` is the loss, `loss_by_noise/0.1` its mean over samples with noise levels from 0.1 to 0.2, and
        `loss_by_source/NAME`, for a division of samples into groups by `source`, its mean over those of a group.
        `samples`, `tokens`, `samples_per_second` and `tokens_per_second` count all processes. `seconds` is the time
        since the end of the step before. `imbalance` is the largest cost of a process divided by the mean, and `fill`
        the tokens divided by `max_tokens`. `busy_seconds`, `busy_tokens`, `busy_token_pairs` and `busy_batches` count
        the process of the largest cost alone, which waits neither for its data nor for the others: a step takes as
        long as the slowest process, and an own time of the others would need a device that is synchronised before
        every exchange of gradients. Of a step that is read late, `busy_seconds` is there if that process is this one.

        Where operations are counted, `model_tflops` are those that the samples are trained for (forward and backward
        pass, without recomputation and padding) and `hardware_tflops` all that are computed, in TFLOP per second and
        process; `mfu` and `hfu` (model and hardware FLOPs utilisation) are their shares of a peak that is known.
        """
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm, dtype=torch.float32)
        counted = torch.from_numpy(np.array([stop, *self._counts, math.nan if late else seconds()])).float()
        norm, counted = (to_device(part, self._sums.device) for part in (norm.reshape(1), counted))
        mine = torch.cat([norm, counted[:1], self._sums, counted[1:]])
        rows = self.accelerator.gather(mine[None])
        reading = Reading(rows, *(values.detach().float() for values in losses))
        self._reset()

        def read() -> tuple[dict[str, float], list[FloatArray]]:
            rows, *local_losses = reading.values()
            if late:
                rows[self.accelerator.process_index, -1] = seconds()
            metrics = self._metrics(rows.double(), factor)
            if grad_norm is None:
                del metrics["grad_norm"]
            return metrics, [values.numpy() for values in local_losses]

        return PendingMetrics(rows=rows, read=read)

    def _metrics(self, rows: torch.Tensor, factor: float) -> dict[str, float]:
        """Return the metrics of what each process gathered."""
        bins = len(self._names)
        largest = dict(zip(_FIRST, rows[:, : len(_FIRST)].amax(0).tolist(), strict=True))
        loss, sums, seen, counts = rows[:: self.degree, 2:].split([1, bins, bins, _COUNTS], 1)
        samples, tokens, cost, batches, pairs, model, hardware, busy = counts.unbind(1)
        costliest = int(cost.argmax())
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        metrics = {
            "train_loss": float(loss.sum()) * factor,
            "samples": int(samples.sum()),
            "tokens": int(tokens.sum()),
            "seconds": elapsed,
            "samples_per_second": float(samples.sum()) / elapsed,
            "tokens_per_second": float(tokens.sum()) / elapsed,
            "imbalance": float(cost.max() / cost.mean()),
            **({} if busy[costliest].isnan() else {"busy_seconds": float(busy[costliest])}),
            "busy_tokens": int(tokens[costliest]),
            "busy_token_pairs": float(pairs[costliest]),
            "busy_batches": int(batches[costliest]),
            "grad_norm": largest["grad_norm"],
            **({"stop": largest["stop"]} if largest["stop"] else {}),
        }
        if float(hardware.sum()):
            tera_seconds = 1e12 * elapsed * len(rows)
            metrics["model_tflops"] = float(model.sum()) / tera_seconds
            metrics["hardware_tflops"] = float(hardware.sum()) / tera_seconds
            if self.peak_tflops is not None:
                metrics["mfu"] = metrics["model_tflops"] / self.peak_tflops
                metrics["hfu"] = metrics["hardware_tflops"] / self.peak_tflops
        if self.max_tokens is not None:
            metrics["fill"] = float(tokens.sum() / (batches.sum() * self.max_tokens))
        for level in torch.nonzero(seen.sum(0)).flatten().tolist():
            metrics[f"loss_by_{self._names[level]}"] = float(sums[:, level].sum() / seen[:, level].sum())
        return metrics


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
