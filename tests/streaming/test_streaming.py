"""Batches from streams: gathered, bounded, in equal steps, and resumed at every step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from hf_bucketing import BucketingError, BucketTable, CostModel, LatentSpec, MediaError, PlanError, Size
from hf_bucketing.conditions.references import REFERENCE_SIZES, ReferenceRule
from hf_bucketing.conditions.rows import ConditionRules
from hf_bucketing.loaders import FaultLog, FaultRule, resume
from hf_bucketing.plans import PackPlanConfig
from hf_bucketing.plans.packs import packs_of
from hf_bucketing.randomness import ROW
from hf_bucketing.settings import names_of
from hf_bucketing.streaming import BucketGrouping, PackGrouping, StreamingBucketBatcher, StreamLimits
from tests.loaders.loader_worker import collate_readable, collate_rows, stream_rows
from tests.loaders.test_resume_launch import launch

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(9, 64, 64)))
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
ROWS, SHARDS = 90, 6
BUCKET = BucketGrouping(table=TABLE, batch_size=4)
PACK = PackGrouping(max_tokens=120, strip_length=1, spec=SPEC, open_packs=3)
groupings = pytest.mark.parametrize("grouping", [BUCKET, PACK], ids=["bucket", "pack"])


def make_stream(rows: int = ROWS, shards: int = SHARDS) -> IterableDataset:
    return IterableDataset.from_generator(
        partial(stream_rows, total=rows), gen_kwargs={"shard": list(range(shards)), "shards": [shards] * shards}
    )


def batcher(grouping=BUCKET, *, dataset=None, **options) -> StreamingBucketBatcher:
    """Make a stream of batches, by `config` where there are limits that lack a keyword."""
    if {"max_buffered", "max_buffered_bytes"} & options.keys():
        limits = {name: options.pop(name) for name in names_of(StreamLimits) if name in options}
        options["config"] = StreamLimits(**limits)
    return StreamingBucketBatcher(dataset or make_stream(), grouping, **{"collate_fn": collate_rows, **options})


def loader(grouping=BUCKET, *, num_workers: int = 0, **options):
    return resume(Accelerator(cpu=True), batcher(grouping, **options).make_loader(num_workers=num_workers))


def odd(row) -> bool:
    return row[ROW] % 2 == 1


def as_it_is(row):
    return row


def rejected(index: int) -> bool:
    return index % 10 == 9


@groupings
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_row_comes_once_in_full_batches_but_for_the_tails(grouping, num_workers: int) -> None:
    source = loader(grouping, num_workers=num_workers)
    batches = list(source)
    assert sorted(i for batch in batches for i in batch["index"]) == [i for i in range(ROWS) if not rejected(i)]
    short = []
    for batch in batches:
        assert batch["weight"].tolist() == [1] * len(batch["index"])
        if grouping is BUCKET:
            assert len(set(batch["bucket_id"])) == 1
            assert len(batch["index"]) <= 4
            short += [batch["bucket_id"][0]] * (len(batch["index"]) < 4)
        else:
            assert sum(batch["num_tokens"]) <= 120
    if grouping is BUCKET:
        assert max(Counter(short).values(), default=0) <= max(1, num_workers), "one tail per bucket and worker"
        if num_workers == 0:
            assert short == sorted(short) == [b["bucket_id"][0] for b in batches[-len(short) :]]


@groupings
@pytest.mark.parametrize(("num_workers", "options"), [
    (0, {"dataset": "interleaved", "snapshot_every": 4}),
    pytest.param(0, {}, marks=pytest.mark.slow),
    pytest.param(2, {"snapshot_every": 4}, marks=pytest.mark.slow),
    *[pytest.param(0, options, marks=pytest.mark.every) for options in (
        {"max_buffered": 5, "snapshot_every": 3}, {"dataset": "shuffled"}, {"steps_per_epoch": 9},
        {"dataset": "concatenated", "snapshot_every": 4},
    )],
    pytest.param(2, {}, marks=pytest.mark.every),
    pytest.param(2, {"steps_per_epoch": 9}, marks=pytest.mark.every),
    pytest.param(3, {"dataset": "few shards"}, marks=pytest.mark.every),
    pytest.param(2, {"dataset": "shuffled"}, marks=pytest.mark.every),
])  # fmt: skip
def test_a_state_of_any_step_yields_exactly_the_rest(grouping, num_workers: int, options) -> None:
    def fresh():
        dataset = {
            "few shards": make_stream(shards=2),
            "shuffled": make_stream().shuffle(seed=3, buffer_size=20),
            "interleaved": interleave_datasets([make_stream(50).shuffle(seed=3, buffer_size=20), make_stream(40)]),
            "concatenated": concatenate_datasets([make_stream(40), make_stream(40).shuffle(seed=3, buffer_size=20)]),
        }.get(options.get("dataset"))
        return loader(grouping, num_workers=num_workers, **{**options, "dataset": dataset})

    whole = fresh()
    states, wanted = [whole.state_dict()], []
    for _ in range(2):
        for batch in whole:
            wanted.append(batch["index"])
            states.append(json.loads(json.dumps(whole.state_dict())))
    assert len(wanted) > 16
    for finished, state in list(enumerate(states))[:: 8 if num_workers else 4 if "dataset" in options else 1]:
        again = fresh()
        again.load_state_dict(state)
        rest = [batch["index"] for epoch in range(again.epoch, 2) for batch in again]
        assert rest == wanted[finished:]


def test_rows_are_assigned_where_they_have_no_bucket_and_epochs_differ_where_the_stream_is_shuffled() -> None:
    dataset = make_stream().remove_columns("bucket_id").shuffle(seed=1, buffer_size=30)
    source = loader(dataset=dataset)
    first, second = list(source), list(source)
    for batch in first:
        for index, bucket in zip(batch["index"], batch["bucket_id"], strict=True):
            assert bucket == index % 3
    indices = [[i for batch in epoch for i in batch["index"]] for epoch in (first, second)]
    assert sorted(indices[0]) == sorted(indices[1])
    assert indices[0] != indices[1]


@pytest.mark.parametrize("options", [{}, {"max_samples": 3}, {"open_packs": 2}, {"strip_length": 20}], ids=str)
def test_packs_of_a_stream_are_those_that_a_plan_makes_of_the_same_rows(options) -> None:
    settings = {"max_tokens": 100, "open_packs": 4, **options}
    sizes = np.random.default_rng(0).integers(1, 100, 400)
    rows = Dataset.from_dict({ROW: range(400), "bucket_id": [0] * 400, "num_tokens": sizes})
    grouping = PackGrouping(**{"strip_length": 1, **settings})
    batches = list(loader(grouping, dataset=rows.to_iterable_dataset()))
    config = PackPlanConfig(max_tokens=100, strip_length=grouping.strip_length, open_packs=settings["open_packs"],
                            max_samples=grouping.max_samples)  # fmt: skip
    spans = np.array(grouping.measures(list(rows)))
    packs = packs_of(spans, np.zeros(400), config)
    wanted = [np.flatnonzero(packs == pack).tolist() for pack in range(packs.max() + 1)]
    assert sorted(batch["index"] for batch in batches) == wanted


def test_a_row_that_closes_two_packs_can_be_resumed_between_them() -> None:
    rows = Dataset.from_dict({ROW: range(6), "bucket_id": [0] * 6, "num_tokens": [60, 50, 100, 100, 40, 45]})
    fresh = partial(
        loader, PackGrouping(max_tokens=100, strip_length=1, open_packs=2), dataset=rows.to_iterable_dataset()
    )
    states, wanted, whole = [], [], fresh()
    for batch in whole:
        wanted.append(batch["index"])
        states.append(whole.state_dict())
    assert wanted[:3] == [[0], [2], [3]], "the third row closes the fullest pack, and fills its own"
    for finished, state in enumerate(states, start=1):
        again = fresh()
        again.load_state_dict(state)
        assert [batch["index"] for batch in again] == wanted[finished:]


@pytest.mark.cases(fast=("options?-0-*",), slow=("options1-2-bucket", "options2-2-pack"))
@groupings
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"max_buffered": 5, "snapshot_every": 3}, {"dataset": "shuffled"}])
def test_later_rows_take_the_places_of_unreadable_ones_and_every_state_yields_exactly_the_rest(
    grouping, num_workers: int, options, tmp_path: Path
) -> None:
    broken = (0, 1, 4, 22, 50, 87, 88)

    def fresh():
        log = FaultLog(log=tmp_path / "unreadable.jsonl")
        dataset = make_stream().shuffle(seed=3, buffer_size=20) if "dataset" in options else make_stream()
        collate = partial(collate_readable, broken=broken)
        stream = batcher(grouping, **{**options, "dataset": dataset}, collate_fn=collate, faults=log, kept=["height"])
        return resume(Accelerator(cpu=True), stream.make_loader(num_workers=num_workers))

    whole = fresh()
    states, wanted = [], []
    for batch in whole:
        wanted.append((batch["index"], batch["planned_index"]))
        states.append(json.loads(json.dumps(whole.state_dict())))
        assert len(batch["height"]) == len(batch["index"])
        if grouping is BUCKET:
            assert {index % 3 for index in batch["planned_index"]} == {batch["index"][0] % 3}, "of the same bucket"
    seen = Counter(index for indices, _ in wanted for index in indices)
    assert seen == dict.fromkeys((i for i in range(ROWS) if not rejected(i) and i not in broken), 1)
    replaced = [old for pair in wanted for new, old in zip(*pair, strict=True) if new != old]
    assert set(replaced) <= set(broken)
    assert len(replaced) == len(set(replaced)) > 0
    assert whole.unreadable == len(broken)
    lines = [json.loads(line) for line in (tmp_path / "unreadable.jsonl").read_text().splitlines()]
    assert {line["index"] for line in lines} == set(broken)
    assert all(f"{line['index']}.mp4" in line["reason"] and line["replacement"] is None for line in lines)
    for finished, state in list(enumerate(states[:-1], start=1))[:: 5 if num_workers else 1]:
        again = fresh()
        again.load_state_dict(state)
        assert [(batch["index"], batch["planned_index"]) for batch in again] == wanted[finished:]


def test_the_next_row_of_its_bucket_takes_the_place_of_an_unreadable_one(tmp_path: Path) -> None:
    stream = make_stream(rows=36, shards=1)
    log = FaultLog(log=tmp_path / "unreadable.jsonl")
    source = resume(Accelerator(cpu=True), StreamingBucketBatcher(
        stream, BUCKET, collate_fn=partial(collate_readable, broken=(3, 33)), faults=log
    ).make_loader())  # fmt: skip
    batches = [(batch["index"], batch["planned_index"]) for batch in source if batch["bucket_id"][0] == 0]
    assert batches == [
        ([0, 6, 12, 15], [0, 6, 12, 3]), ([18, 21, 24, 27], [18, 21, 24, 27]), ([30], [30]),
    ], "nothing comes after row 33, whose batch is smaller"  # fmt: skip


@pytest.mark.parametrize(("limits", "broken", "message"), [
    ({"max_errors": 3}, range(40), r"4 samples in a row could not be read; the last: [0-9]+\.mp4"),
    ({"max_errors": 3, "max_error_share": 0.05}, range(0, 90, 4), r"4 of [0-9]+ samples .* share of 5\.00%"),
])  # fmt: skip
def test_too_many_unreadable_rows_end_a_stream(limits, broken, message: str, tmp_path: Path) -> None:
    def source(faults: FaultLog | None):
        stream = batcher(collate_fn=partial(collate_readable, broken=tuple(broken)), faults=faults)
        return resume(Accelerator(cpu=True), stream.make_loader())

    faults = FaultRule(on_error="replace", **limits)
    with pytest.raises(MediaError, match=message):
        list(source(FaultLog(log=tmp_path / "unreadable.jsonl", faults=faults)))
    with pytest.raises(MediaError, match=r"\.mp4 is broken"):
        list(source(None))


def test_the_share_of_unreadable_rows_counts_the_row_that_is_unreadable_itself(tmp_path: Path) -> None:
    def drawn(share: float) -> list[int]:
        rows = partial(stream_rows, total=4, without_headers=(1, 3))
        dataset = IterableDataset.from_generator(rows, gen_kwargs={"shard": [0], "shards": [1]})
        faults = FaultLog(
            log=tmp_path / "unreadable.jsonl",
            faults=FaultRule(on_error="replace", max_errors=1, max_error_share=share),
        )
        grouping = BucketGrouping(table=TABLE, batch_size=1)
        stream = batcher(grouping, dataset=dataset, faults=faults)
        return [index for batch in resume(Accelerator(cpu=True), stream.make_loader()) for index in batch["index"]]

    assert drawn(0.5) == [0, 2]
    with pytest.raises(MediaError, match=r"2 of 4 samples .* share of 49\.00%"):
        drawn(0.49)


def test_memory_is_bounded_by_flushing_the_oldest_group() -> None:
    stream = batcher(BucketGrouping(table=TABLE, batch_size=1000), max_buffered=10)
    waiting = []
    for batch in itertools.takewhile(lambda batch: not batch.ended, iter(stream)):
        waiting.append(sum(len(ordinals) for _, ordinals in batch.place["groups"]) + batch.size)
    assert max(waiting) == 11
    assert len(waiting) > 8


def heavy_rows(index: list[int], read: list[int]):
    for number in index:
        read.append(number)
        media = {"bytes": bytes(1000), "path": None}
        yield {ROW: number, "bucket_id": number % 3, "media": media, "num_tokens": 1}


@pytest.mark.parametrize(
    "grouping", [BucketGrouping(table=TABLE, batch_size=1000), PackGrouping(max_tokens=1000, strip_length=1)]
)
def test_waiting_rows_and_those_read_ahead_keep_to_a_number_of_bytes(grouping) -> None:
    read: list[int] = []
    rows = IterableDataset.from_generator(partial(heavy_rows, list(range(60)), read))
    stream = batcher(grouping, dataset=rows, max_buffered_bytes=10_000)
    sent: list[int] = []
    for batch in itertools.takewhile(lambda batch: not batch.ended, iter(stream)):
        sent += batch.batch["index"]
        assert len(read) - len(sent) <= 12, "some 10 waiting or read ahead"
    assert sorted(sent) == list(range(60))
    assert read[:60] == list(range(60))


def test_a_state_of_a_stream_bound_in_bytes_yields_exactly_the_rest() -> None:
    def fresh():
        rows = IterableDataset.from_generator(partial(heavy_rows, list(range(60)), []))
        return loader(BucketGrouping(table=TABLE, batch_size=8), dataset=rows, max_buffered_bytes=9000)

    whole, states, wanted = fresh(), [], []
    for batch in whole:
        wanted.append(batch["index"])
        states.append(whole.state_dict())
    for finished, state in enumerate(states[:-1], start=1):
        again = fresh()
        again.load_state_dict(state)
        assert [batch["index"] for batch in again] == wanted[finished:]


def test_sizes_are_assigned_many_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{ROW: i, "num_tokens": 1, "num_frames": 1, "height": 64, "width": 64 + i % 128} for i in range(2000)]
    dataset = Dataset.from_list(rows).to_iterable_dataset()
    calls = []
    assign = BucketTable.assign
    monkeypatch.setattr(BucketTable, "assign", lambda self, *s: calls.append(len(s[0])) or assign(self, *s))
    batches = itertools.takewhile(lambda batch: not batch.ended, iter(batcher(dataset=dataset)))
    buckets = {i: bucket for batch in batches for i, bucket in zip(*list(batch.batch.values())[:2], strict=True)}
    assert sum(calls) == 2000
    assert len(calls) <= 10
    one_by_one = [int(assign(TABLE, [1], [64], [row["width"]]).bucket_id[0]) for row in rows[:128]]
    assert [buckets.get(i, -1) for i in range(128)] == one_by_one


def test_max_tokens_gives_each_bucket_as_many_samples_as_fit_but_at_most_max_samples() -> None:
    tokens = TABLE.num_tokens(np.arange(3), spec=SPEC)
    for most in (None, 4):
        sizes = Counter()
        for batch in loader(BucketGrouping(table=TABLE, max_tokens=96, spec=SPEC, max_samples=most)):
            sizes[batch["bucket_id"][0]] = max(sizes[batch["bucket_id"][0]], len(batch["index"]))
        assert sizes == {bucket: min(96 // tokens[bucket], most or 99) for bucket in range(3)}


def test_max_cost_limits_the_batches_of_a_stream_and_is_part_of_its_states() -> None:
    costs = CostModel(linear=1, quadratic=0.5)
    grouping = BucketGrouping(table=TABLE, max_cost=3000, cost_model=costs, spec=SPEC)
    sizes = Counter()
    for batch in loader(grouping):
        sizes[batch["bucket_id"][0]] = max(sizes[batch["bucket_id"][0]], len(batch["index"]))
    each = costs.cost(TABLE.num_tokens(np.arange(3), spec=SPEC))
    assert sizes == {bucket: 3000 // each[bucket] for bucket in range(3)}
    assert grouping.settings().keys() - BucketGrouping(table=TABLE, batch_size=4).settings().keys() == {
        "max_cost",
        "cost_model",
    }
    with pytest.raises(PlanError, match="Omit `cost_model`: no effect without `max_cost`"):
        BucketGrouping(table=TABLE, batch_size=4, cost_model=costs)


def test_epochs_of_some_steps_continue_the_stream_until_all_rows_have_come() -> None:
    wanted = [batch["index"] for batch in loader()]
    source = loader(steps_per_epoch=5)
    epochs = [[batch["index"] for batch in source] for _ in range(-(-len(wanted) // 5))]
    assert [index for epoch in epochs for index in epoch] == wanted
    assert source.epoch == len(epochs)
    shuffled = loader(steps_per_epoch=5, dataset=make_stream().shuffle(seed=1, buffer_size=30))
    passes = [sorted(i for _ in epochs for batch in shuffled for i in batch["index"]) for _ in range(2)]
    assert passes[0] == passes[1] == [i for i in range(ROWS) if not rejected(i)], "a second pass follows the first"
    jumped, whole = loader(steps_per_epoch=5), loader()
    next(iter(jumped))
    for other in (jumped, whole):
        other.set_epoch(7)
    pairs = zip(jumped, whole, strict=False)
    assert all(batch["index"] == same["index"] for batch, same in pairs), "another epoch than the next starts a pass"


@pytest.mark.cases(slow=("*-2",), fast=("*-0",))
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_a_look_at_the_first_batches_takes_nothing_from_training(num_workers: int, steps_per_epoch) -> None:
    wanted = [batch["index"] for batch in loader(num_workers=num_workers, steps_per_epoch=steps_per_epoch)]
    source = loader(num_workers=num_workers, steps_per_epoch=steps_per_epoch)
    peek = next(iter(source))
    assert source.step == 1
    assert [batch["index"] for batch, _ in zip(source, range(3), strict=False)] == wanted[:3]
    assert peek["index"] == wanted[0]
    assert [batch["index"] for batch in source] == wanted
    assert source.epoch == 1
    with pytest.raises(PlanError, match="`epoch` must be a whole number, got '1'"):
        source.set_epoch("1")


def test_a_look_after_loading_begins_where_the_saved_run_stood() -> None:
    wanted, source, state = [], loader(), {}
    for batch in source:
        wanted.append(batch["index"])
        if source.step == 4:
            state = source.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert next(iter(again))["index"] == wanted[4]
    assert [batch["index"] for batch in again] == wanted[4:]


def test_a_stream_that_is_split_already_is_not_split_again() -> None:
    def rows_of(process: int, dataset) -> list[int]:
        stream = iter(batcher(dataset=dataset, num_processes=2, process_index=process))
        return [
            i for batch in itertools.takewhile(lambda batch: not batch.ended, stream) for i in batch.batch["index"]
        ]

    for shards in (6, 3):
        splits = [split_dataset_by_node(make_stream(shards=shards), rank=rank, world_size=2) for rank in range(2)]
        rows = [i for process in range(2) for i in rows_of(process, splits[process])]
        assert sorted(rows) == [i for i in range(ROWS) if not rejected(i)]
        with pytest.raises(BucketingError, match=r"split for process 1 of 2 .*, but this is process 0 of 2"):
            rows_of(0, splits[1])


def test_rejected_rows_are_counted() -> None:
    source = loader(num_workers=2)
    for _batch in source:
        counted = source.rejected
    assert counted == sum(map(rejected, range(ROWS)))


@pytest.mark.parametrize(("options", "message"), [
    ({"max_buffered": 7}, "max_buffered was 1024 and is 7"),
    ({"dataset": make_stream(shards=3)}, "num_shards was 6 and is 3"),
    ({"num_workers": 2}, "num_workers was 0 and is 2"),
    ({"grouping": BucketGrouping(table=TABLE, batch_size=5)}, "batch_size was 4 and is 5"),
    ({"dataset": make_stream().filter(odd)}, "stream was"),
    ({"dataset": make_stream().map(as_it_is)}, "stream was"),
    ({"dataset": make_stream().shuffle(seed=1, buffer_size=9)}, "stream was"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_by_name(options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        loader(**options).load_state_dict(loader().state_dict())


def test_a_state_belongs_to_the_definition_of_its_stream() -> None:
    def streams():
        yield make_stream().shuffle(seed=1, buffer_size=9)
        yield make_stream().shuffle(seed=2, buffer_size=9)
        yield make_stream().shuffle(seed=1, buffer_size=10)
        yield make_stream().filter(odd).shuffle(seed=1, buffer_size=9)
        yield interleave_datasets([make_stream(), make_stream()])
        yield interleave_datasets([make_stream(), make_stream()], probabilities=[0.5, 0.5], seed=1)
        yield interleave_datasets([make_stream(), make_stream()], probabilities=[0.5, 0.5], seed=2)
        yield Dataset.from_dict({ROW: [0], "bucket_id": [0]}).to_iterable_dataset()
        yield Dataset.from_dict({ROW: [1], "bucket_id": [0]}).to_iterable_dataset()

    first, again = ([batcher(dataset=stream).fingerprint()["stream"] for stream in streams()] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first)


def test_a_stream_that_lost_rows_cannot_be_resumed() -> None:
    source = loader()
    for _batch in source:
        state = source.state_dict()
    again = loader(dataset=make_stream(rows=30))
    again.load_state_dict(state)
    with pytest.raises(BucketingError, match="stream ended after"):
        list(again)


def test_what_cannot_work_is_an_error() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(BucketingError, match=r"Expected a datasets\.IterableDataset"):
        batcher(dataset=Dataset.from_dict({"a": [1]}))
    for wrong in ({"max_buffered": 0}, {"max_buffered_bytes": 0}, {"steps_per_epoch": 0}, {"snapshot_every": 0}):
        with pytest.raises(BucketingError, match=f"`{next(iter(wrong))}` must be at least 1, got 0"):
            batcher(**wrong)
    with pytest.raises(BucketingError, match="`config` holds `steps_per_epoch` already"):
        batcher(config=StreamLimits(), steps_per_epoch=3)
    with pytest.raises(BucketingError, match=r"takes max_buffered in its configuration: config=StreamLimits\(…\)"):
        StreamingBucketBatcher(make_stream(), BUCKET, collate_fn=collate_rows, max_buffered=9)
    with pytest.raises(PlanError, match="`batch_size` must be a whole number, got '4'"):
        BucketGrouping(table=TABLE, batch_size="4")
    with pytest.raises(PlanError, match="without preparing"):
        resume(accelerator, accelerator.prepare(batcher().make_loader()))
    with pytest.raises(PlanError, match="Persistent workers"):
        resume(accelerator, DataLoader(batcher(), batch_size=None, num_workers=1, persistent_workers=True))
    with pytest.raises(PlanError, match="in_order=False"):
        resume(accelerator, DataLoader(batcher(), batch_size=None, num_workers=1, in_order=False))
    with pytest.raises(PlanError, match="process 1 of 2"):
        resume(accelerator, batcher(num_processes=2, process_index=1).make_loader())
    with pytest.raises(PlanError, match="takes 48 tokens and exceeds `max_tokens=40`"):
        list(loader(PackGrouping(max_tokens=40, strip_length=1, spec=SPEC)))
    with pytest.raises(PlanError, match="no size for buckets \\[2\\]"):
        list(loader(BucketGrouping(table=TABLE, batch_size={0: 1, 1: 1})))
    for wrong in ({}, {"batch_size": 1, "max_tokens": 9}, {"max_tokens": 9}):
        with pytest.raises(PlanError):
            BucketGrouping(table=TABLE, **wrong)
    with pytest.raises(PlanError, match="open_packs"):
        PackGrouping(max_tokens=10, open_packs=0)
    for make, name, near in ((BucketGrouping, "max_token", "max_tokens"), (PackGrouping, "strip_len", "strip_length")):
        with pytest.raises(BucketingError, match=f"no argument {name}; did you mean {near}"):
            make(**{name: 9})


@pytest.mark.slow
def test_processes_take_equal_steps_and_resume_at_every_one(tmp_path: Path) -> None:
    launch("stream", tmp_path, [{"num_workers": 0}, {"num_workers": 2, "shards": 5}], num_processes=2)


@pytest.mark.every
@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.every), 2])
def test_rows_that_workers_of_processes_cannot_read_are_counted_and_replaced_and_resume_exactly(
    num_processes: int, tmp_path: Path
) -> None:
    common = {"num_workers": 2, "shards": 9, "total": 600, "broken": 30, "resumes": 6}
    groupings = [{**common, "grouping": grouping} for grouping in ("bucket", "pack")]
    launch("stream", tmp_path, groupings, num_processes=num_processes)


@pytest.mark.parametrize(("text_tokens", "lengths"), [(0, [6]), (20, [3, 3])])
def test_batches_of_a_stream_count_references_and_the_text_that_they_add(text_tokens: int, lengths: list[int]) -> None:
    rule = ReferenceRule(multiples=(16, 16), text_tokens=text_tokens)
    spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
    table = BucketTable.parse("64,64", frames=[1])
    grouping = BucketGrouping(
        table=table,
        max_tokens=300,
        spec=spec,
        text_tokens=10,
        conditions=ConditionRules.of(["reference"], references=rule),
    )
    rows = [{"bucket_id": 0, REFERENCE_SIZES: [1, 64, 64, 1, 32, 64]}] * 6  # of 16 tokens, and 24 of references
    groups, sent = grouping.start(), []
    for ordinal, (row, measure) in enumerate(zip(rows, grouping.measures(rows), strict=True)):
        sent += groups.add(row, ordinal=ordinal, measure=measure, num_bytes=0)
    assert [len(group.rows) for group in sent] == lengths
