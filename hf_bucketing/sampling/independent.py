"""Bucket plans without lockstep: each process draws buckets for itself."""

from __future__ import annotations

import numpy as np

from .assemble import counted_plan, labels_of
from .bucket_config import BucketPlanConfig
from .deal import group_rows, ranges, spread_order
from .plan import EpochPlan, IntArray
from .rows import EpochRows


def plan_independent(
    bucket_ids: IntArray,
    config: BucketPlanConfig,
    *,
    chosen: EpochRows,
    num_processes: int,
    rng: np.random.Generator,
) -> EpochPlan:
    """Plan as NovelAI's aspect ratio bucketing does.

    Shuffled rows are trimmed to full batches on all processes and dealt to them in turn. A process puts the rows of
    each bucket that fill no batch into catch-all batches, and takes its batches in random order, which has the
    distribution of drawing buckets weighted by the batches that they have left. Every list is a multiple of the batch
    size, so all processes have equally many batches. Source: the README of novelai-aspect-ratio-bucketing.
    """
    size = int(config.batch_sizes(np.zeros(1, np.int64))[0])
    rows = rng.permutation(chosen.rows)
    rows = rows[: len(rows) // (size * num_processes) * size * num_processes]
    num_steps = len(rows) // (size * num_processes)
    batches = [
        _batches_of(rows[process::num_processes], bucket_ids, size=size, rng=rng) for process in range(num_processes)
    ]
    indices = np.stack(batches, axis=1).ravel() if num_steps else rows
    offsets = np.arange(num_steps * num_processes + 1) * size
    labels = labels_of(bucket_ids, indices, offsets[:-1], offsets[1:], base=config.base)
    return counted_plan(indices, offsets, labels, num_processes=num_processes, chosen=chosen)


def _batches_of(rows: IntArray, bucket_ids: IntArray, *, size: int, rng: np.random.Generator) -> IntArray:
    """Return one process's batches, shape `(num_steps, size)`, in random order."""
    groups = group_rows(rows, bucket_ids, rng=rng)
    full = groups.counts // size * size
    whole = groups.rows[np.repeat(groups.starts, full) + ranges(full)]
    rest = groups.counts - full
    left = groups.rows[np.repeat(groups.starts + full, rest) + ranges(rest)]
    left = left[spread_order(len(left) // size, size)]
    return rng.permutation(np.concatenate([whole, left]).reshape(-1, size))
