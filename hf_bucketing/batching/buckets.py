"""Buckets: stacks of samples of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch

from ..buckets.arrays import IntArray
from ..buckets.cost import CostModel
from ..buckets.table import BucketTable
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream, StreamSample
from ..conditions.rows import ConditionRules
from ..loaders.bucket_sampler import BucketBatchSampler
from ..loaders.collators import BUCKET_PART, BucketCollator
from ..loaders.planned import PlannedBatchSampler
from ..loaders.random_resize import RandomResize
from ..models.recipe import Recipe
from ..models.samples import Samples
from ..packing.token_drop import Seed
from ..plans.buckets import BucketPlanConfig
from ..plans.epoch import EpochPlan
from ..plans.rows import EpochConfig
from ..plans.ways import CachedAs
from ..streaming.grouping import BucketGrouping, Grouping
from .drawing import loss_weights
from .sample_rows import SampleRows, Table
from .steps import Prediction, Step
from .way import Batching


class BucketStep(Step):
    """Run one forward over a stack of samples of one size."""

    stacks = True

    def _predict(self, transformer: torch.nn.Module, samples: Samples, seeds: Sequence[Seed] | None) -> Prediction:
        inputs = self.recipe.model_inputs(samples)
        weights = loss_weights(inputs, samples)
        if samples.audio is None:
            output = self.recipe.predict(transformer, samples, inputs)
            return Prediction(partial(list, output), partial(self.objective.losses, output, weights=weights))
        output, audio = self.recipe.predict_with_audio(transformer, samples, inputs)
        losses = partial(self.objective.losses, output, weights=weights)
        return Prediction(partial(list, output), losses, audio)


class Buckets(Batching[BucketPlanConfig]):
    """Stacks of samples of one size, that of their bucket in the table of the data set."""

    stacks = True
    cached_as: ClassVar[CachedAs] = "bucket"
    size_title: ClassVar[str] = "bucket"
    more_cached_sizes: ClassVar[str] = "and each sample at several sizes after --each_budget of hf_bucketing prepare"

    def table(self, prepared: PreparedDataset | PreparedStream) -> BucketTable:
        return prepared.table

    def columns(self, prepared: PreparedDataset) -> None:
        return None

    def table_json(self, table: Table) -> str:
        return cast("BucketTable", table).to_json()

    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> BucketPlanConfig:
        return BucketPlanConfig(**vars(self.config.bucket_limits), remainder=self.config.remainder, **vars(order))

    def sampler(self, rows: SampleRows, plan: BucketPlanConfig, **options: Any) -> BucketBatchSampler:
        return BucketBatchSampler(
            rows.bucket_ids,
            table=rows.table,
            config=plan,
            spec=rows.prepared.spec,
            text_tokens=rows.counting.text_tokens,
            rejection=rows.prepared.dataset["rejection"],
            conditions=rows.conditions,
            **options,
        )

    def replacement_columns(self, sampler: PlannedBatchSampler) -> Mapping[str, IntArray]:
        parts = cast("BucketBatchSampler", sampler).parts
        return {} if parts is None else {BUCKET_PART: parts.ids}

    def describe_plan(self, plan: EpochPlan) -> str:
        return f", {plan.num_mixed_steps} of them mixed"

    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> BucketGrouping:
        return BucketGrouping(
            **vars(self.config.bucket_limits),
            table=prepared.table,
            spec=prepared.spec,
            text_tokens=text_tokens,
            conditions=conditions,
        )

    def check_grouping(self, grouping: Grouping, sample: StreamSample) -> None:
        for bucket in sample.buckets:
            cast("BucketGrouping", grouping).size_of(bucket)

    def buckets_of(self, sample: StreamSample, table: Table) -> dict[int, int]:
        return dict(sample.buckets)

    def possible_buckets(self, sample: StreamSample, table: Table) -> Sequence[int]:
        return range(len(cast("BucketTable", table)))

    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        assert isinstance(grouping, BucketGrouping), "it is that of this way"
        if grouping.max_tokens is not None and tokens + condition_tokens + grouping.text_tokens > grouping.max_tokens:
            return 0  # an error if such a row comes
        return grouping.size_of(bucket, condition_tokens=condition_tokens)

    def collator(self, table: Table, *, resize: RandomResize | None = None, **media: Any) -> BucketCollator:
        return BucketCollator(table, **media)

    def step(self, recipe: Recipe, **options: Any) -> BucketStep:
        return BucketStep(recipe=recipe, **options)
