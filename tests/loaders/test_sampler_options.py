"""Every option of a sampler's constructor reaches its plan, and its identity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Subset

from hf_bucketing import BucketTable, LatentSpec, PlanError, Size, open_table
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.loaders import BucketBatchSampler, BucketCollator, LengthBatchSampler, PackBatchSampler, PadCollator

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(1, 128, 192)), base=0)
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel(linear=1, quadratic=0.5)
IDS = np.random.default_rng(0).integers(-1, 3, 90)
TOKENS = np.random.default_rng(2).integers(0, 40, 90)
LENGTHS = np.random.default_rng(1).uniform(1, 9, 90)


def bucket_sampler(**options) -> BucketBatchSampler:
    return BucketBatchSampler(IDS, **{"table": TABLE, "batch_size": 4, "num_processes": 2, **options})


def length_sampler(**options) -> LengthBatchSampler:
    return LengthBatchSampler(LENGTHS, **{"capacity": 30, "num_processes": 2, **options})


def pack_sampler(**options) -> PackBatchSampler:
    return PackBatchSampler(TOKENS, **{"capacity": 60, "num_processes": 2, **options})


WEIGHTS = np.where(np.arange(90) % 2, 0.5, 2.0)
VARIANTS = {
    bucket_sampler: [
        {"seed": 1}, {"batch_size": 3}, {"tail": "drop"}, {"tail": "repeat"}, {"tail": "catch_all"},
        {"tail": "catch_all", "lockstep": False}, {"weights": WEIGHTS}, {"weights": {0: 0.5}},
        {"batch_size": None, "capacity": 200, "spec": WAN},
        {"batch_size": None, "capacity": 5000, "spec": WAN, "cost_model": COST},
    ],
    length_sampler: [
        {"seed": 1}, {"capacity": None, "batch_size": 3}, {"strategy": "random"}, {"strategy": "sorted"},
        {"num_buckets": 3}, {"boundaries": "uniform"}, {"boundaries": [3, 7]}, {"drop_last": True},
        {"shuffle": False}, {"weights": WEIGHTS}, {"longest_first": True},
    ],
    pack_sampler: [
        {"seed": 1}, {"strategy": "sequential"}, {"strategy": "best_fit_decreasing"}, {"open_packs": 2},
        {"max_samples": 2}, {"multiple": 16}, {"text_tokens": 9}, {"text_tokens": 1 + np.arange(90) % 9},
        {"weights": WEIGHTS}, {"cost_model": COST, "max_cost": 900.0},
        {"cost_model": COST, "balance": "cost"}, {"cost_model": COST, "balance": "cost", "accumulation_steps": 3},
        {"strategy": "best_fit_decreasing", "window": 10},
    ],
}  # fmt: skip


@pytest.mark.parametrize("make", VARIANTS)
def test_every_option_changes_the_plan_and_refuses_the_state_of_another(make) -> None:
    samplers = [make(), *(make(**options) for options in VARIANTS[make])]
    plans = {tuple(map(tuple, sampler)) for sampler in samplers}
    assert len(plans) == len(samplers)
    for sampler, options in zip(samplers[1:], VARIANTS[make], strict=True):
        make(**options).load_state_dict(sampler.state_dict(step=1))
        with pytest.raises(PlanError, match="The saved state does not fit"):
            samplers[0].load_state_dict(sampler.state_dict(step=1))


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("make", VARIANTS)
def test_accelerate_hands_each_process_its_batches_of_every_plan(make, num_processes: int) -> None:
    for options in VARIANTS[make]:
        sampler = make(**options, num_processes=num_processes)
        for process in range(num_processes):
            loader = prepare_data_loader(
                DataLoader(range(90), batch_sampler=sampler, collate_fn=list),
                num_processes=num_processes,
                process_index=process,
                put_on_device=False,
            )
            loader.set_epoch(1)
            assert len(loader) == sampler.plan(1).num_steps
            assert list(loader) == [batch.tolist() for batch in sampler.plan(1).batches(process_index=process)]
            loader.set_epoch(2)
            rest = make(**options, num_processes=num_processes + 1)
            rest.load_state_dict(sampler.state_dict(step=2))
            left = sampler.plan(2).samples_in_steps(2, sampler.plan(2).num_steps)
            if not {"weights", "tail", "drop_last"} & options.keys():
                assert abs(rest.plan(2).kept - left) <= num_processes, "nothing but a remainder is lost or found"


def test_capacity_by_cost_solves_the_batch_size_of_each_bucket() -> None:
    sampler = bucket_sampler(batch_size=None, capacity=5000, spec=WAN, cost_model=COST)
    costs = COST.cost([16, 32, 96])
    assert sampler.config.batch_size == {0: 34, 1: 9, 2: 1}
    assert all(n * cost <= 5000 < (n + 1) * cost for n, cost in zip((34, 9, 1), costs, strict=True))
    with pytest.raises(PlanError, match=r"1×128×192.* takes 4704 units of cost and exceeds capacity=4000"):
        bucket_sampler(batch_size=None, capacity=4000, spec=WAN, cost_model=COST)


def test_the_collator_gives_a_catch_all_batch_the_base_bucket_as_its_plan_says() -> None:
    sampler, collator = bucket_sampler(tail="catch_all"), BucketCollator(TABLE)
    plan = sampler.plan(0)
    mixed = 0
    for bucket, batch in zip(plan.bucket_ids.tolist(), plan.batches(), strict=True):
        rows = [{"bucket_id": int(IDS[row])} for row in batch]
        assert collator.target(rows) == [TABLE.size(bucket)] * len(rows)
        mixed += len({row["bucket_id"] for row in rows}) > 1
    assert mixed


@pytest.mark.parametrize(("options", "message"), [
    ({"tail": "catch_all", "table": open_table(WAN)}, "an open table has not"),
    ({"tail": "catch_all", "table": BucketTable(sizes=TABLE.sizes)}, r"table\.with_base\(\)"),
    ({"weights": {0: 2.0, 3: 0.5}}, r"names the buckets \[3\], but the table has 0 to 2"),
    ({"tail": "catch_all", "table": BucketTable(sizes=(*TABLE.sizes, Size(5, 64, 64)), base=3)},
     "5×64×64.* has more frames than the buckets 1×64×64.*, 1×64×128"),
    ({"longest_first": True}, "spec="),
])  # fmt: skip
def test_impossible_options_are_errors(options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bucket_sampler(**options)


def test_a_bucket_id_beyond_the_columns_type_is_an_error() -> None:
    with pytest.raises(PlanError, match="Row 1 has bucket_id 4294967297"):
        BucketBatchSampler([0, 2**32 + 1], table=open_table(WAN), batch_size=1)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="num_bucket"):
        length_sampler(num_bucket=3)


def first_step_cost(sampler, cost) -> tuple[float, float]:
    """The largest cost over processes of the first step, and of all."""
    costs = [max(map(cost, step)) for step in zip(*[iter(sampler)] * 2, strict=True)]
    return costs[0], max(costs)


@pytest.mark.parametrize("epoch", range(4))
def test_longest_first_starts_with_the_most_expensive_step(epoch: int) -> None:
    tokens = TABLE.num_tokens(IDS, spec=WAN)
    cases = [
        (bucket_sampler(longest_first=True, spec=WAN), lambda batch: tokens[batch].sum()),
        (length_sampler(longest_first=True), lambda batch: len(batch) * LENGTHS[batch].max()),
        (pack_sampler(longest_first=True), lambda batch: TOKENS[batch].sum()),
        (pack_sampler(longest_first=True, cost_model=COST), lambda batch: COST.cost(TOKENS[batch]).sum()),
    ]
    for sampler, cost in cases:
        sampler.set_epoch(epoch)
        first, largest = first_step_cost(sampler, cost)
        assert first == largest


def test_lengths_of_a_subset_are_those_of_its_own_samples() -> None:
    dataset = [torch.full((int(length),), float(length)) for length in LENGTHS]
    subset = Subset(dataset, np.flatnonzero(LENGTHS < 5).tolist()[::-1])
    sampler = LengthBatchSampler(LENGTHS[subset.indices], capacity=12, num_buckets=4, num_processes=1)
    loader = DataLoader(subset, batch_sampler=sampler, collate_fn=list)
    seen = [float(sample[0]) for batch in loader for sample in batch]
    assert np.allclose(sorted(seen), sorted(LENGTHS[LENGTHS < 5]))
    assert max(len(batch) * max(map(len, batch)) for batch in loader) <= 12


def test_batches_can_be_padded_to_the_bounds_of_their_buckets_within_the_capacity() -> None:
    dataset = [torch.ones(length) for length in np.ceil(LENGTHS).astype(int)]
    sampler = LengthBatchSampler(np.ceil(LENGTHS).astype(int), capacity=20, num_buckets=3, num_processes=1)
    collator = PadCollator(["audio"], boundaries=sampler.boundaries)
    shapes = [tuple(batch["audio"].shape) for batch in DataLoader(dataset, batch_sampler=sampler, collate_fn=collator)]
    assert all(count * length <= 20 for count, length in shapes)
    assert {length for _, length in shapes} == set(sampler.boundaries)
    assert len(set(shapes)) <= 2 * len(sampler.boundaries), "a full and a short batch of each"


def test_an_open_table_counts_tokens_by_its_own_spec() -> None:
    table = open_table(WAN)
    ids = table.assign([1] * 4, [64, 64, 128, 64], [64, 96, 128, 96]).bucket_id
    sampler = BucketBatchSampler(ids, table=table, batch_size=1, longest_first=True)
    assert next(iter(sampler)) == [2]
    sizes = BucketBatchSampler(ids, table=table, capacity=64).config.batch_size
    assert sizes == {int(ids[0]): 4, int(ids[1]): 2, int(ids[2]): 1}
