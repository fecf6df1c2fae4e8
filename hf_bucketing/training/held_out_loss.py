"""The loss of held-out samples: each counts once over all processes, with the same noise whenever it is computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from ..buckets.arrays import FloatArray, IntArray
from ..columns.arrays import column_array
from ..errors import BucketingError
from ..loaders.workers import worker_options
from .config import LoaderConfig
from .data import TrainingData
from .held_out import HeldOutConfig
from .steps import Step

_NAMED = 5
"""Rows that a message names."""


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Compute the loss of held-out samples.

    No global random number is drawn, and accelerate knows nothing of the loader, so that training continues as if the
    loss had not been computed.

    Args:
        data ([`TrainingData`][hf_bucketing.training.data.TrainingData]): Held-out rows, planned for evaluation.
        config ([`HeldOutConfig`][hf_bucketing.training.held_out.HeldOutConfig]): Number of noise levels.
        workers ([`LoaderConfig`][hf_bucketing.training.config.LoaderConfig]): Worker processes, which end after each
            computation.
    """

    data: TrainingData
    config: HeldOutConfig
    workers: LoaderConfig

    def describe(self) -> list[str]:
        """Return how many samples are held out and what computing their loss costs, as lines of text."""
        plan, config = self.data.sampler.plan(), self.config
        levels, sizes = config.validation_noise_levels, len(np.unique(self.data.bucket_ids[plan.indices]))
        return [
            f"  Held out = {plan.kept} samples of {sizes} sizes, never trained on",
            f"  Held-out loss = {levels} noise levels, {plan.num_steps * levels} forwards on each process, every "
            f"{config.validation_loss_steps} optimizer steps and at the end",
        ]

    def compute(self, step: Step, transformer: torch.nn.Module, accelerator: Accelerator) -> dict[str, Any]:
        """Run the held-out samples and return their losses as JSON values; call it on every process.

        All processes run as many forwards. A row that only fills up the last step has no weight, and neither has a
        sample that replaces an unreadable one.

        Returns:
            `dict`: `validation_loss`, weighted as in training; `samples`, the number that counts; `unreadable`, the
            `index` of those that do not; `by_bucket` and `by_noise`, lists of mean losses; and `seconds`.

        Raises:
            BucketingError: If no sample can be read, or a loss is not finite.
        """
        start, levels = time.perf_counter(), self.config.validation_noise_levels
        plan = self.data.sampler.plan()
        neighbours = accelerator.num_processes // plan.num_processes  # which take the same samples
        positions = range(accelerator.process_index // neighbours, plan.num_batches, plan.num_processes)
        batches = [plan.batch(position) for position in positions]
        counts_once = np.zeros(len(plan.indices), bool)
        counts_once[np.unique(plan.indices, return_index=True)[1]] = True
        index = column_array(self.data.loader.dataset, "index")
        # Of each row: whether it counts, its loss at each noise level, and those levels.
        found = torch.zeros(len(index), 1 + 2 * levels)
        for position, rows, batch in zip(positions, batches, self._loader(batches), strict=True):
            first = int(plan.offsets[position])
            counts = counts_once[first : first + len(rows)] & (np.asarray(batch["index"]) == index[rows])
            batch = send_to_device(batch, accelerator.device)
            losses = step.held_out(transformer, batch, num_levels=levels)
            if accelerator.process_index % neighbours:
                continue
            columns = [torch.ones(len(rows)), *(one.values for one in losses), *(one.noise_levels for one in losses)]
            found[rows[counts]] = torch.stack([one.float().cpu() for one in columns], 1)[torch.from_numpy(counts)]
        whole = accelerator.reduce(found.to(accelerator.device), "sum").double().cpu().numpy()
        read = whole[:, 0] == 1
        assert whole[:, 0].max() <= 1, "each row counts once over all processes"
        planned = np.unique(plan.indices)
        return {
            **self._summary(np.flatnonzero(read), whole[read, 1 : 1 + levels], whole[read, 1 + levels :], index),
            "unreadable": index[planned[~read[planned]]].tolist(),
            "seconds": time.perf_counter() - start,
        }

    def _loader(self, batches: list[IntArray]) -> DataLoader[Any]:
        """Return a loader of this process's batches; its workers get their seed from a generator of its own."""
        workers, loader = self.workers.dataloader_num_workers, self.data.loader
        return DataLoader(
            loader.dataset,
            batch_sampler=[rows.tolist() for rows in batches],
            collate_fn=loader.collate_fn,
            timeout=self.workers.dataloader_timeout if workers else 0,
            generator=torch.Generator(),
            **worker_options(workers),
        )

    def _summary(self, rows: IntArray, losses: FloatArray, noise: FloatArray, index: IntArray) -> dict[str, Any]:
        """Return means of losses and of noise levels, `(n, levels)` each, of rows `(n,)`."""
        if not len(rows):
            raise BucketingError("None of the held-out samples can be read; see logs/unreadable-validation.jsonl.")
        if not np.isfinite(losses).all():
            wrong = index[rows[~np.isfinite(losses).all(1)]].tolist()
            raise BucketingError(
                f"The loss of {len(wrong)} held-out samples is not finite (index {wrong[:_NAMED]}); lower "
                "`learning_rate`, or check these samples."
            )
        weights = self.data.loss_weights(rows, epoch=0).numpy()
        by_noise = np.average(losses, axis=0, weights=weights)
        count = len(by_noise)
        ids = self.data.bucket_ids[rows]
        return {
            "validation_loss": float(by_noise.mean()),
            "samples": len(rows),
            "by_bucket": [self._of_bucket(bucket, losses[ids == bucket]) for bucket in np.unique(ids).tolist()],
            "by_noise": [
                {
                    "quantiles": [level / count, (level + 1) / count],
                    "noise_level": float(noise[:, level].mean()),
                    "samples": len(rows),
                    "loss": float(by_noise[level]),
                }
                for level in range(count)
            ],
        }

    def _of_bucket(self, bucket: int, losses: FloatArray) -> dict[str, Any]:
        size = self.data.table.size(bucket)
        return {"bucket_id": bucket, "size": list(size), "samples": len(losses), "loss": float(losses.mean())}


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Set a model and its modules to evaluation inside a `with` block, and each to its own mode after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def unreadable_message(now: list[int], before: list[int] | None) -> str | None:
    """Return a warning if held-out samples cannot be read, or others than when the loss was computed before.

    Args:
        now (list of `int`): The `index` of samples that cannot be read.
        before (list of `int`, *optional*): The same when the loss was computed before, if it was.
    """
    if not now and not before:
        return None
    said = f"{len(now)} held-out samples cannot be read and do not count in this held-out loss (index {now[:_NAMED]})"
    if before is not None and now != before:
        said += f"; before, {len(before)} did not count, so that the two losses are means over different samples"
    return f"{said}."
