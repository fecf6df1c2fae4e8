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
from accelerate import Accelerator
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
    NumberedRows,
    PackBatchSampler,
    PadCollator,
    RandomResize,
    check_loader,
)
from hf_bucketing.plans import BucketPlanConfig, LengthPlanConfig, PackPlanConfig
from hf_bucketing.streaming import BucketGrouping, StreamingBucketBatcher

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(1, 128, 192)), base=0)
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
COST = CostModel(linear=1, quadratic=0.5)
IDS = np.random.default_rng(0).integers(-1, 3, 90)
TOKENS = np.random.default_rng(2).integers(0, 40, 90)
LENGTHS = np.random.default_rng(1).uniform(1, 9, 90)


SAMPLERS = {
    BucketBatchSampler: (BucketPlanConfig, {"max_samples", "max_cost", "cost_model", "base", "lockstep"}),
    LengthBatchSampler: (LengthPlanConfig, {"max_samples", "remainder", "oversize"}),
    PackBatchSampler: (
        PackPlanConfig,
        {"max_samples", "max_cost", "open_packs", "window", "accumulation_steps", "oversize"},
    ),
}
"""The configuration of each sampler's plan, and which of its settings lack a keyword."""


def make_sampler(kind, column, options):
    """Make a sampler by keywords, or by `config` where an option lacks one."""
    plan, others = SAMPLERS[kind]
    if not others & options.keys():
        return kind(column, **options)
    names = {field.name for field in dataclasses.fields(plan)}
    config = plan(**{name: value for name, value in options.items() if name in names})
    return kind(column, config=config, **{name: value for name, value in options.items() if name not in names})


def bucket_sampler(column=IDS, **options) -> BucketBatchSampler:
    options = {"table": TABLE, "batch_size": 4, "num_processes": 2, **options}
    return make_sampler(BucketBatchSampler, column, options)


def length_sampler(column=LENGTHS, **options) -> LengthBatchSampler:
    return make_sampler(LengthBatchSampler, column, {"max_tokens": 30, "num_processes": 2, **options})


def pack_sampler(column=TOKENS, **options) -> PackBatchSampler:
    options = {"max_tokens": 60, "strip_length": 1, "num_processes": 2, **options}
    return make_sampler(PackBatchSampler, column, options)


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


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_samplers_keywords_have_the_types_of_its_plans_settings_and_leave_the_defaults_to_them(sampler) -> None:
    config, others = SAMPLERS[sampler]
    arguments = inspect.signature(sampler).parameters
    assert not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    hints, wanted = typing.get_type_hints(sampler.__init__), typing.get_type_hints(config)
    assert wanted.keys() - arguments.keys() == others
    for name in wanted.keys() & arguments.keys():
        assert arguments[name].default is None, name
        assert hints[name] == wanted[name] | None, name
    assert hints["config"] == config | None


@pytest.mark.parametrize(("sampler", "settings", "others"), [
    (BucketBatchSampler, {"batch_size": 3, "remainder": "drop", "seed": 1}, {"table": TABLE}),
    (BucketBatchSampler, {"batch_size": 3, "remainder": "catch_all", "shuffle": False}, {"table": TABLE}),
    (BucketBatchSampler, {"max_tokens": 200, "evaluation": True}, {"table": TABLE, "spec": WAN}),
    (LengthBatchSampler, {"max_tokens": 30, "boundaries": [3, 7], "evaluation": True}, {}),
    (PackBatchSampler, {"max_tokens": 90, "balance": "cost", "cost_model": COST}, {"text_tokens": 9}),
])  # fmt: skip
def test_a_config_is_the_same_as_its_settings_as_keywords(sampler, settings, others) -> None:
    column = {BucketBatchSampler: IDS, LengthBatchSampler: LENGTHS, PackBatchSampler: TOKENS}[sampler]
    config = SAMPLERS[sampler][0](**settings)
    by_keywords = sampler(column, **settings, **others, num_processes=2)
    by_config = sampler(column, config=config, **others, num_processes=2)
    by_config.load_state_dict(by_keywords.state_dict())
    assert list(by_config) == list(by_keywords)
    for name, value in settings.items():
        with pytest.raises(PlanError, match=f"`config` holds `{name}` already"):
            sampler(column, config=config, **others, **{name: value})


def test_saved_states_name_what_they_named_before() -> None:
    shared = {"rows", "weights", "longest_first", "shuffle", "evaluation"}
    buckets = {"table", "batch_size", "remainder", "base", "lockstep"}
    limited = {"batch_size": None, "max_tokens": 200, "spec": WAN, "max_samples": 4}
    for sampler in (bucket_sampler(), bucket_sampler(**limited)):
        assert sampler.state_dict()["fingerprint"].keys() == shared | buckets, "sizes in place of limits"
    lengths = {
        "strategy",
        "batch_size",
        "max_tokens",
        "max_samples",
        "num_buckets",
        "boundaries",
        "remainder",
        "oversize",
    }
    assert length_sampler().state_dict()["fingerprint"].keys() == shared | lengths | {"oversize"}
    packs = {
        "max_tokens", "max_cost", "cost_model", "max_samples", "strip_length", "strategy", "open_packs", "window",
        "balance", "accumulation_steps", "oversize", "text_tokens",
    }  # fmt: skip
    assert pack_sampler().state_dict()["fingerprint"].keys() == shared | packs


def test_a_config_of_another_plan_or_table_is_refused() -> None:
    with pytest.raises(PlanError, match="`config` must be a PackPlanConfig, got LengthPlanConfig"):
        PackBatchSampler(TOKENS, config=LengthPlanConfig(max_tokens=60))
    with pytest.raises(PlanError, match="`config` has base=1, but the base bucket of the table is 0"):
        BucketBatchSampler(IDS, table=TABLE, config=BucketPlanConfig(batch_size=4, remainder="catch_all", base=1))
    with pytest.raises(PlanError, match="`max_tokens` and `max_cost` count tokens: pass spec="):
        BucketBatchSampler(IDS, table=TABLE, config=BucketPlanConfig(max_tokens=200))


@pytest.mark.parametrize(("make", "name", "near"), [
    (bucket_sampler, "remainders", "remainder"), (length_sampler, "max_token", "max_tokens"),
    (pack_sampler, "strip_len", "strip_length"),
])  # fmt: skip
def test_an_unknown_argument_raises_an_error_with_the_nearest_one(make, name: str, near: str) -> None:
    with pytest.raises(PlanError, match=f"BatchSampler has no argument {name}; did you mean {near}"):
        make(**{name: 1})


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


@pytest.mark.cases(slow=("*-7",), fast=("*-1", "*-2", "*-3"))
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


def test_a_setting_without_a_keyword_is_an_error_that_names_the_configuration() -> None:
    for sampler, (config, others) in SAMPLERS.items():
        for name in others:
            with pytest.raises(PlanError, match=rf"takes {name} in its configuration: config={config.__name__}\("):
                sampler(IDS, **{name: 2})


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
    (lambda: LengthBatchSampler([[3, 4], [5]], batch_size=1), "`lengths` needs one number per row, got lists"),
    (lambda: LengthBatchSampler([3, 4], batch_size=1, weights=[[1], [2, 3]]), "`weights` needs one number per row"),
    (lambda: PackBatchSampler([[3, 4], [5]], max_tokens=9), "`num_tokens` needs one number per row, got lists"),
    (lambda: PackBatchSampler([3, 4], max_tokens=9, text_tokens=[[1], [2, 3]]), "`text_tokens` needs one number"),
    (lambda: PackBatchSampler(np.array([3, 2**63], np.uint64), max_tokens=9), r"expected a number below 2\*\*63"),
    (lambda: BucketBatchSampler([0, -5], table=TABLE, batch_size=1), "Row 1 has bucket_id -5, but the table has 0"),
    (lambda: BucketBatchSampler([0, 3], table=TABLE, batch_size=1), "Row 1 has bucket_id 3, but the table has 0 to 2"),
    (lambda: length_sampler().set_epoch("1"), "`epoch` must be a whole number, got '1'"),
    (lambda: length_sampler().set_epoch(1.5), "`epoch` must be a whole number, got 1.5"),
    (lambda: length_sampler().set_epoch(-1), "`epoch` must be at least 0, got -1"),
    (lambda: length_sampler().plan("1"), "`epoch` must be a whole number, got '1'"),
    (lambda: length_sampler().total_steps("1"), "`epochs` must be a whole number, got '1'"),
    (lambda: length_sampler().state_dict(step="1"), "`step` must be a whole number, got '1'"),
    (lambda: BucketCollator(TABLE).set_epoch("1"), "`epoch` must be a whole number, got '1'"),
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


def test_another_table_at_the_loader_is_refused_where_the_ids_do_not_say_theirs() -> None:
    sizes = Dataset.from_dict({"width": [64, 128, 192, 64], "height": [64, 64, 128, 64], "num_frames": [1] * 4})
    ds = map_columns(sizes, BucketColumns(TABLE, WAN))
    other = BucketTable(sizes=TABLE.sizes[::-1])
    accelerator = Accelerator(cpu=True)

    def loader(rows, table, collate):
        sampler = BucketBatchSampler(ds["bucket_id"][:], table=table, batch_size=1)
        return accelerator.prepare(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))

    assert len(list(loader(ds, TABLE.with_base((64, 128)), list))) == 4
    for rows in (ds, NumberedRows(ds)):
        with pytest.raises(PlanError, match="computed with another table: the column bucket_id holds"):
            list(loader(rows, other, list))
    unmarked = Dataset.from_dict({"bucket_id": ds["bucket_id"][:]})
    with pytest.raises(PlanError, match="but its loader's collator ids of table"):
        list(loader(unmarked, TABLE, BucketCollator(other)))
    with pytest.raises(PlanError, match="but its loader's collator ids of table"):
        check_loader(accelerator, loader(unmarked, other, BucketCollator(TABLE)))


def test_a_data_set_longer_than_its_sampler_is_refused_with_and_without_accelerate() -> None:
    rows = Dataset.from_dict({"x": list(range(4))})
    loader = DataLoader(rows, batch_sampler=LengthBatchSampler([1, 2, 3], batch_size=1, num_processes=1))
    for check in (
        lambda: check_loader(None, loader),
        lambda: check_loader(Accelerator(cpu=True), Accelerator(cpu=True).prepare(loader)),
        lambda: list(Accelerator(cpu=True).prepare(loader)),
    ):
        with pytest.raises(PlanError, match="has 4 rows, but the sampler was made for 3"):
            check()
    check_loader(None, DataLoader(rows, batch_sampler=LengthBatchSampler([1, 2, 3, 4], batch_size=1)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.uint8, np.int16, np.float32])
@pytest.mark.parametrize("strategy", ["bucket", "sorted"])
def test_lengths_of_narrow_types_plan_as_wide_ones(dtype, strategy: str) -> None:
    lengths = np.full(400, 250, dtype)
    lengths[::3] = 200
    plans = [
        LengthBatchSampler(column, max_tokens=200_000, strategy=strategy, num_processes=1).plan()
        for column in (lengths, lengths.astype(np.float64))
    ]
    assert plans[0].indices.tolist() == plans[1].indices.tolist()
    assert plans[0].offsets.tolist() == plans[1].offsets.tolist()


def test_functions_of_later_tokens_and_costs_that_differ_are_another_run() -> None:
    def growing(after: int):
        return lambda epoch: TOKENS * (1 + (epoch >= after))

    def sampler(tokens, **options) -> PackBatchSampler:
        return pack_sampler(tokens, max_tokens=120, **options)

    costs = {"max_cost": 10_000.0, "cost_model": COST}
    saved = sampler(growing(3), **costs).state_dict(step=1)
    sampler(growing(3), **costs).load_state_dict(json.loads(json.dumps(saved)))
    with pytest.raises(PlanError, match="num_tokens was function of digest"):
        sampler(growing(4), **costs).load_state_dict(saved)
    columns = {"num_frames": [1] * 20, "height": [200] * 20, "width": [300] * 20, "index": np.arange(20)}
    counters = [RandomResize(spec=WAN, min_side=64, seed=seed).token_counter(**columns) for seed in (0, 0, 1)]
    saved = sampler(counters[0], oversize="drop").state_dict()
    sampler(counters[1], oversize="drop").load_state_dict(saved)
    with pytest.raises(PlanError, match="num_tokens was function"):
        sampler(counters[2], oversize="drop").load_state_dict(saved)
    numbers = iter(n for n in range(9))
    with pytest.raises(PlanError, match="cannot say what"):
        sampler(lambda epoch: TOKENS + 0 * next(numbers)).state_dict()
    first = {"longest_first": True, "spec": WAN, "batch_size": {0: 9, 1: 4, 2: 1}}
    dear = CostModel(linear=1, quadratic=50)
    with pytest.raises(PlanError, match="costs was"):
        bucket_sampler(**first, cost_model=dear).load_state_dict(bucket_sampler(**first).state_dict())


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
    config = BucketPlanConfig(batch_size=2, **options)
    sampler = BucketBatchSampler(BUCKETS, table=table, config=config, weights=weights, num_processes=processes)
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
