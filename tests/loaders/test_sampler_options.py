"""Every option of a sampler's constructor reaches its plan, and its identity."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import typing

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset, load_from_disk
from torch.utils.data import DataLoader, Subset

from hf_bucketing import BucketTable, LatentSpec, PlanError, Size, open_table
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.columns import BucketColumns, map_columns
from hf_bucketing.loaders import (
    BucketBatchSampler,
    BucketCollator,
    EqualEpochs,
    LengthBatchSampler,
    PackBatchSampler,
    PadCollator,
)
from hf_bucketing.plans import BucketPlanConfig, LengthPlanConfig, PackPlanConfig
from hf_bucketing.streaming import BucketGrouping, StreamingBucketBatcher

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(1, 128, 192)), base=0)
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel(linear=1, quadratic=0.5)
IDS = np.random.default_rng(0).integers(-1, 3, 90)
TOKENS = np.random.default_rng(2).integers(0, 40, 90)
LENGTHS = np.random.default_rng(1).uniform(1, 9, 90)


def bucket_sampler(column=IDS, **options) -> BucketBatchSampler:
    return BucketBatchSampler(column, **{"table": TABLE, "batch_size": 4, "num_processes": 2, **options})


def length_sampler(column=LENGTHS, **options) -> LengthBatchSampler:
    return LengthBatchSampler(column, **{"max_tokens": 30, "num_processes": 2, **options})


def pack_sampler(column=TOKENS, **options) -> PackBatchSampler:
    return PackBatchSampler(column, **{"max_tokens": 60, "strip_length": 1, "num_processes": 2, **options})


WEIGHTS = np.where(np.arange(90) % 2, 0.5, 2.0)
VARIANTS = {
    bucket_sampler: [
        {"seed": 1}, {"batch_size": 3}, {"remainder": "drop"}, {"remainder": "repeat"}, {"remainder": "catch_all"},
        {"remainder": "catch_all", "lockstep": False}, {"weights": WEIGHTS}, {"weights": {0: 0.5}},
        {"batch_size": None, "max_tokens": 200, "spec": WAN},
        {"batch_size": None, "max_tokens": 200, "spec": WAN, "max_samples": 4},
        {"batch_size": None, "max_tokens": 200, "spec": WAN, "text_tokens": 5},
        {"batch_size": None, "max_cost": 5000.0, "spec": WAN, "cost_model": COST},
        {"batch_size": None, "max_cost": 5000.0, "spec": WAN, "cost_model": COST, "max_tokens": 128},
        {"shuffle": False},
    ],
    length_sampler: [
        {"seed": 1}, {"max_tokens": None, "batch_size": 3}, {"strategy": "random"}, {"strategy": "sorted"},
        {"num_buckets": 2}, {"max_samples": 5}, {"boundaries": "quantile"}, {"boundaries": "uniform"},
        {"boundaries": [3, 7]},
        {"remainder": "drop"}, {"shuffle": False}, {"weights": WEIGHTS}, {"longest_first": True},
    ],
    pack_sampler: [
        {"seed": 1}, {"strategy": "sequential"}, {"strategy": "best_fit_decreasing"}, {"open_packs": 2},
        {"max_samples": 2}, {"strip_length": 16}, {"text_tokens": 9}, {"text_tokens": 1 + np.arange(90) % 9},
        {"weights": WEIGHTS}, {"cost_model": COST, "max_cost": 900.0},
        {"cost_model": COST, "balance": "cost"}, {"cost_model": COST, "balance": "cost", "accumulation_steps": 3},
        {"strategy": "best_fit_decreasing", "window": 10}, {"shuffle": False}, {"longest_first": True},
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
            if not {"weights", "remainder"} & options.keys():
                assert abs(rest.plan(2).kept - left) <= num_processes, "nothing but a remainder is lost or found"


def test_max_cost_solves_the_batch_size_of_each_bucket() -> None:
    sampler = bucket_sampler(batch_size=None, max_cost=5000, spec=WAN, cost_model=COST)
    costs = COST.cost([16, 32, 96])
    assert sampler.config.batch_size == {0: 34, 1: 9, 2: 1}
    assert all(n * cost <= 5000 < (n + 1) * cost for n, cost in zip((34, 9, 1), costs, strict=True))
    with pytest.raises(PlanError, match=r"1×128×192.* takes 4704 units of cost and exceeds `max_cost=4000`"):
        bucket_sampler(batch_size=None, max_cost=4000, spec=WAN, cost_model=COST)
    both = bucket_sampler(batch_size=None, max_cost=5000, max_tokens=256, max_samples=10, spec=WAN, cost_model=COST)
    assert both.config.batch_size == {0: 10, 1: 8, 2: 1}, "each bucket keeps to all limits"


def test_the_collator_gives_a_catch_all_batch_the_base_bucket_as_its_plan_says() -> None:
    sampler, collator = bucket_sampler(remainder="catch_all"), BucketCollator(TABLE)
    plan = sampler.plan(0)
    mixed = 0
    for bucket, batch in zip(plan.bucket_ids.tolist(), plan.batches(), strict=True):
        rows = [{"bucket_id": int(IDS[row])} for row in batch]
        assert collator.target(rows) == [TABLE.size(bucket)] * len(rows)
        mixed += len({row["bucket_id"] for row in rows}) > 1
    assert mixed


@pytest.mark.parametrize(("options", "message"), [
    ({"remainder": "catch_all", "table": open_table(WAN)}, "an open table lacks"),
    ({"remainder": "catch_all", "table": BucketTable(sizes=TABLE.sizes)}, r"table\.with_base\(\)"),
    ({"weights": {0: 2.0, 3: 0.5}}, r"names the buckets \[3\], but the table has 0 to 2"),
    ({"remainder": "catch_all", "table": BucketTable(sizes=(*TABLE.sizes, Size(5, 64, 64)), base=3)},
     "5×64×64.* has more frames than the buckets 1×64×64.*, 1×64×128"),
    ({"longest_first": True}, "spec="),
    ({"max_samples": 3}, "`max_samples` goes with"),
    ({"batch_size": None, "max_cost": 9.0, "spec": WAN}, "`max_cost` needs `cost_model`"),
    ({"batch_size": None, "max_tokens": -1, "spec": WAN}, "`max_tokens` must be above 0"),
    ({"remainder": "cut"}, '`remainder` must be one of "short", "drop", "repeat", "catch_all"'),
])  # fmt: skip
def test_impossible_options_are_errors(options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bucket_sampler(**options)


def test_a_bucket_id_beyond_the_columns_type_is_an_error() -> None:
    with pytest.raises(PlanError, match="Row 1 has bucket_id 4294967297"):
        BucketBatchSampler([0, 2**32 + 1], table=open_table(WAN), batch_size=1)


SAMPLERS = {
    BucketBatchSampler: (BucketPlanConfig, {"base"}),
    LengthBatchSampler: (LengthPlanConfig, set()),
    PackBatchSampler: (PackPlanConfig, set()),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_lists_every_setting_of_its_plan_with_the_same_type_and_default(sampler) -> None:
    config, computed = SAMPLERS[sampler]
    arguments = inspect.signature(sampler).parameters
    assert not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    hints, wanted = typing.get_type_hints(sampler.__init__), typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in computed | {"batch_size"}:
            continue
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        assert arguments[field.name].default == default, field.name
        assert hints[field.name] == wanted[field.name], field.name


@pytest.mark.parametrize(("make", "old", "new"), [
    (bucket_sampler, "tail", "remainder"),
    (bucket_sampler, "capacity", "max_tokens, or max_cost"),
    (length_sampler, "capacity", "max_tokens"),
    (length_sampler, "drop_last", 'remainder="drop"'),
    (pack_sampler, "capacity", "max_tokens"),
    (pack_sampler, "multiple", "strip_length"),
])  # fmt: skip
def test_old_names_raise_an_error_with_the_new_one(make, old: str, new: str) -> None:
    with pytest.raises(PlanError, match=f"BatchSampler takes {new}.* where it took {old}"):
        make(**{old: 1})


@pytest.mark.parametrize("make", VARIANTS)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_without_shuffle_every_epoch_takes_each_row_once_in_the_same_order(make, num_processes: int) -> None:
    sampler = make(shuffle=False, num_processes=num_processes)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first
    rows = [row for batch in first for row in batch]
    assert len(rows) == len(set(rows))
    usable = {bucket_sampler: IDS >= 0, length_sampler: LENGTHS > 0, pack_sampler: TOKENS > 0}[make]
    assert set(rows) <= set(np.flatnonzero(usable).tolist())
    assert len(rows) > np.count_nonzero(usable) - num_processes
    if make is pack_sampler:
        in_order = list(make(shuffle=False, num_processes=num_processes, strategy="sequential"))
        assert [row for pack in in_order for row in pack] == np.flatnonzero(usable).tolist()


EVALUATIONS = {
    bucket_sampler: [{}, {"remainder": "catch_all"}],
    length_sampler: [{}, {"strategy": "random"}, {"strategy": "sorted", "max_tokens": None, "batch_size": 3}],
    pack_sampler: [{}, {"strategy": "best_fit_decreasing"}, {"max_samples": 1}],
}


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
@pytest.mark.parametrize("make", EVALUATIONS)
def test_evaluation_takes_every_row_once_of_what_gather_for_metrics_keeps(make, num_processes: int) -> None:
    completed = 0
    for options, shuffle, count in itertools.product(EVALUATIONS[make], (True, False), (1, 2, 13, 80, 90)):
        column = {bucket_sampler: np.abs(IDS), length_sampler: LENGTHS, pack_sampler: 1 + TOKENS}[make][:count]
        steps = []
        for process in range(num_processes):
            sampler = make(column=column, evaluation=True, shuffle=shuffle, num_processes=num_processes, **options)
            loader = prepare_data_loader(
                DataLoader(range(count), batch_sampler=sampler, collate_fn=list),
                num_processes=num_processes,
                process_index=process,
                put_on_device=False,
            )
            steps.append(list(loader))
            assert len(steps[-1]) == sampler.plan(0).num_steps
        assert (sampler.plan().dropped, sampler.plan().repeated < num_processes) == (0, True)
        gathered = [[row for batch in step for row in batch] for step in zip(*steps, strict=True)]
        if loader.remainder > 0:
            gathered[-1] = gathered[-1][: loader.remainder]
            completed += 1
        assert sorted(row for step in gathered for row in step) == list(range(count))
        if make is bucket_sampler and count == 90:
            assert all(len(set(map(len, step))) == 1 for step in zip(*steps, strict=True)), "tensors can be gathered"
    assert bool(completed) == (num_processes > 1)


@pytest.mark.parametrize(("make", "options", "message"), [
    (bucket_sampler, {"remainder": "drop"}, '`remainder="drop"` out'),
    (bucket_sampler, {"remainder": "catch_all", "lockstep": False}, "`lockstep=False` drops rows"),
    (length_sampler, {"remainder": "drop"}, '`remainder="drop"` out'),
    (length_sampler, {"weights": WEIGHTS}, "leave `weights` and `longest_first` out"),
    (pack_sampler, {"oversize": "drop"}, '`oversize="drop"` out'),
    (pack_sampler, {"longest_first": True}, "leave `weights` and `longest_first` out"),
])  # fmt: skip
def test_evaluation_refuses_what_would_leave_rows_out_or_repeat_them(make, options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(evaluation=True, **options)


@pytest.mark.parametrize("make", VARIANTS)
def test_total_steps_add_up_the_plans_of_all_epochs(make) -> None:
    sampler = make(weights=WEIGHTS)
    assert sampler.total_steps(epochs=3) == sum(sampler.plan(epoch).num_steps for epoch in range(3))
    assert sampler.total_steps(epochs=0) == 0


@pytest.mark.parametrize("make", VARIANTS)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_equal_epochs_are_those_of_a_sampler_cut_anew(make, num_processes: int) -> None:
    options = {"weights": WEIGHTS + 0.3, "num_processes": num_processes, "longest_first": make is not bucket_sampler}
    whole = [batch.tolist() for epoch in range(4) for batch in make(**options).plan(epoch).batches()]
    sampler, cut = EqualEpochs(make(**options)), []
    steps = make(**options).plan(0).num_steps
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sampler.plan().num_steps == steps
        cut += list(sampler)
    assert cut == whole[: len(cut)]
    saved = sampler.state_dict(step=2)
    again = EqualEpochs(make(**options))
    again.load_state_dict(saved)
    assert list(again) == cut[(2 * steps + 2) * num_processes :]
    with pytest.raises(PlanError, match="The saved state does not fit"):
        make(**options).load_state_dict(saved)
    elsewhere = EqualEpochs(make(**{**options, "num_processes": 3}))
    elsewhere.load_state_dict(saved)
    with pytest.raises(PlanError, match="as many processes as before"):
        list(elsewhere)


def test_equal_epochs_refuse_what_cannot_be_cut() -> None:
    for sampler in (bucket_sampler(evaluation=True), PackBatchSampler(lambda epoch: TOKENS, max_tokens=64)):
        with pytest.raises(PlanError, match="cannot cut"):
            EqualEpochs(sampler)


def test_an_unknown_option_is_an_error_that_names_a_similar_one() -> None:
    with pytest.raises(PlanError, match=r"LengthBatchSampler has no argument num_bucket; did you mean num_buckets\?"):
        length_sampler(num_bucket=3)


EQUAL = {
    bucket_sampler: [
        ({"batch_size": 4}, {"batch_size": np.int64(4)}),
        ({"batch_size": {0: 4, 1: 4, 2: 2}}, {"batch_size": {np.int32(2): 2.0, 1: np.int64(4), 0: 4}}),
        ({"weights": {0: 2.0, 1: 0.5}}, {"weights": {np.int64(1): np.float32(0.5), np.int64(0): 2}}),
        ({"weights": WEIGHTS}, {"weights": WEIGHTS.tolist()}),
        ({"seed": 3, "shuffle": True}, {"seed": np.uint8(3), "shuffle": np.True_}),
        ({"batch_size": None, "max_cost": 5000, "spec": WAN, "cost_model": COST},
         {"batch_size": None, "max_cost": np.float64(5000), "spec": WAN, "cost_model": COST}),
    ],
    length_sampler: [
        ({"max_tokens": 30, "max_samples": 5}, {"max_tokens": 30.0, "max_samples": np.int64(5)}),
        ({"boundaries": [3, 7]}, {"boundaries": np.array([3.0, 7.0])}),
    ],
    pack_sampler: [
        ({"max_tokens": 60, "text_tokens": 9}, {"max_tokens": 60.0, "text_tokens": np.int64(9)}),
        ({"max_cost": 900, "cost_model": COST},
         {"max_cost": 900.0, "cost_model": CostModel(linear=np.float32(1.0), quadratic=np.float64(0.5))}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("make", EQUAL)
def test_equal_settings_of_other_types_are_the_same_run(make) -> None:
    for options, same in EQUAL[make]:
        sampler = make(**options)
        again = make(**same, num_processes=np.int64(2))
        again.load_state_dict(sampler.state_dict(step=1))
        sampler.load_state_dict(json.loads(json.dumps(again.state_dict())))
        assert list(again) == list(sampler)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: LengthBatchSampler([3, np.nan, 2], batch_size=1), "Row 1 of `lengths` is nan; expected a finite number"),
    (lambda: LengthBatchSampler([3, np.inf, 2], batch_size=1), "Row 1 of `lengths` is inf"),
    (lambda: LengthBatchSampler(["3", "4"], batch_size=1), "`lengths` needs one number per row, got"),
    (lambda: LengthBatchSampler([3, None], batch_size=1), "Row 1 of `lengths` is None"),
    (lambda: LengthBatchSampler([[3, 4]], batch_size=1), r"`lengths` needs one number per row, got .*\(1, 2\)"),
    (lambda: PackBatchSampler([3.5, 4], max_tokens=9), "Row 0 of `num_tokens` is 3.5; expected a whole number"),
    (lambda: PackBatchSampler([3, 4], max_tokens=9, text_tokens=[0, np.nan]), "Row 1 of `text_tokens` is nan"),
    (lambda: PackBatchSampler([3, 4], max_tokens="9"), "`max_tokens` must be a whole number, got '9'"),
    (lambda: PackBatchSampler([3, 4], max_tokens=9.5), "`max_tokens` must be a whole number, got 9.5"),
    (lambda: BucketBatchSampler([0, 1.5], table=TABLE, batch_size=1), "Row 1 of `bucket_ids` is 1.5"),
    (lambda: bucket_sampler(weights={"0": 2.0}), "`weights` maps ids of buckets, whole numbers, got the key '0'"),
    (lambda: bucket_sampler(weights={0: np.nan}), r"`weights\[0\]` must be a finite number, got nan"),
    (lambda: list(bucket_sampler(weights={0: -1})), "at least 0"),
    (lambda: bucket_sampler(weights={0: "2"}), r"`weights\[0\]` must be a finite number, got '2'"),
    (lambda: bucket_sampler(weights=["a"] * 90), "`weights` needs one number per row"),
    (lambda: list(bucket_sampler(weights={0: 1e9})), "occurrences in an epoch.*lower `weights`"),
    (lambda: list(pack_sampler(weights=[1e300] * 90)), "occurrences in an epoch"),
    (lambda: bucket_sampler(batch_size="4"), "`batch_size` must be a whole number, got '4'"),
    (lambda: bucket_sampler(batch_size={"0": 4}), "`batch_size` maps ids of buckets, whole numbers, got the key '0'"),
    (lambda: bucket_sampler(batch_size=None, max_tokens=np.nan, spec=WAN), "`max_tokens` must be a whole number"),
    (lambda: bucket_sampler(batch_size=None, max_tokens="9", spec=WAN), "`max_tokens` must be a whole number"),
    (lambda: bucket_sampler(shuffle="no"), "`shuffle` must be True or False, got 'no'"),
    (lambda: bucket_sampler(longest_first="no", spec=WAN), "`longest_first` must be True or False"),
    (lambda: bucket_sampler(seed=-1), "`seed` must be at least 0, got -1"),
    (lambda: bucket_sampler(seed="1"), "`seed` must be a whole number"),
    (lambda: bucket_sampler(num_processes=0), "`num_processes` must be at least 1, got 0"),
    (lambda: bucket_sampler(num_processes="2"), "`num_processes` must be a whole number"),
    (lambda: length_sampler(max_tokens=np.inf), "`max_tokens` must be a finite number, got inf"),
    (lambda: length_sampler(boundaries=[3, np.inf]), "`boundaries` must be finite numbers that rise"),
    (lambda: length_sampler(boundaries=["3", "a"]), "`boundaries` must be finite numbers that rise"),
])  # fmt: skip
def test_values_that_are_no_numbers_are_errors_in_a_sentence(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_ids_of_another_table_are_refused_however_the_data_set_was_changed(tmp_path) -> None:
    sizes = Dataset.from_dict({"width": [64, 128, 192, 64], "height": [64, 64, 128, 64], "num_frames": [1] * 4})
    ds = map_columns(sizes, BucketColumns(TABLE, WAN))
    ds.save_to_disk(tmp_path / "data")
    other = BucketTable(sizes=TABLE.sizes[::-1])
    for changed in (ds, ds.shuffle(seed=0).select([1, 3]), load_from_disk(tmp_path / "data"), ds.map(lambda row: row)):
        ids = changed["bucket_id"]
        assert BucketBatchSampler(ids, table=TABLE.with_base((64, 128)), batch_size=1).plan().kept == len(changed)
        with pytest.raises(PlanError, match="`bucket_ids` were computed with another table"):
            BucketBatchSampler(ids, table=other, batch_size=1)
        with pytest.raises(PlanError, match="computed with another table"):
            BucketBatchSampler(ids, table=open_table(WAN), batch_size=1)
        BucketBatchSampler(ids[:], table=other, batch_size=1)  # a plain list does not say where it comes from
    with pytest.raises(PlanError, match="computed with another table"):
        StreamingBucketBatcher(ds.to_iterable_dataset(), BucketGrouping(table=other, batch_size=1), collate_fn=list)


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
    sampler = LengthBatchSampler(LENGTHS[subset.indices], max_tokens=12, num_buckets=4, num_processes=1)
    loader = DataLoader(subset, batch_sampler=sampler, collate_fn=list)
    seen = [float(sample[0]) for batch in loader for sample in batch]
    assert np.allclose(sorted(seen), sorted(LENGTHS[LENGTHS < 5]))
    assert max(len(batch) * max(map(len, batch)) for batch in loader) <= 12


def test_batches_can_be_padded_to_the_bounds_of_their_buckets_within_the_capacity() -> None:
    dataset = [torch.ones(length) for length in np.ceil(LENGTHS).astype(int)]
    sampler = LengthBatchSampler(np.ceil(LENGTHS).astype(int), max_tokens=20, num_buckets=3, num_processes=1)
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
    sizes = BucketBatchSampler(ids, table=table, max_tokens=64).config.batch_size
    assert sizes == {int(ids[0]): 4, int(ids[1]): 2, int(ids[2]): 1}


BUCKETS = [0] * 21 + [1] * 15 + [2] * 14 + [-1]


@pytest.mark.parametrize("weights", [None, {1: 3.0}, {1: 2.5}, [0.6] * 51], ids=["once", "whole", "half", "rows"])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("options", [
    {}, {"remainder": "drop"}, {"remainder": "repeat"}, {"remainder": "catch_all"},
    {"remainder": "catch_all", "lockstep": False},
], ids=str)  # fmt: skip
def test_epochs_that_count_as_equally_long_are(options: dict, processes: int, weights) -> None:
    table = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(1, 128, 64)), base=0)
    sampler = BucketBatchSampler(
        BUCKETS, table=table, batch_size=2, weights=weights, num_processes=processes, **options
    )
    steps = [sampler.plan(epoch).num_steps for epoch in range(12)]
    assert sampler.count_steps(3, 12) == (sum(steps[3:]), True)
    assert sampler.total_steps(12) == sum(steps)
    assert sampler.count_steps(3, 12, accumulation_steps=4) == (sum(-(-number // 4) for number in steps[3:]), True)
    if sampler._equal_epochs:
        assert len(set(steps)) == 1


def test_of_a_hundred_thousand_epochs_the_first_ones_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(100, 3000, 54)
    sampler = PackBatchSampler(lengths, max_tokens=4096, num_processes=2)
    planned: list[int] = []
    planner = sampler._planner
    monkeypatch.setattr(sampler, "_planner", lambda epoch: planned.append(epoch) or planner(epoch))
    count = sampler.count_steps(1, 100_000)
    assert not count.exact
    assert len(planned) < 1000
    mean = np.mean([sampler.plan(epoch).num_steps for epoch in range(5000, 5300)])
    assert count.steps == pytest.approx(mean * 99_999, rel=0.01)
    planned.clear()
    assert sampler.count_steps(2, 500) == (sum(sampler.plan(epoch).num_steps for epoch in range(2, 500)), True)
    planned.clear()
    assert sampler.count_steps(2, 100_000).exact is False
    assert planned == [903], "one further epoch, where an epoch has ended"
