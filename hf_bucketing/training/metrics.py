"""What is logged of an optimizer step, summed over its micro-batches and gathered over processes in one call."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator

_BINS = 10


class StepMetrics:
    """Sums over one accumulation window of this process.

    Args:
        accelerator (`Accelerator`): Gathers.
        capacity (`int`, *optional*): Tokens that a process may take per micro-batch, for the fill.
    """

    def __init__(self, accelerator: Accelerator, *, capacity: int | None) -> None:
        self.accelerator = accelerator
        self.capacity = capacity
        self._start = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        device = self.accelerator.device
        self._loss = torch.zeros((), device=device)
        self._by_level = torch.zeros(2, _BINS, device=device)
        self._samples = self._tokens = self._batches = 0
        self._cost = 0.0

    def add(
        self, values: torch.Tensor, noise_levels: torch.Tensor, *, weights: torch.Tensor, tokens: int, cost: float
    ) -> None:
        """Add a micro-batch.

        Args:
            values (`torch.Tensor` of shape `(n,)`): Losses of its samples.
            noise_levels (`torch.Tensor` of shape `(n,)`): Timesteps over the schedule's length, in [0, 1].
            weights (`torch.Tensor` of shape `(n,)`): Each sample's share in the loss of the step over all processes.
            tokens (`int`): Of its samples.
            cost (`float`): Of its samples, by any measure of work.
        """
        values = values.detach().float()
        self._loss += (values * weights.to(values)).sum()
        bins = (noise_levels.detach().float() * _BINS).long().clamp(0, _BINS - 1)
        self._by_level[0].index_add_(0, bins, values)
        self._by_level[1].index_add_(0, bins, torch.ones_like(values))
        self._samples += len(values)
        self._tokens += tokens
        self._cost += cost
        self._batches += 1

    def finish(self) -> dict[str, float]:
        """Return the step's metrics over all processes, and begin the next step; call it on every process.

        `train_loss` is the loss; `loss_by_noise/0.1` the mean over samples with noise levels from 0.1 to 0.2;
        `samples`, `samples_per_second` and `tokens_per_second` count all processes; `seconds` go from the end of the
        step before to the end of this one; `imbalance` is the largest cost of a process over the mean; `fill` the
        tokens over the capacity.
        """
        counts = [self._samples, self._tokens, self._cost, self._batches]
        mine = torch.cat([self._loss[None], self._by_level.flatten(), torch.tensor(counts, device=self._loss.device)])
        rows = self.accelerator.gather(mine[None]).cpu().double()
        loss, sums, seen = rows[:, 0], rows[:, 1 : 1 + _BINS], rows[:, 1 + _BINS : 1 + 2 * _BINS]
        samples, tokens, cost, batches = rows[:, 1 + 2 * _BINS :].unbind(1)
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        metrics = {
            "train_loss": float(loss.sum()),
            "samples": int(samples.sum()),
            "tokens": int(tokens.sum()),
            "seconds": seconds,
            "samples_per_second": float(samples.sum()) / seconds,
            "tokens_per_second": float(tokens.sum()) / seconds,
            "imbalance": float(cost.max() / cost.mean()),
        }
        if self.capacity is not None:
            metrics["fill"] = float(tokens.sum() / (batches.sum() * self.capacity))
        for level in torch.nonzero(seen.sum(0)).flatten().tolist():
            metrics[f"loss_by_noise/{level / _BINS:.1f}"] = float(sums[:, level].sum() / seen[:, level].sum())
        self._reset()
        return metrics
