"""Packs: one sequence of samples of any sizes, in strips."""

from __future__ import annotations

from typing import Any, ClassVar

from ..buckets.cost import CostModel
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.rows import ConditionRules
from ..errors import OversizeError
from ..loaders.pack_sampler import PackBatchSampler
from ..plans.packs import PackPlanConfig, strip_tokens
from ..plans.rows import EpochConfig
from ..streaming.grouping import Grouping, PackGrouping
from .own_sizes import OwnSizes
from .sample_rows import SampleRows, with_file


class Packs(OwnSizes[PackPlanConfig]):
    """Packs: one sequence of samples of their own sizes, each in whole strips."""

    size_title: ClassVar[str] = "size in packs"
    batch_name: ClassVar[str] = "pack"

    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> PackPlanConfig:
        batches = self.config
        return PackPlanConfig(
            **vars(batches.pack_limits),
            strategy=batches.pack_strategy,
            balance=batches.balance,
            cost_model=cost_model if batches.balance == "cost" else None,
            accumulation_steps=accumulation_steps,
            oversize="own_batch" if order.evaluation else "error",  # without gradients, it takes less memory
            **vars(order),
        )

    def limits(self, plan: PackPlanConfig) -> PackPlanConfig:
        return plan

    def sampler(self, rows: SampleRows, plan: PackPlanConfig, **options: Any) -> PackBatchSampler:
        try:
            return PackBatchSampler(
                rows.tokens_to_plan,
                config=plan,
                text_tokens=rows.counting.text_tokens,
                rejection=rows.prepared.dataset["rejection"],
                **options,
            )
        except OversizeError as error:
            advice = self.frames_that_fit(rows, plan)
            raise with_file(error, rows.prepared, advice=advice) from error

    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> PackGrouping:
        return PackGrouping(**vars(self.config.pack_limits), text_tokens=text_tokens)

    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        assert isinstance(grouping, PackGrouping), "it is that of this way"
        span = strip_tokens(tokens + condition_tokens, grouping.strip_length) + grouping.text_tokens
        return max(1, grouping.max_tokens // span)
