"""Lengths: stacks of samples of their own sizes, padded to the longest, whose padding attention does not see."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..buckets.arrays import IntArray
from ..buckets.cost import CostModel
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.rows import ConditionRules
from ..errors import BucketingError, OversizeError
from ..loaders.length_sampler import LengthBatchSampler
from ..loaders.row_column import warn_of_rejected
from ..plans.lengths import LengthPlanConfig
from ..plans.packs import PackPlanConfig, sample_spans
from ..plans.rows import EpochConfig
from ..streaming.grouping import Grouping
from .own_sizes import OwnSizes, PackStep
from .sample_rows import SampleRows, with_file

_NO_STREAMS = (
    '`batching="length"` plans batches by the lengths of all rows, and those of a stream are not known before they '
    'come. Omit `streaming`, or train packs (`batching="pack"`), which take rows as they come.'
)


class LengthStep(PackStep):
    """Run one forward over samples of different lengths, padded to the longest.

    Few of diffusers' transformers take a mask of latent tokens, and nearly all give the rows of a batch the positions
    of one grid. The rows are therefore strips of the packing engine, one for each sample: attention leaves their
    padding out, and each sample has the positions that it has alone. Models that look up positions by the columns of a
    row, such as Wan's 1,024, get as few rows of equal length for each sample as they allow, with less padding.
    """

    padded = True


class Lengths(OwnSizes[LengthPlanConfig]):
    """Batches of samples of like length, or of any, padded to the longest."""

    size_title: ClassVar[str] = "size in padded batches"
    batch_name: ClassVar[str] = "batch"
    step_class: ClassVar[type[PackStep]] = LengthStep

    def plan(self, order: EpochConfig, *, cost_model: CostModel, accumulation_steps: int) -> LengthPlanConfig:
        batches = self.config
        return LengthPlanConfig(
            batch_size=batches.train_batch_size if batches.max_tokens is None else None,
            max_tokens=batches.token_limit,
            strategy=batches.length_strategy,
            num_buckets=batches.length_buckets,
            oversize="own_batch" if order.evaluation else "error",
            **vars(order),
        )

    def limits(self, plan: LengthPlanConfig) -> PackPlanConfig | None:
        if plan.max_tokens is None:
            return None
        return PackPlanConfig(max_tokens=int(plan.max_tokens), strip_length=1, oversize=plan.oversize)

    def sampler(self, rows: SampleRows, plan: LengthPlanConfig, **options: Any) -> LengthBatchSampler:
        if rows.resize is not None:
            raise BucketingError(
                "The cached views of a sample have several sizes, and batches of like length are planned by one for "
                'each row. Give `cached_views="all"` or "first", or train packs (`batching="pack"`).'
            )
        limits, text_tokens = self.limits(plan), rows.counting.text_tokens
        if limits is not None:
            try:
                sample_spans(rows.num_tokens, limits, text_tokens=text_tokens)
            except OversizeError as error:
                raise with_file(error, rows.prepared, advice=self.frames_that_fit(rows, limits)) from error
        lengths = np.where(rows.num_tokens > 0, rows.num_tokens + text_tokens, 0)
        sampler = LengthBatchSampler(lengths, config=plan, **options)
        rejection = rows.prepared.dataset["rejection"]
        warn_of_rejected(lengths, lengths > 0, rejection=rejection, process_index=sampler.process_index)
        return sampler

    def computed_lengths(self, lengths: IntArray, offsets: IntArray) -> IntArray:
        return np.repeat(np.maximum.reduceat(lengths, offsets[:-1]), np.diff(offsets))

    def check_stream(self) -> None:
        raise BucketingError(_NO_STREAMS)

    def grouping(
        self,
        prepared: PreparedDataset | PreparedStream,
        *,
        text_tokens: int,
        conditions: ConditionRules,
    ) -> Grouping:
        raise BucketingError(_NO_STREAMS)

    def largest_batch(self, grouping: Grouping, bucket: int, *, tokens: int, condition_tokens: int) -> int:
        raise BucketingError(_NO_STREAMS)
