"""Samplers under accelerate's contract: sharded once, epochs, skipping, resuming."""

from __future__ import annotations

import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState, skip_first_batches
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from torch.utils.data import DataLoader, Subset

from hf_bucketing import (
    BucketColumns,
    BucketingError,
    BucketTable,
    LatentSpec,
    PlanError,
    Size,
    StreamingBucketBatcher,
    map_columns,
    open_table,
)
from hf_bucketing.buckets.assignment import count_rejections
from hf_bucketing.loaders import (
    BucketBatchSampler,
    BucketCollator,
    EqualEpochs,
    LengthBatchSampler,
    NumberedRows,
    PackBatchSampler,
    RandomResize,
    check_loader,
)
from hf_bucketing.streaming import PackGrouping

TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 128), Size(9, 64, 64)))
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
IDS = np.array([0, 1, 2, 1, -1] * 21 + [2, 2])
TOKENS = np.where(IDS < 0, 0, 10 + 7 * np.arange(len(IDS)) % 50)


def bucket_sampler(**options) -> BucketBatchSampler:
    return BucketBatchSampler(IDS, **{"table": TABLE, "batch_size": 4, **options})


def pack_sampler(**options) -> PackBatchSampler:
    return PackBatchSampler(TOKENS, **{"max_tokens": 150, "strip_length": 1, **options})


MAKERS = {"bucket": bucket_sampler, "pack": pack_sampler}
samplers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def sharded_loaders(make, num_processes: int, **options) -> list[DataLoader]:
    """The loaders that accelerate would prepare in each of several processes."""
    return [
        prepare_data_loader(
            DataLoader(range(len(IDS)), batch_sampler=make(num_processes=num_processes), collate_fn=list, **options),
            num_processes=num_processes,
            process_index=process,
            put_on_device=False,
        )
        for process in range(num_processes)
    ]


@pytest.mark.cases(fast=("?-0-*",), slow=("3-2-*",))
@samplers
@pytest.mark.parametrize(("num_processes", "num_workers"), [(1, 0), (2, 0), (3, 2), (4, 0)])
def test_accelerate_hands_each_process_its_batches_of_the_plan(make, num_processes: int, num_workers: int) -> None:
    loaders = sharded_loaders(make, num_processes, num_workers=num_workers)
    for epoch in (0, 3):
        plan = make(num_processes=num_processes).plan(epoch)
        for process, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            assert len(loader) == plan.num_steps
            assert list(loader) == [batch.tolist() for batch in plan.batches(process_index=process)]


@samplers
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_prepared_loaders_advance_the_epoch_by_themselves(make, num_processes: int) -> None:
    for process, loader in enumerate(sharded_loaders(make, num_processes)):
        for epoch in range(3):
            plan = make(num_processes=num_processes).plan(epoch)
            assert len(loader) == plan.num_steps, "before an epoch, its own steps"
            assert list(loader) == [batch.tolist() for batch in plan.batches(process_index=process)]


@samplers
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_skip_first_batches_stays_in_its_epoch(make, num_processes: int) -> None:
    for process, loader in enumerate(sharded_loaders(make, num_processes)):
        loader.set_epoch(2)
        for epoch in (2, 3, 4):
            wanted = [b.tolist() for b in make(num_processes=num_processes).plan(epoch).batches(process_index=process)]
            skipped = skip_first_batches(loader, 3)
            if epoch == 4:
                skipped.set_epoch(4)  # as transformers.Trainer does
            assert list(skipped) == wanted[3:]
            if epoch == 2:
                list(loader)  # accelerate counts the epochs that were iterated


@pytest.mark.cases(fast=("1-*", "2-*"), slow=("3-*",))
@samplers
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_resuming_at_every_step_yields_exactly_the_rest(make, num_processes: int) -> None:
    for process in range(num_processes):
        for epoch in (0, 1):
            plan = make(num_processes=num_processes).plan(epoch)
            wanted = [batch.tolist() for batch in plan.batches(process_index=process)]
            for step in range(plan.num_steps + 1):
                saved = make(num_processes=num_processes)
                saved.set_epoch(epoch)
                state = json.loads(json.dumps(saved.state_dict(step=step)))
                loader = sharded_loaders(make, num_processes)[process]
                sampler = loader.batch_sampler
                while not hasattr(sampler, "load_state_dict"):
                    sampler = sampler.batch_sampler
                sampler.load_state_dict(state)
                loader.set_epoch(epoch)
                assert list(loader) == wanted[step:]
                if step < plan.num_steps:
                    following = make(num_processes=num_processes).plan(epoch + 1).batches(process_index=process)
                    assert list(loader) == [batch.tolist() for batch in following], "the next epoch is whole"


def test_the_launcher_says_how_many_processes_before_they_start_and_differing_numbers_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    for make in (pack_sampler, lambda **options: EqualEpochs(pack_sampler(**options))):
        sampler, steps = make(), make(num_processes=2).total_steps(3)
        assert sampler.total_steps(3) == steps < make(num_processes=1).total_steps(3)
        with pytest.raises(PlanError, match="so that each process would take all batches"):
            iter(sampler)
        assert list(make(num_processes=2, process_index=1)) == [
            batch.tolist() for batch in make(num_processes=2).plan().batches(process_index=1)
        ]
        monkeypatch.delenv("WORLD_SIZE")
        with pytest.raises(
            PlanError, match="counted for 2 processes, but 1 take different batches; ask for total_steps"
        ):
            iter(sampler)
        monkeypatch.setenv("WORLD_SIZE", "2")
    stream = Dataset.from_dict({"num_tokens": TOKENS.tolist()}).to_iterable_dataset(num_shards=2)
    batcher = partial(StreamingBucketBatcher, stream, PackGrouping(max_tokens=150), collate_fn=list)
    with pytest.raises(BucketingError, match="no RANK that says which one this is"):
        batcher()
    monkeypatch.setenv("RANK", "1")
    assert (batcher().num_processes, batcher().process_index) == (2, 1)
    monkeypatch.setattr(PartialState, "_shared_state", {"num_processes": 1, "process_index": 0})
    differs = "differs: 1 by accelerate's PartialState, 2 by the environment's WORLD_SIZE"
    for refused in (lambda: pack_sampler().total_steps(3), lambda: iter(pack_sampler()), batcher):
        with pytest.raises(PlanError, match=differs):
            refused()
    assert pack_sampler(num_processes=1).total_steps(3) > steps, "given, it need not be guessed"
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(PlanError, match="WORLD_SIZE is 'two'; expected the number of processes"):
        pack_sampler().total_steps(1)


@samplers
def test_plain_ddp_takes_process_index(make) -> None:
    plan = make(num_processes=3).plan(0)
    for process in range(3):
        sampler = make(num_processes=3, process_index=process)
        assert list(sampler) == [batch.tolist() for batch in plan.batches(process_index=process)]
        assert len(sampler) == plan.num_steps
    with pytest.raises(PlanError, match="from 0 to 2"):
        make(num_processes=3, process_index=3)


@samplers
def test_a_batch_size_attribute_would_lose_data_so_there_is_none(make) -> None:
    assert not hasattr(make(), "batch_size")
    sampler = make(num_processes=2)
    seen = [list(BatchSamplerShard(sampler, 2, process)) for process in range(2)]
    assert sum(map(len, seen[0] + seen[1])) == 2 * (sampler.plan(0).kept // 2)
    sampler.batch_size = 4
    lost = [list(BatchSamplerShard(sampler, 2, process)) for process in range(2)]
    assert lost != seen, "the trap that this test guards against"


def test_batches_hold_plain_ints() -> None:
    assert {type(index) for sampler in (bucket_sampler(), pack_sampler()) for batch in sampler for index in batch} == {
        int
    }


def test_max_tokens_gives_each_bucket_as_many_samples_as_fit() -> None:
    sampler = bucket_sampler(batch_size=None, max_tokens=96, spec=WAN)
    tokens = TABLE.num_tokens(np.arange(3), spec=WAN)
    assert tokens.tolist() == [16, 32, 48]
    assert sampler.config.batch_size == {0: 6, 1: 3, 2: 2}
    for batch in sampler.plan(0).batches():
        assert tokens[IDS[batch]].sum() <= 96


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": None}, "either `batch_size`, or `max_tokens` or `max_cost`"),
    ({"max_tokens": 96}, "either `batch_size`, or `max_tokens` or `max_cost`"),
    ({"batch_size": None, "max_tokens": 96}, "spec="),
    ({"batch_size": None, "max_tokens": 20, "spec": WAN}, "9×64×64.*takes 48 tokens"),
    ({"table": BucketTable(sizes=TABLE.sizes[:2])}, "Row 2 has bucket_id 2"),
])  # fmt: skip
def test_impossible_bucket_samplers_are_errors(options, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        bucket_sampler(**options)


def loader_of(sampler) -> DataLoader:
    return DataLoader(range(len(IDS)), batch_sampler=sampler, collate_fn=torch.tensor)


def test_check_loader_accepts_a_loader_prepared_once() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(bucket_sampler()))
    check_loader(accelerator, loader)
    check_loader(accelerator, skip_first_batches(loader, 2))


def test_check_loader_names_each_way_to_lose_batches() -> None:
    accelerator = Accelerator(cpu=True)
    cases = {
        "Expected a DataLoader with batch_sampler=": DataLoader(range(9), batch_size=3),
        "plans for 2 processes, but its batches are shared among 1": loader_of(bucket_sampler(num_processes=2)),
        "but the sampler plans for 2": loader_of(bucket_sampler(num_processes=2, process_index=1)),
        "shared among 6": prepare_data_loader(
            loader_of(bucket_sampler(num_processes=3, process_index=0)), num_processes=2, process_index=0
        ),
    }
    for message, loader in cases.items():
        with pytest.raises(PlanError, match=message):
            check_loader(accelerator, loader)
    split = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(PlanError, match="split_batches"):
        check_loader(split, loader_of(bucket_sampler()))
    dispatch = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(PlanError, match="dispatch_batches"):
        check_loader(dispatch, dispatch.prepare(loader_of(bucket_sampler())))


def test_the_sampler_itself_refuses_a_loader_that_would_lose_rows() -> None:
    dispatch = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    with pytest.raises(PlanError, match="set dispatch_batches=False"):
        list(dispatch.prepare(loader_of(bucket_sampler())))
    accelerator = Accelerator(cpu=True)
    short = accelerator.prepare(DataLoader(range(9), batch_sampler=bucket_sampler()))
    for refused in (list, lambda loader: check_loader(accelerator, loader)):
        with pytest.raises(PlanError, match="data set has 9 rows, but the sampler was made for 107"):
            refused(short)
    other = prepare_data_loader(loader_of(bucket_sampler(num_processes=3)), num_processes=2, process_index=0)
    with pytest.raises(PlanError, match="plans for 3 processes, but its batches are shared among 2"):
        list(other)


@pytest.mark.parametrize("make", [
    lambda rows: BucketBatchSampler(rows["ids"], table=TABLE, batch_size=4, weights=rows["weights"], num_processes=1),
    lambda rows: PackBatchSampler(
        rows["tokens"], max_tokens=150, strip_length=1, text_tokens=rows["text"], num_processes=1
    ),
    lambda rows: LengthBatchSampler(rows["tokens"], batch_size=4, num_processes=1),
], ids=["bucket", "pack", "length"])  # fmt: skip
def test_samplers_read_columns_of_a_data_set_as_a_whole(make, column_reads) -> None:
    rows = Dataset.from_dict({"ids": IDS, "tokens": TOKENS, "text": [1] * len(IDS), "weights": [1.0] * len(IDS)})
    plan = make(rows).plan(0)
    assert plan.summary(num_tokens=rows["tokens"], costs=rows["weights"])["kept"]
    assert column_reads


def test_tables_and_random_sizes_read_columns_of_a_data_set_as_a_whole(column_reads) -> None:
    sizes = {"num_frames": [1, 9], "height": [64, 64], "width": [128, 64]}
    rows = Dataset.from_dict({**sizes, "index": [0, 1], "bucket_id": [1, 2], "rejection": ["", "aspect"]})
    for table in (TABLE, open_table(WAN)):
        ids = table.assign(*(rows[name] for name in sizes)).bucket_id
        assert ids.tolist() == table.assign(*sizes.values()).bucket_id.tolist()
    assert TABLE.num_tokens(rows["bucket_id"], spec=WAN).tolist() == [32, 48]
    assert count_rejections(rows["rejection"]) == {"aspect": 1}
    counter = RandomResize(spec=WAN).token_counter(**{name: rows[name] for name in (*sizes, "index")})
    assert counter(0).min() > 0
    assert len(column_reads) == 12


def test_rows_in_another_order_than_the_sampler_was_made_from_are_refused() -> None:
    columns = {"bucket_id": IDS, "num_tokens": TOKENS, "label": np.arange(len(IDS))[::-1]}
    rows = Dataset.from_dict({name: column.tolist() for name, column in columns.items()})
    made = {
        "ids": lambda: bucket_sampler_of(rows["bucket_id"]),
        "ids in a list": lambda: bucket_sampler_of(IDS.tolist()),
        "tokens": lambda: PackBatchSampler(rows["num_tokens"], max_tokens=150),
        "tokens in an array": lambda: PackBatchSampler(TOKENS, max_tokens=150),
        "lengths": lambda: LengthBatchSampler(rows["num_tokens"], batch_size=4),
        "cut": lambda: EqualEpochs(bucket_sampler_of(rows["bucket_id"])),
    }
    shuffled = rows.shuffle(seed=1)
    orders = {
        "shuffled": shuffled,
        "flattened": shuffled.flatten_indices(),
        "sorted": rows.sort("label"),
        "numbered": NumberedRows(shuffled),
        "a subset": Subset(rows, range(len(IDS))[::-1]),
        "a subset of a subset": Subset(Subset(rows, range(len(IDS))[::-1]), range(len(IDS))),
    }
    same = [rows, NumberedRows(rows), rows.add_column("other", columns["label"]), Subset(rows, range(len(IDS)))]
    same += [orders["a subset"].dataset, Subset(orders["a subset"], range(len(IDS))[::-1])]
    for name, make in made.items():
        for order, dataset in orders.items():
            with pytest.raises(PlanError, match=r"rows differ\): rows were shuffled, sorted or changed"):
                check_loader(None, DataLoader(dataset, batch_sampler=make()))
            if order == "shuffled":
                with pytest.raises(PlanError, match=r"Row \d+ of the loader's data set has (bucket_id|num_tokens)"):
                    next(iter(Accelerator(cpu=True).prepare(DataLoader(dataset, batch_sampler=make()))))
        for dataset in [*same, range(len(IDS)), rows.remove_columns(["bucket_id", "num_tokens"])]:
            assert check_loader(None, DataLoader(dataset, batch_sampler=make())) is None, name
    rejected = np.where(np.arange(len(IDS)) % 7, IDS, -1)
    check_loader(None, DataLoader(rows, batch_sampler=bucket_sampler_of(rejected)))  # which are never drawn
    check_loader(None, DataLoader(rows, batch_sampler=PackBatchSampler(TOKENS + 5, max_tokens=150)))


def bucket_sampler_of(ids) -> BucketBatchSampler:
    return BucketBatchSampler(ids, table=TABLE, batch_size=4)


def test_columns_of_other_meaning_are_refused_by_the_mark_of_bucket_ids() -> None:
    sizes = Dataset.from_dict({"width": [64, 128, 64, 128], "height": [64] * 4, "label": [0, 1, 0, 2]})
    rows = map_columns(sizes, BucketColumns(TABLE, WAN))
    bucket_sampler_of(rows["bucket_id"])
    PackBatchSampler(rows["num_tokens"], max_tokens=99)
    for make in (PackBatchSampler, LengthBatchSampler):
        with pytest.raises(PlanError, match="got the column bucket_id, which holds ids of table"):
            make(rows["bucket_id"], max_tokens=100)
    with pytest.raises(PlanError, match="got the column label, but bucket_id holds the ids of table"):
        bucket_sampler_of(rows["label"])
    with pytest.raises(PlanError, match="has bucket_id 0, but the sampler was made with 1"):
        check_loader(
            None, DataLoader(rows, batch_sampler=bucket_sampler_of((1 - np.array(rows["bucket_id"])).tolist()))
        )
    assert bucket_sampler_of(rows.remove_columns("bucket_id")["label"]).num_rows == 4, "ids of one's own"


def test_a_collator_refuses_mixed_buckets_that_no_sampler_planned() -> None:
    table = TABLE.with_base()
    rows = [{"bucket_id": bucket} for bucket in (0, 1)]
    collator = BucketCollator(table)
    assert collator.target(rows) == [table.size(table.base)] * 2, "nothing is known of the sampler"
    for remainder in ("short", "catch_all"):
        sampler = BucketBatchSampler([0, 1], table=table, batch_size=1, remainder=remainder)
        check_loader(None, DataLoader(rows, batch_sampler=sampler, collate_fn=collator))
        if remainder == "short":
            with pytest.raises(BucketingError, match=r"of the buckets \[0, 1\], but the sampler planned one bucket"):
                pickle.loads(pickle.dumps(collator)).target(rows)
        assert collator.target(rows[:1] * 2) == [table.size(0)] * 2
    assert collator.target(rows) == [table.size(table.base)] * 2
