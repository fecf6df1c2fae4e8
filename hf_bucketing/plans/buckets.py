"""The bucket plan: batches of one bucket, by default in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.assignment import has_bucket
from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec
from ..buckets.table import BucketTable
from ..errors import PlanError, explains_arguments
from ..randomness import Purpose
from ..settings import check_types, numbers_by_id
from .assemble import counted_plan, labels_of, lockstep_plan, with_steps
from .deal import Remainder, Steps, deal, group_rows, ranges, rows_from, spread_groups, spread_order
from .epoch import EpochPlan
from .rows import EpochConfig, EpochRows, check_positive, column_of, epoch_rows

Weights = npt.ArrayLike | Mapping[int, float]


@dataclass(frozen=True, kw_only=True)  # no slots: others read the defaults from the class
class BucketLimits:
    """How many samples of a bucket one process takes in one step: some number, or as many as fit within limits.

    Args:
        batch_size (`int` or mapping of bucket id to `int`, *optional*): Samples per process and step.
        max_tokens (`int`, *optional*): Tokens per process and step, instead of `batch_size`: each bucket gets as many
            samples as fit.
        max_cost (`float`, *optional*): Cost per process and step, instead of or beside `max_tokens`. Needs
            `cost_model`.
        cost_model ([`CostModel`][hf_bucketing.CostModel], *optional*): Cost of a sample, for `max_cost`, and for a
            sampler's `longest_first`.
        max_samples (`int`, *optional*): Most samples per batch, beside `max_tokens` or `max_cost`.

    Raises:
        PlanError: If not exactly one of `batch_size` and the limits `max_tokens` and `max_cost` is given, or a value
            is not above 0.
    """

    batch_size: int | Mapping[int, int] | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    cost_model: CostModel | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        check_types(self, error=PlanError)
        if (self.batch_size is not None) == self.limited:
            raise PlanError("Give either `batch_size`, or `max_tokens` or `max_cost`.")
        if self.batch_size is not None and self.max_samples is not None:
            raise PlanError("`max_samples` goes with `max_tokens` or `max_cost`; `batch_size` counts samples already.")
        if self.max_cost is not None and self.cost_model is None:
            raise PlanError("`max_cost` needs `cost_model`, such as CostModel.for_transformer(width).")
        check_positive(self, "max_tokens", "max_cost", "max_samples")
        sizes = self.batch_size.values() if isinstance(self.batch_size, Mapping) else [self.batch_size or 0]
        if not self.limited and (not sizes or min(sizes) < 1):
            raise PlanError(f"Every `batch_size` must be at least 1, got {self.batch_size!r}.")

    @property
    def limited(self) -> bool:
        """Whether tokens or cost limit a batch, so that its size follows from those of its bucket."""
        return self.max_tokens is not None or self.max_cost is not None

    def batch_sizes(self, bucket_ids: IntArray) -> IntArray:
        """Return the batch size of each of the given buckets, shape `(k,)`.

        Raises:
            PlanError: If there are limits, or a mapping names no batch size for one of the buckets.
        """
        if self.batch_size is None:
            raise PlanError("`max_tokens` and `max_cost` need a table of buckets: give them to BucketBatchSampler.")
        if not isinstance(self.batch_size, Mapping):
            return np.full(len(bucket_ids), self.batch_size, np.int64)
        missing = [int(bucket) for bucket in bucket_ids if int(bucket) not in self.batch_size]
        if missing:
            raise PlanError(f"`batch_size` names no size for buckets {missing}; add them or reject their samples.")
        return np.array([self.batch_size[int(bucket)] for bucket in bucket_ids], np.int64)

    def solved_sizes(
        self,
        bucket_ids: IntArray,
        *,
        table: BucketTable | OpenTable,
        spec: LatentSpec | None,
        text_tokens: int | IntArray,
    ) -> IntArray:
        """Return the batch size of each of the given buckets of a table, also where limits decide it; shape `(k,)`.

        Args:
            bucket_ids (`int64`, shape `(k,)`): Buckets.
            table ([`BucketTable`] or [`OpenTable`]): Their table.
            spec ([`LatentSpec`], *optional*): Strides and patch, which limits need.
            text_tokens (`int` or array of `int`, shape `(k,)`): Tokens of each sample's text, and of its references,
                that count like its own.

        Raises:
            PlanError: If one sample of a bucket exceeds a limit, `spec` is missing, or a mapping lacks a bucket.
        """
        if not self.limited:
            return self.batch_sizes(bucket_ids)
        if spec is None:
            raise PlanError("`max_tokens` and `max_cost` count tokens: pass spec=LatentSpec(…).")
        tokens = table.num_tokens(bucket_ids, spec=spec) + text_tokens
        taken: dict[str, IntArray | FloatArray] = {"max_tokens": tokens}
        if self.cost_model is not None:
            taken["max_cost"] = self.cost_model.cost(tokens)
        sizes = np.full(len(tokens), np.inf if self.max_samples is None else self.max_samples)
        for name, amounts in taken.items():
            limit = getattr(self, name)
            if limit is None or not len(amounts):
                continue
            if amounts.max() > limit:
                raise PlanError(
                    f"One sample of bucket {table.size(int(bucket_ids[amounts.argmax()]))} takes {amounts.max():.6g} "
                    f"{'tokens' if name == 'max_tokens' else 'units of cost'} and exceeds `{name}={limit}`.",
                    advice=[f"raise `{name}`", "choose a table of smaller buckets"],
                )
            sizes = np.minimum(sizes, limit // amounts)
        return sizes.astype(np.int64)


@explains_arguments(PlanError)
@dataclass(frozen=True, kw_only=True)
class BucketPlanConfig(EpochConfig, BucketLimits):
    """Settings of a bucket plan, beside those of [`BucketLimits`] and of [`EpochConfig`].

    [`BucketBatchSampler`][hf_bucketing.BucketBatchSampler] replaces limits by the batch sizes that follow from them
    and its table, and takes `base` from the table. With `shuffle=False`, rows stay in their order within each bucket,
    and buckets come in the order of their ids, the mixed and catch-all steps last.

    Args:
        remainder (`"short"`, `"drop"`, `"repeat"` or `"catch_all"`): What happens to a bucket's samples that do not
            fill a step on all processes.
            `"short"` deals them evenly in one smaller step, and what then remains of all buckets one by one in mixed
            steps, buckets of like batch size together, so that fewer than `num_processes` samples are dropped per
            epoch, other ones each epoch.
            `"drop"` drops them from this epoch.
            `"repeat"` completes their step with samples of the same bucket, which are counted as repeated. A bucket of
            fewer samples than a batch makes batches of all its samples, so that a batch holds none twice.
            `"catch_all"` deals the remainders of all buckets in batches at the size of the `base` bucket; the last
            such step is smaller, and fewer than `num_processes` samples are dropped. A catch-all batch whose rows
            happen to be of one bucket keeps that bucket's size.
        base (`int`, *optional*): Bucket of catch-all batches; a plan with `remainder="catch_all"` needs it.
        lockstep (`bool`): Whether all processes take the same bucket and equally many samples in the same step. If
            False, each process draws from its own share, as in NovelAI's aspect ratio bucketing: rows are trimmed to a
            multiple of `batch_size · num_processes` and dealt to the processes in turn; each process makes batches of
            its rows, and puts its remainders in the base bucket. Steps then hold different buckets, which DDP allows
            because every process runs equally many steps, but the fastest process waits for the slowest. Needs one
            `batch_size` for all buckets, `remainder="catch_all"` and `shuffle=True`.

    Raises:
        PlanError: On settings that [`BucketLimits`] or [`EpochConfig`] refuses, an unknown `remainder`, or settings
            that do not go together.
    """

    remainder: Remainder = "short"
    base: int | None = None
    lockstep: bool = True

    def __post_init__(self) -> None:
        EpochConfig.__post_init__(self)
        BucketLimits.__post_init__(self)
        if not self.lockstep and self.remainder != "catch_all":
            raise PlanError(
                "`lockstep=False` puts the remainders of each process into batches of the base bucket: "
                f'give `remainder="catch_all"` with it, got {self.remainder!r}.'
            )
        if not self.lockstep and not isinstance(self.batch_size, int):
            raise PlanError(
                "`lockstep=False` needs one batch size for all buckets: with several, the processes would not have "
                "equally many steps."
            )
        if not (self.lockstep or self.shuffle):
            raise PlanError("`lockstep=False` draws batches at random; leave it out with `shuffle=False`.")

    def named_in_states(self) -> dict[str, object]:
        """Return the settings that a saved state compares: batch sizes in place of the limits they follow from."""
        limits = ("max_tokens", "max_cost", "cost_model", "max_samples")
        return {name: value for name, value in super().named_in_states().items() if name not in limits}

    @property
    def base_size(self) -> int | None:
        """Samples per process and step of a catch-all batch; None without any.

        Raises:
            PlanError: If there is no base bucket, or a mapping names no batch size for it.
        """
        if self.remainder != "catch_all":
            return None
        if self.base is None:
            raise PlanError('`remainder="catch_all"` needs `base`, the bucket whose size the mixed batches get.')
        return int(self.batch_sizes(np.array([self.base]))[0])


def plan_buckets(
    bucket_ids: npt.ArrayLike,
    config: BucketPlanConfig,
    *,
    epoch: int,
    num_processes: int,
    weights: Weights | None = None,
    consumed: npt.ArrayLike | None = None,
) -> EpochPlan:
    """Plan an epoch of bucketed batches.

    Args:
        bucket_ids (array of `int`, shape `(n,)`): Bucket of each row, `REJECTED_BUCKET` (−1) for rejected rows, which
            are dropped.
        config ([`BucketPlanConfig`]): Batch sizes, remainder and seed.
        epoch (`int`): Number of the epoch, at least 0; every epoch has its own order.
        num_processes (`int`): Processes that share the batches, at least 1.
        weights (array of `float`, shape `(n,)`, or mapping of bucket id to `float`, *optional*): Occurrences per
            epoch of each row, or of each row of a bucket: 2.0 is twice, 0.5 in every second epoch. Buckets that a
            mapping does not name have weight 1. By default every row occurs once. Occurrences are spread over the
            batches of a bucket: one batch holds a row twice only if it occurs nearly as often as there are batches.
        consumed (array of `int`, *optional*): Row numbers seen in this epoch, with repetitions. The plan then holds
            what is left of the epoch, which may be no step at all.

    Returns:
        [`EpochPlan`]: With the drop reasons `rejected`, `weight` (rows that do not occur in this epoch) and
        `remainder`. Steps are in one uniform random order, which has the distribution of drawing buckets one after
        the other, weighted by the steps that they have left.

    Raises:
        PlanError: If no row has a bucket, or too few for one step, or a bucket has no batch size.

    Example:
        Seven rows of bucket 0 and four of bucket 3, two processes, batches of two: one full step of each, then one
        short step of one row per process for the three rows that bucket 0 has left; its last row is dropped.

        >>> plan = plan_buckets([0] * 7 + [3] * 4, BucketPlanConfig(batch_size=2), epoch=0, num_processes=2)
        >>> plan.num_steps, plan.kept, dict(plan.drop_reasons), sorted(plan.bucket_ids.tolist())
        (3, 10, {'remainder': 1}, [0, 0, 0, 0, 3, 3])
    """
    ids = column_of(bucket_ids, "bucket_ids", integer=True)
    by_row = row_weights(ids, weights) if isinstance(weights, Mapping) else weights
    chosen = epoch_rows(
        has_bucket(ids),
        config,
        Purpose.BUCKET_PLAN,
        epoch=epoch,
        num_processes=num_processes,
        weights=by_row,
        consumed=consumed,
    )
    if not len(chosen.rows) and not chosen.consumed:
        if chosen.drop_reasons.get("weight"):
            raise PlanError(f"No row that has a bucket occurs in epoch {epoch}, by `weights`; raise them.")
        raise PlanError(
            "No row has a bucket: the data set is empty or every row was rejected. "
            "Look at the counts of its rejection column, and choose a table that fits the data."
        )
    plan = (plan_lockstep if config.lockstep else _plan_independent)(ids, config, chosen)
    return with_steps(plan, config.remainder, chosen)


def plan_lockstep(
    bucket_ids: IntArray, config: BucketPlanConfig, chosen: EpochRows, *, join: bool = False
) -> EpochPlan:
    """Plan steps in which all processes take the same bucket; without a generator, rows and buckets stay in order.

    With `join`, a remainder that would be `"short"` joins those of the buckets before it, whose samples are smaller.
    """
    rng = chosen.rng
    if chosen.repeats:
        groups = spread_groups(
            chosen.rows,
            bucket_ids,
            apart=lambda buckets: config.batch_sizes(buckets) * chosen.num_processes,
            rng=rng,
        )
    else:
        groups = group_rows(chosen.rows, bucket_ids, rng=rng)
    sizes = config.batch_sizes(groups.buckets)
    spare = None
    if config.remainder == "repeat" and chosen.consumed:
        # Fill a nearly exhausted bucket with rows seen earlier, rather than repeating the few that remain.
        spare = group_rows(np.concatenate([chosen.shuffled(chosen.seen), groups.rows]), bucket_ids, rng=None)
    dealt = deal(
        groups,
        sizes,
        chosen=chosen,
        remainder="join" if join and config.remainder == "short" else config.remainder,
        base_size=config.base_size,
        spare=spare,
    )
    del groups
    steps = dealt.steps
    if rng is None:
        order = np.argsort(np.where(has_bucket(steps.bucket), steps.bucket, np.iinfo(np.int64).max), kind="stable")
    else:
        order = rng.permutation(len(steps.first))
    steps = Steps(*(column[order] for column in steps))
    return lockstep_plan(
        dealt.rows,
        steps,
        bucket_ids=bucket_ids,
        base=config.base,
        chosen=chosen,
        filled=dealt.filled,
    )


def row_weights(bucket_ids: IntArray, weights: Mapping[int, float]) -> FloatArray:
    """Return the weight of each row from weights by bucket; 1 for buckets that are not named."""
    by_row = np.ones(len(bucket_ids))
    for bucket, weight in numbers_by_id(weights, "weights", integer=False, error=PlanError).items():
        by_row[bucket_ids == bucket] = weight
    return by_row


def _plan_independent(bucket_ids: IntArray, config: BucketPlanConfig, chosen: EpochRows) -> EpochPlan:
    """Plan as NovelAI's aspect ratio bucketing does.

    Shuffled rows are trimmed to full batches on all processes and dealt to them in turn. A process puts the rows of
    each bucket that fill no batch into catch-all batches, and takes its batches in random order, which has the
    distribution of drawing buckets weighted by the batches that they have left. Every list is a multiple of the batch
    size, so all processes have equally many batches. Source: the README of novelai-aspect-ratio-bucketing.
    """
    rng, num_processes = chosen.rng, chosen.num_processes
    assert rng is not None, "BucketPlanConfig checks it"
    size = config.base_size
    assert size is not None, "BucketPlanConfig checks that it is catch_all"
    assert config.base is not None, "base_size checks it"
    rows = rng.permutation(chosen.rows)
    rows = rows[: len(rows) // (size * num_processes) * size * num_processes]
    num_steps = len(rows) // (size * num_processes)
    batches = [
        _batches_of(rows[process::num_processes], bucket_ids, size=size, repeats=chosen.repeats, rng=rng)
        for process in range(num_processes)
    ]
    indices = np.stack(batches, axis=1).ravel() if num_steps else rows
    offsets = np.arange(num_steps * num_processes + 1) * size
    labels = labels_of(bucket_ids, indices, offsets[:-1], offsets[1:], base=config.base)
    return counted_plan(indices, offsets, labels, chosen=chosen)


def _batches_of(
    rows: IntArray, bucket_ids: IntArray, *, size: int, repeats: bool, rng: np.random.Generator
) -> IntArray:
    """Return one process's batches, shape `(num_steps, size)`, in random order."""
    groups = group_rows(rows, bucket_ids, rng=rng)
    if repeats:
        groups = spread_groups(rows, bucket_ids, apart=lambda _: size, rng=rng)
    full = groups.counts // size * size
    full_batches = groups.rows[np.repeat(groups.starts, full) + ranges(full)]
    left = rows_from(groups, groups.starts + full)
    left = left[spread_order(len(left) // size, size)]
    return rng.permutation(np.concatenate([full_batches, left]).reshape(-1, size))
