"""Optimizer steps: the one mean of losses over a window of accumulation, and steps of infinite losses, skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, gather_object
from torch.distributed.tensor import DTensor

from ..batching.run_data import StepRows
from ..buckets.arrays import BoolArray, FloatArray
from ..devices import to_device
from ..errors import BucketingError


class LossWindow:
    """Weigh the losses of a window of gradient accumulation so that together they make one mean over all processes.

    A plan knows the sum of all weights before the window begins, unless they are those of what is drawn for samples.
    For these and for a stream, the window begins with that of its first batches as if all were alike. When it ends,
    [`finish`][LossWindow.finish] scales the gradients to the sum that came: the same mean, without a batch read ahead.

    Args:
        accelerator (`Accelerator`): Its processes and accumulation steps make the window.
        degree (`int`): Neighbouring processes that take the same samples, which count once.
    """

    def __init__(self, accelerator: Accelerator, *, degree: int = 1) -> None:
        self.accelerator, self.degree = accelerator, degree
        self._total: float | None = None
        self._local = 0.0
        self._known = False

    def weigh(self, rows: StepRows) -> torch.Tensor:
        """Return the weights of a batch's losses, `(n,)`, whose sum over the window is 1 or becomes 1 at its end."""
        if self._total is None:
            self._known = rows.total is not None
            steps = self.accelerator.gradient_accumulation_steps
            self._total = rows.total if rows.total is not None else steps * self._over_processes(rows.weights.sum())
        self._local += float(rows.weights.sum())
        return to_device(rows.weights / self._total, self.accelerator.device)

    def finish(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """End the window after its last backward pass, on all processes together.

        Scale the gradients of `parameters`, unless the weights were right from the start.

        Returns:
            `float`: The factor, which the sum of the weighted losses needs too.
        """
        assert self._total is not None, "weigh comes first"
        factor = 1.0
        if not self._known and self.accelerator.gradient_accumulation_steps > 1:
            factor = self._total / self._over_processes(torch.tensor(self._local, dtype=torch.float64))
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_mul_(gradients, factor)
        self._total, self._local = None, 0.0
        return factor

    def _over_processes(self, weight: torch.Tensor) -> float:
        if self.accelerator.num_processes == 1:
            return float(weight)  # which lies on the CPU, so that nothing waits for the device
        summed: torch.Tensor = self.accelerator.reduce(weight.to(self.accelerator.device), "sum")
        return float(summed) / self.degree


logger = get_logger(__name__)

_NAMED_ROWS = 20


class _Samples(NamedTuple):
    """Rows of a batch, and whether the loss of each is finite, and what was encoded of it."""

    rows: list[int]
    finite: list[bool]
    encoded: list[bool]


class SkippedSteps:
    """Decide of each optimizer step whether it may change the weights.

    One NaN among the gradients makes all weights NaN. A step whose loss or gradients are not finite is therefore
    skipped, as the gradient scaler of fp16 does: the weights stay, the learning rate schedule waits, and the rows of
    the step are named and logged. A single such step, of a broken sample or an overflow, costs less than a run that
    ends at night; several in a row mean that the weights or the settings are at fault, and end the run.

    [`StepMetrics`][hf_bucketing.training.step_metrics.StepMetrics] gathers loss and gradient norm, so that all
    processes decide alike without a further exchange.

    Args:
        accelerator (`Accelerator`): The run's accelerator.
        limit (`int`): Consecutive skipped steps that are tolerated.
        folder (`Path`): Output folder of the run, for messages.
        name_rows (callable): Returns what messages call some rows: their files, where these are known.
    """

    def __init__(
        self, accelerator: Accelerator, *, limit: int, folder: Path, name_rows: Callable[[list[int]], list[str]]
    ) -> None:
        self.accelerator = accelerator
        self.limit = limit
        self.folder = folder
        self.name_rows = name_rows
        self.in_a_row = 0
        self._window: list[_Samples] = []

    def add(self, rows: list[int], losses: FloatArray, encoded: BoolArray) -> None:
        """Add the rows of a batch of this process to the window of the next optimizer step.

        Args:
            rows (list of `int`): The rows.
            losses (array of `float`, shape `(n,)`): Their losses.
            encoded (array of `bool`, shape `(n,)`): Whether all that was encoded of each is finite.
        """
        self._window.append(_Samples(rows, np.isfinite(losses).tolist(), encoded.tolist()))

    def check(self, global_step: int, metrics: Mapping[str, float], *, epoch: int, step: int) -> dict[str, Any] | None:
        """Return None if the step may change the weights, or else what to log of it; call it on every process.

        Args:
            global_step (`int`): Number of the optimizer step, from 1.
            metrics (mapping): Metrics of the step, the same on every process: `train_loss` and, where it is known,
                `grad_norm`.
            epoch (`int`): Its epoch.
            step (`int`): Its last batch in the epoch.

        Raises:
            BucketingError: If a sample is encoded to numbers that are not finite, after more steps in a row than
                `limit`, or if DeepSpeed has applied the step.
        """
        window, self._window = self._window, []
        values = {name: metrics[name] for name in ("train_loss", "grad_norm") if name in metrics}
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        by_scaler = deepspeed and self.accelerator.optimizer_step_was_skipped
        if all(map(math.isfinite, values.values())) and not by_scaler:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        samples = gather_object(window) if self.accelerator.num_processes > 1 else window
        rows = sorted({row for batch in samples for row in batch.rows})
        broken = sorted({row for batch in samples for row, ok, _ in zip(*batch, strict=True) if not ok})
        unencoded = sorted({row for batch in samples for row, _, ok in zip(*batch, strict=True) if not ok})
        listed = " and ".join(f"{name} {value:.4g}" for name, value in values.items())
        place = f"Optimizer step {global_step} (epoch {epoch}, step {step}) has {listed}"
        if unencoded:
            what = describe_unencoded(self.name_rows(unencoded[:_NAMED_ROWS]))
            raise BucketingError(
                f'{place}. {what} Remove or change these samples, or leave them out with `on_error="replace"`.'
            )
        which = f"Its samples are rows {_listed(rows)}"
        which += f"; not finite is the loss of {_listed(broken)}." if broken else ", each of finite loss."
        advice = f"Lower `learning_rate`, or check these samples; {self.folder / 'logs'} has the losses of all steps."
        if deepspeed and not by_scaler:
            raise BucketingError(f"{place}, and DeepSpeed has applied it, so nothing is saved. {which} {advice}")
        if self.in_a_row > self.limit:
            row = f", the last of {self.in_a_row} such steps in a row" if self.limit else ""
            raise BucketingError(f"{place}{row}; more than `max_skipped_steps` end the run. {which} {advice}")
        logger.warning(f"{place} and changes no weights. {which}")
        return {"epoch": epoch, "step": step, **values, "index": rows, "not_finite": broken}


def describe_unencoded(names: Sequence[str]) -> str:
    """Return a sentence about samples, by name, of which encoders made NaN or infinite numbers."""
    return f"The VAE or the text encoder makes NaN or infinite numbers of {', '.join(names)}, which cannot be trained."


def check_finite(weights: Iterable[torch.Tensor], accelerator: Accelerator, *, what: str) -> None:
    """Raise on every process unless all weights are finite; call it on every process, before they are saved.

    Raises:
        BucketingError: If one is not; `what` says in the message what is not saved.
    """
    broken, total = torch.zeros((), device=accelerator.device), 0
    for weight in weights:
        part = weight.to_local() if isinstance(weight, DTensor) else weight
        broken += (~part.detach().isfinite()).any().to(broken)
        total += 1
    if count := int(accelerator.reduce(broken, "max")):
        raise BucketingError(
            f"{count} of {total} trained tensors hold values that are not finite, so {what}. Lower `learning_rate`, "
            "and resume from a checkpoint or start again."
        )


def _listed(rows: list[int]) -> str:
    more = f" and {len(rows) - _NAMED_ROWS} more" if len(rows) > _NAMED_ROWS else ""
    return ", ".join(map(str, rows[:_NAMED_ROWS])) + more
