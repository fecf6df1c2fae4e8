"""Batches of samples with references: what one batch holds can be stacked, and all tokens count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hf_bucketing import BucketBatchSampler, BucketTable, LatentSpec
from hf_bucketing.conditions.references import ReferenceRule, RowReferences
from hf_bucketing.conditions.rows import RowConditions, sample_sizes
from hf_bucketing.errors import PlanError

SPEC = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable.parse("64,64;64,96", frames=[1])
RULE = ReferenceRule(multiples=(16, 16))
SHAPES = [(1, 64, 64), (1, 64, 96), (1, 32, 32)]


@pytest.fixture
def rows() -> tuple[np.ndarray, RowConditions]:
    """300 rows of two buckets with 0 to 3 references of three sizes."""
    rng = np.random.default_rng(0)
    cells = [sum((SHAPES[shape] for shape in rng.integers(0, 3, count)), ()) for count in rng.integers(0, 4, 300)]
    return rng.integers(-1, 2, 300), RowConditions.of(RowReferences.of_lists(cells, rule=RULE))


@pytest.mark.parametrize("remainder", ["short", "drop", "repeat"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_samples_of_a_batch_have_equal_signatures(rows, remainder, num_processes: int) -> None:
    ids, conditions = rows
    sampler = BucketBatchSampler(
        ids,
        table=TABLE,
        spec=SPEC,
        batch_size=4,
        remainder=remainder,
        conditions=conditions,
        num_processes=num_processes,
    )
    signatures = conditions.references.signatures(sample_sizes(ids, TABLE), spec=SPEC)
    for epoch in range(2):
        plan = sampler.plan(epoch)
        assert plan.kept + plan.dropped == 300
        for number in range(plan.num_batches):
            batch = plan.batch(number)
            assert len({(ids[row], signatures[row]) for row in batch.tolist()}) == 1
            assert plan.bucket_ids[number] in (ids[batch[0]], -2)
    seen = Counter(sampler.plan(0).indices.tolist())
    assert remainder != "short" or (max(seen.values()) == 1 and len(seen) > 300 - np.sum(ids < 0) - num_processes)


def test_references_count_for_max_tokens(rows) -> None:
    ids, conditions = rows
    options = {"table": TABLE, "spec": SPEC, "max_tokens": 200, "text_tokens": 10, "num_processes": 1}
    sampler = BucketBatchSampler(ids, conditions=conditions, **options)
    own = TABLE.num_tokens(ids, spec=SPEC) + conditions.num_tokens(sample_sizes(ids, TABLE), spec=SPEC) + 10
    plan = sampler.plan(0)
    tokens = np.add.reduceat(own[plan.indices], plan.offsets[:-1])
    assert 150 < tokens.max() <= 200
    without = BucketBatchSampler(ids, **options).plan(0)
    assert np.add.reduceat(own[without.indices], without.offsets[:-1]).max() > 200
    with pytest.raises(PlanError, match="exceeds `max_tokens=60`"):
        BucketBatchSampler(ids, conditions=conditions, **{**options, "max_tokens": 60})


def test_batch_sizes_and_weights_are_named_by_bucket(rows) -> None:
    ids, conditions = rows
    sampler = BucketBatchSampler(
        ids,
        table=TABLE,
        spec=SPEC,
        batch_size={0: 2, 1: 3},
        weights={1: 2.0},
        conditions=conditions,
        num_processes=1,
    )
    plan = sampler.plan(0)
    sizes = np.diff(plan.offsets)
    assert {int(sizes[plan.bucket_ids == bucket].max()) for bucket in (0, 1)} == {2, 3}
    counts = Counter(ids[plan.indices].tolist())
    assert counts == {0: np.sum(ids == 0), 1: 2 * np.sum(ids == 1)}


def test_the_longest_step_by_references_comes_first(rows) -> None:
    ids, conditions = rows
    sampler = BucketBatchSampler(
        ids,
        table=TABLE,
        spec=SPEC,
        batch_size=2,
        longest_first=True,
        conditions=conditions,
        num_processes=1,
    )
    own = TABLE.num_tokens(ids, spec=SPEC) + conditions.num_tokens(sample_sizes(ids, TABLE), spec=SPEC)
    plan = sampler.plan(0)
    tokens = np.add.reduceat(own[plan.indices], plan.offsets[:-1])
    assert tokens[0] == tokens.max() > tokens[1:].mean()


def test_a_saved_state_knows_the_references(rows) -> None:
    ids, conditions = rows
    options = {"table": TABLE, "spec": SPEC, "batch_size": 2, "num_processes": 1}
    state = BucketBatchSampler(ids, conditions=conditions, **options).state_dict(step=3)
    BucketBatchSampler(ids, conditions=conditions, **options).load_state_dict(state)
    with pytest.raises(PlanError, match="rows was"):
        BucketBatchSampler(ids, conditions=conditions.select(np.arange(300)[::-1]), **options).load_state_dict(state)


def test_what_cannot_be_is_refused(rows) -> None:
    ids, conditions = rows
    with pytest.raises(PlanError, match="references of several sizes cannot be stacked"):
        BucketBatchSampler(
            ids,
            table=TABLE.with_base(),
            spec=SPEC,
            batch_size=2,
            remainder="catch_all",
            conditions=conditions,
        )
    with pytest.raises(PlanError, match="pass spec="):
        BucketBatchSampler(ids, table=TABLE, batch_size=2, conditions=conditions)
    with pytest.raises(PlanError, match="those of 2 rows, but there are 300"):
        BucketBatchSampler(ids, table=TABLE, spec=SPEC, batch_size=2, conditions=conditions.select([0, 1]))
