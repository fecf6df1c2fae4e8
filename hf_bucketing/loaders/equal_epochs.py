"""Epochs of equally many steps, for hosts that count on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..buckets.arrays import IntArray
from ..errors import PlanError
from ..plans import EpochPlan
from .planned import PlannedBatchSampler


class EqualEpochs(PlannedBatchSampler):
    """Cut the steps of a sampler's epochs, one after the other, into epochs of equally many steps.

    transformers.Trainer takes as many steps of every epoch as the first one has, and resumes by that number, but packs
    and weighted rows make epochs of different lengths. With this, `max_steps=sampler.total_steps(3)` trains on exactly
    three epochs of `sampler`. The collator gets the epoch that the host counts.

    Args:
        sampler ([`PlannedBatchSampler`]): Sampler whose epochs are cut.

    Raises:
        PlanError: If the sampler has `evaluation=True`, or its sizes are drawn anew in each of its epochs.

    Example:
        ```py
        class PackTrainer(Trainer):
            def get_train_dataloader(self):
                loader = DataLoader(self.train_dataset, batch_sampler=EqualEpochs(sampler), collate_fn=collator)
                return self.accelerator.prepare(loader)
        ```
    """

    def __init__(self, sampler: PlannedBatchSampler) -> None:
        if sampler.config.evaluation or callable(getattr(sampler, "_num_tokens", None)):
            raise PlanError("EqualEpochs cannot cut an evaluation, or epochs whose sizes are drawn anew.")
        super().__init__(
            sampler.config,
            num_rows=sampler.num_rows,
            weights=sampler.weights,
            longest_first=sampler.longest_first,
            num_processes=sampler._num_processes,
            process_index=sampler._process_index,
        )
        self._cut = sampler

    def _columns(self) -> Mapping[str, object]:
        return {**self._cut._columns(), "epochs": "equal"}

    def check_rows(self, loader: Any) -> None:
        """Raise as the sampler does whose epochs are cut."""
        self._cut.check_rows(loader)

    def _check_processes(self) -> None:
        super()._check_processes()
        self._cut._check_processes()

    def _ordered_plan(self, epoch: int, num_processes: int, consumed: IntArray | None) -> EpochPlan:
        if consumed is not None:
            raise PlanError("EqualEpochs resumes on as many processes as before.")
        size = self._cut._steps_of(0, num_processes)
        start, stop = epoch * size, (epoch + 1) * size
        parts, end, number = [], 0, 0
        while end < stop:
            first, end = end, end + self._cut._steps_of(number, num_processes)
            if end > start:
                plan = self._cut._ordered_plan(number, num_processes, None)
                low, high = (step * num_processes for step in (max(start - first, 0), min(stop, end) - first))
                bounds = plan.offsets[low : high + 1]
                parts.append((plan.indices[bounds[0] : bounds[-1]], np.diff(bounds), plan.bucket_ids[low:high]))
            number += 1
        indices, sizes, labels = map(np.concatenate, zip(*parts, strict=True))
        return EpochPlan(
            indices=indices,
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            bucket_ids=labels,
            num_processes=num_processes,
            repeated=len(indices) - len(np.unique(indices)),
        )

    @property
    def _equal_epochs(self) -> bool:
        return True
