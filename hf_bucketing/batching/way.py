"""What a run asks of a way of batching: sizes, plans, batches of rows and of streams, steps, and words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch

from ..buckets.arrays import IntArray
from ..buckets.cost import CostModel
from ..columns.buckets import BucketColumns
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream, StreamSample
from ..conditions.rows import ConditionRules
from ..configuration.batches import BatchConfig
from ..loaders.collators import BucketCollator, PackCollator
from ..loaders.planned import PlannedBatchSampler
from ..loaders.random_resize import RandomResize
from ..models.recipe import Recipe
from ..plans.epoch import EpochPlan
from ..plans.rows import EpochConfig
from ..plans.ways import CachedAs
from ..streaming.grouping import Grouping
from .sample_rows import SampleRows, Table
from .steps import Step

Plan = TypeVar("Plan", bound=EpochConfig)
"""Configuration of the plans of a way."""

Collator: TypeAlias = BucketCollator | PackCollator
"""What decodes the files of a batch."""


@dataclass(frozen=True)
class Batching(ABC, Generic[Plan]):
    """A way of putting samples into batches, with the settings of a run.

    All that a run does otherwise in one way than in another is a method or a word of it: no other package asks which
    way a run takes.

    Args:
        config ([`BatchConfig`][hf_bucketing.configuration.BatchConfig]): Settings of the batches.
    """

    config: BatchConfig

    stacks: ClassVar[bool] = False
    """Whether the samples of a batch have one size, that of their bucket, and are stacked; else each keeps its own."""

    cached_as: ClassVar[CachedAs]
    """`batching` of the caches whose latents have the sizes of this way."""

    size_title: ClassVar[str]
    """What the model card calls the sizes that were trained."""

    more_cached_sizes: ClassVar[str]
    """What a cache can hold beside one view of each sample, for advice."""

    # Sizes

    @abstractmethod
    def table(self, prepared: PreparedDataset | PreparedStream) -> Table:
        """Return the table of the sizes that samples are trained at."""

    @abstractmethod
    def columns(self, prepared: PreparedDataset) -> BucketColumns | None:
        """Return what computes the sizes of prepared rows anew; None where they have those of `table`."""

    def table_json(self, table: Table) -> str | None:
        """Return the sizes of the buckets for the logs; None where samples keep their own."""
        return None

    # Batches of rows

    @abstractmethod
    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> Plan:
        """Return the settings of the plan of an epoch.

        Args:
            order ([`EpochConfig`][hf_bucketing.plans.EpochConfig]): Its order, and whether rows are evaluated.
            cost_model ([`CostModel`][hf_bucketing.CostModel]): Cost of a row, for plans that balance it.
            accumulation_steps (`int`): Batches per optimizer step.
        """

    def fitting(self, rows: SampleRows, plan: Plan) -> SampleRows:
        """Reject the few rows that no batch can hold; all rows where each fits one."""
        return rows

    @abstractmethod
    def sampler(self, rows: SampleRows, plan: Plan, **options: Any) -> PlannedBatchSampler:
        """Return the sampler of rows; `options` are `weights` and `longest_first` of every sampler.

        Raises:
            BucketingError: If rows exceed the limits of a batch; the message names one.
        """

    def replacement_columns(self, sampler: PlannedBatchSampler) -> Mapping[str, IntArray]:
        """Return further columns by which replacements of unreadable rows are chosen."""
        return {}

    def computed_lengths(self, lengths: IntArray, offsets: IntArray) -> IntArray:
        """Return the tokens that a step computes at most for each sample of a plan, `(n,)`, padding included.

        Args:
            lengths (array of `int`, shape `(n,)`): Tokens of the samples, batch after batch.
            offsets (array of `int`, shape `(b + 1,)`): Where each batch begins among them.
        """
        return lengths

    def describe_plan(self, plan: EpochPlan) -> str:
        """Return what the log says of the steps of a plan, after a comma; nothing where there is nothing to say."""
        return ""

    # Batches of a stream

    def check_stream(self) -> None:
        """Raise BucketingError if rows cannot be batched so as they come."""

    @abstractmethod
    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> Grouping:
        """Return how the rows of a stream are grouped."""

    def check_grouping(self, grouping: Grouping, sample: StreamSample) -> None:
        """Raise PlanError if one of the first rows of a stream exceeds the limits of a batch."""

    @abstractmethod
    def buckets_of(self, sample: StreamSample, table: Table) -> dict[int, int]:
        """Return the buckets of the first rows of a stream, each with its number of rows."""

    @abstractmethod
    def possible_buckets(self, sample: StreamSample, table: Table) -> Sequence[int]:
        """Return the buckets that samples of a stream can have, as far as that is known."""

    @abstractmethod
    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        """Return the samples of a full batch of a stream, 0 where one sample exceeds the limits.

        Each has a bucket, so many `tokens` of its own, and `condition_tokens` of its conditions.
        """

    # Collators and steps

    @abstractmethod
    def collator(self, table: Table, *, resize: RandomResize | None = None, **media: Any) -> Collator:
        """Return the collator of files; `media` are arguments of [`MediaCollator`] of `loaders/collators.py`."""

    @abstractmethod
    def step(self, recipe: Recipe, **options: Any) -> Step:
        """Return the step of a recipe, and make its transformer ready for it; `options` are those of [`Step`]."""

    def release(self, transformer: torch.nn.Module) -> None:
        """Make a transformer stock again that a step was made for."""
