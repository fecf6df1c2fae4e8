"""Padding, bucketing and packing on the same data, each measured on the plan of one epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import count_rejections
from ..buckets.open_table import open_table
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..plans.epoch import EpochPlan
from .config import ReportConfig, SizeColumns
from .plans import default_capacity, plan_bucketing, plan_packing, plan_padding, strip_tokens
from .targets import Sizes, Targets, bucket_targets, kept_area, kept_frames, own_targets, read_sizes
from .values import as_json

StrategyName = Literal["padding", "bucketing", "packing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyReport:
    """One strategy, measured on the plan of one epoch; means of nothing are NaN.

    Attributes:
        name (`"padding"`, `"bucketing"` or `"packing"`): See [`compare_strategies`].
        kept (`int`): Samples in the plan.
        dropped (mapping of `str` to `int`): Samples that are not, by the label of their
            [`Rejection`][hf_bucketing.Rejection], or `remainder` for those that fill no step.
        num_steps (`int`): Steps of the epoch, on each process.
        mixed_steps (`int`): Bucketing: steps whose processes hold several buckets. 0 for the others.
        real_tokens (`int`): Tokens of the kept samples at the sizes that they are trained at.
        computed_tokens (`int`): Tokens that the model computes, padding included.
        cropped_area (`float`): Mean over the kept samples of the share of a frame that cover-resize and crop remove.
        cropped_frames (`float`): Mean over the kept samples of the share of the frames that is cut off.
        step_balance (`float`): Mean over the steps of (mean cost over processes ÷ largest cost over processes);
            1 if no process ever waits for another.
        epoch_cost (`float`): Sum over the steps of the largest cost over processes, in floating-point operations of
            one transformer block's forward pass: what the clock shows.
        efficiency (`float`): Cost of the kept samples, each alone and without padding, ÷ (`epoch_cost` · processes):
            the share of all processes' time that is neither spent on padding nor on waiting, at any resolution.
        capacity (`int`, *optional*): Packing: tokens per process and step. None for the others.
    """

    name: StrategyName
    kept: int
    dropped: Mapping[str, int]
    num_steps: int
    mixed_steps: int
    real_tokens: int
    computed_tokens: int
    cropped_area: float
    cropped_frames: float
    step_balance: float
    epoch_cost: float
    efficiency: float
    capacity: int | None = None

    @property
    def token_use(self) -> float:
        """Real tokens ÷ computed tokens."""
        return self.real_tokens / self.computed_tokens if self.computed_tokens else float("nan")

    @property
    def tokens_per_sample(self) -> float:
        """Mean of the real tokens of a kept sample."""
        return self.real_tokens / self.kept if self.kept else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, NaN as None."""
        derived = {"token_use": self.token_use, "tokens_per_sample": self.tokens_per_sample}
        return {**as_json(self), **as_json(derived)}


def compare_strategies(
    columns: SizeColumns, table: BucketTable, *, spec: LatentSpec, config: ReportConfig
) -> tuple[StrategyReport, ...]:
    """Measure the three strategies on one data set.

    - **padding**: `batch_size` samples at their own sizes, drawn at random; every batch is padded to the largest
      number of frames, the largest height and the largest width that it holds. Every token attends to the whole
      padded sample.
    - **bucketing**: `batch_size` samples of one bucket, at the bucket's size.
    - **packing**: samples at their own sizes, dealt into packs of `capacity` tokens. Each takes whole strips, which
      are what is computed, and attends to its own strips.

    A sample's own size is rounded up to whole tokens, its frames down to a number that the model takes.

    Args:
        columns ([`SizeColumns`]): Sizes of all rows.
        table ([`BucketTable`][hf_bucketing.BucketTable]): For bucketing.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model, which make tokens of pixels.
        config ([`ReportConfig`]): Batch size, capacity, processes and cost.

    Returns:
        `tuple[StrategyReport, ...]`: Padding, bucketing, packing.

    Raises:
        BucketingError: If there is no row, or a bucket does not divide into whole tokens.
        PlanError: If a sample exceeds `config.capacity`.
    """
    sizes = read_sizes(columns)
    own = own_targets(sizes, spec=spec, config=config)
    bucketed = bucket_targets(sizes, table, spec=spec, config=config)
    epochs = (_padding(own, spec, config=config), _bucketing(bucketed, config), _packing(own, config))
    return tuple(_measure(epoch, sizes, config=config) for epoch in epochs)


class _Epoch(NamedTuple):
    """One epoch of a strategy: tokens that are computed, in any grouping, and the cost of each batch."""

    name: StrategyName
    targets: Targets
    plan: EpochPlan
    computed: IntArray
    costs: FloatArray
    capacity: int | None = None


def _padding(targets: Targets, spec: LatentSpec, *, config: ReportConfig) -> _Epoch:
    plan = plan_padding(targets, config)
    if not plan.num_batches:
        return _Epoch("padding", targets, plan, np.zeros(0, np.int64), np.zeros(0))
    largest = (np.maximum.reduceat(side[plan.indices], plan.offsets[:-1]) for side in targets.sizes)
    table = open_table(spec)
    padded = table.num_tokens(table.assign(*largest).bucket_id, spec=spec)
    counts = np.diff(plan.offsets)
    return _Epoch("padding", targets, plan, padded * counts, config.cost_model.cost(padded) * counts)


def _bucketing(targets: Targets, config: ReportConfig) -> _Epoch:
    plan = plan_bucketing(targets, config)
    tokens = targets.num_tokens[plan.indices]
    return _Epoch("bucketing", targets, plan, tokens, config.cost_model.pack_cost(tokens, plan.offsets))


def _packing(targets: Targets, config: ReportConfig) -> _Epoch:
    capacity = config.capacity or default_capacity(targets, config)
    plan = plan_packing(targets, config, capacity=capacity)
    tokens = strip_tokens(targets.num_tokens[plan.indices], config)
    return _Epoch("packing", targets, plan, tokens, config.cost_model.pack_cost(tokens, plan.offsets), capacity)


def _measure(epoch: _Epoch, sizes: Sizes, *, config: ReportConfig) -> StrategyReport:
    targets, plan, rows = epoch.targets, epoch.plan, epoch.plan.indices
    by_step = epoch.costs.reshape(plan.num_steps, plan.num_processes)
    slowest = by_step.max(axis=1)
    remainder = {reason: count for reason, count in plan.drop_reasons.items() if reason != "rejected"}
    useful = float(config.cost_model.cost(targets.num_tokens[rows]).sum())

    def lost(kept: FloatArray) -> float:
        return 1 - float(kept[rows].mean()) if len(rows) else float("nan")

    return StrategyReport(
        name=epoch.name,
        kept=plan.kept,
        dropped={**count_rejections(targets.rejection), **remainder},
        num_steps=plan.num_steps,
        mixed_steps=plan.num_mixed_steps if epoch.name == "bucketing" else 0,
        real_tokens=int(targets.num_tokens[rows].sum()),
        computed_tokens=int(epoch.computed.sum()),
        cropped_area=lost(kept_area(sizes, targets.sizes)),
        cropped_frames=lost(kept_frames(sizes, targets.sizes)),
        step_balance=float((by_step.mean(axis=1) / slowest).mean()) if plan.num_steps else float("nan"),
        epoch_cost=float(slowest.sum()),
        efficiency=useful / float(slowest.sum() * plan.num_processes) if plan.num_steps else float("nan"),
        capacity=epoch.capacity,
    )
