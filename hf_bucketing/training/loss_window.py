"""The denominator of the loss of an accumulation window, also where the window's samples are not known before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator

from ..batching.step_rows import StepRows
from ..devices import to_device


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
