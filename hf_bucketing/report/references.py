"""What references do to batches: samples are grouped by the sizes of theirs too, and groups fill fewer batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import has_bucket
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..conditions.appended import AppendedFrames
from ..conditions.rows import RowConditions, bucket_parts
from .measure import ReportConfig, Targets, plan_batches

_FILLED = 0.9
"""Share of samples in full batches above which buckets serve as well as packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceReport:
    """What the references of a data set cost in bucketed batches; shares of nothing are 0.

    Attributes:
        num_samples (`int`): Samples with a bucket.
        shown (`int`): Samples among them with references.
        most (`int`): Most references of a sample.
        token_share (`float`): Tokens of references ÷ tokens of samples and references.
        buckets (`int`): Buckets in use.
        groups (`int`): Groups of samples that can be stacked: of one bucket, and with references of equal sizes.
        batch_size (`int`): Samples of a full batch.
        in_full_batches (`float`): Share of the samples of an epoch that are in full batches.
        without (`float`): The same share if there were no references.
        num_steps (`int`): Steps of an epoch, on each process.
        steps_without (`int`): Steps if there were no references.
    """

    num_samples: int
    shown: int
    most: int
    token_share: float
    buckets: int
    groups: int
    batch_size: int
    in_full_batches: float
    without: float
    num_steps: int
    steps_without: int


def measure_references(
    bucket_ids: IntArray,
    conditions: RowConditions,
    *,
    table: BucketTable,
    spec: LatentSpec,
    config: ReportConfig,
    weights: FloatArray | None = None,
) -> ReferenceReport | None:
    """Plan an epoch of buckets with and without references and compare them; None if no sample has any.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, negative for a rejected one.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions]): Conditions of the rows.
        table ([`BucketTable`][hf_bucketing.BucketTable]): Table of the buckets.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        config ([`ReportConfig`]): Samples per batch and processes.
        weights (array of `float`, shape `(n,)`, *optional*): Occurrences of each row per epoch; by default once.
    """
    ids = np.asarray(bucket_ids, np.int64)
    usable = has_bucket(ids)
    references = conditions.references
    if not len(references.stored) or not references.counts[usable].any():
        return None
    parts = bucket_parts(ids, conditions.without_audio, table=table, spec=spec)
    condition_tokens = int(parts.condition_tokens[parts.ids[usable]].sum())
    sample_tokens = int(table.num_tokens(ids, spec=spec).sum())
    (full, steps), (full_without, steps_without) = (_filled(groups, config, weights) for groups in (parts.ids, ids))
    return ReferenceReport(
        num_samples=int(usable.sum()),
        shown=int(np.count_nonzero(references.counts[usable])),
        most=int(references.counts[usable].max()),
        token_share=condition_tokens / (condition_tokens + sample_tokens),
        buckets=len(np.unique(ids[usable])),
        groups=len(parts.bucket_ids),
        batch_size=config.batch_size,
        in_full_batches=full,
        without=full_without,
        num_steps=steps,
        steps_without=steps_without,
    )


class AppendedReport(NamedTuple):
    """What the frames that a run appends to its samples cost in bucketed batches.

    Attributes:
        most: Most frames that are appended to a sample.
        token_share: Their tokens ÷ all tokens, where each sample has the most of them.
    """

    most: int
    token_share: float


def measure_appended(targets: Targets, frames: AppendedFrames, *, spec: LatentSpec) -> AppendedReport | None:
    """Count the frames that are appended to samples of buckets; None if none is.

    Args:
        targets ([`Targets`]): Buckets of the samples, with the tokens of their conditions.
        frames ([`AppendedFrames`][hf_bucketing.conditions.appended.AppendedFrames]): Most frames that a run appends.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
    """
    if not frames.most:
        return None
    sizes = targets.assigned_sizes
    tokens = int(frames.num_tokens(sizes, spec=spec).sum())
    most = int(frames.counts(sizes, spec=spec).max(initial=0))
    return AppendedReport(most, tokens / max(1, int(targets.all_tokens.sum())))


def describe_appended(report: AppendedReport) -> str:
    """Return what appended frames cost in buckets, as text."""
    return (
        f"Appended frames: each video is counted with the most that the condition may append, at most {report.most}, "
        f"whatever is drawn; they are {report.token_share:.0%} of all tokens."
    )


def _filled(groups: IntArray, config: ReportConfig, weights: FloatArray | None) -> tuple[float, int]:
    """Return the share of an epoch's samples in full batches of one group, and its steps."""
    plan = plan_batches(groups, config, weights=weights)
    sizes = np.diff(plan.offsets)
    return float(sizes[sizes == config.batch_size].sum() / max(1, sizes.sum())), plan.num_steps


def describe_references(report: ReferenceReport) -> str:
    """Return what references cost in buckets, and whether packs would serve better, as text."""
    advice = (
        'Train packs (batching="pack"), which hold samples and references of any sizes.'
        if report.in_full_batches < _FILLED
        else "Buckets serve as well as packs here."
    )
    return (
        f"References: {report.shown:,} of {report.num_samples:,} samples are shown some, at most {report.most}, which "
        f"are {report.token_share:.0%} of all tokens. A stack needs references of equal sizes: there are "
        f"{report.groups:,} groups in {report.buckets:,} buckets, and full batches of {report.batch_size} hold "
        f"{report.in_full_batches:.0%} of the samples (without references {report.without:.0%}) in "
        f"{report.num_steps:,} steps ({report.steps_without:,}). {advice}"
    )
