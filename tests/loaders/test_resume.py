"""The place in an epoch: saved and resumed at every step, on other numbers of processes, through accelerate."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from hf_bucketing import BucketTable, PlanError, Size
from hf_bucketing.loaders import (
    BucketBatchSampler,
    EqualEpochs,
    LengthBatchSampler,
    PackBatchSampler,
    check_loader,
    resume,
)
from hf_bucketing.loaders.state import VERSION
from tests.loaders.loader_worker import IDS, TABLE, make_sampler


class SimulatedProcess(SimpleNamespace):
    """What `resume` reads of an Accelerator, in one of several processes."""

    def __init__(self, num_processes: int, *, window: int = 1) -> None:
        super().__init__(num_processes=num_processes, split_batches=False, dispatch_batches=None)
        self.gradient_accumulation_steps, self.sync_gradients, self.step = window, True, 0

    def register_for_checkpointing(self, *objects) -> None:
        self.registered = objects

    def register_save_state_pre_hook(self, hook) -> None:
        self.hooks = [hook]

    def register_load_state_pre_hook(self, hook) -> None:
        self.hooks.append(hook)


def resumable(make, num_processes: int, process: int, *, stateful: bool = False, **options):
    loader = prepare_data_loader(
        DataLoader(range(len(IDS)), batch_sampler=make(num_processes=num_processes), collate_fn=list, **options),
        num_processes=num_processes,
        process_index=process,
        use_stateful_dataloader=stateful,
    )
    return resume(SimulatedProcess(num_processes), loader)


def bucket(ids=IDS, **options) -> BucketBatchSampler:
    return BucketBatchSampler(ids, **{"table": TABLE, "batch_size": 4, **options})


def pack(ids=IDS, **options) -> PackBatchSampler:
    tokens = np.where(ids < 0, 0, 10 + 7 * np.arange(len(ids)) % 50)
    return PackBatchSampler(tokens, **{"max_tokens": 90, "strip_length": 1, **options})


def length(ids=IDS, **options) -> LengthBatchSampler:
    return LengthBatchSampler(10 + ids * 3 + np.arange(len(ids)) % 3, **{"max_tokens": 60, **options})


samplers = pytest.mark.parametrize("make", [bucket, pack, length])


@samplers
@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_a_state_of_any_step_yields_exactly_the_rest(make, num_processes: int, stateful: bool) -> None:
    for process in range(num_processes):
        whole = resumable(make, num_processes, process, stateful=stateful)
        states, wanted = [whole.state_dict()], []
        for _ in range(2):
            for batch in whole:
                wanted.append(batch)
                states.append(json.loads(json.dumps(whole.state_dict())))
        for finished, state in enumerate(states):
            again = resumable(make, num_processes, process, stateful=stateful)
            again.load_state_dict(state)
            rest = []
            for epoch in range(again.epoch, 2):
                again.set_epoch(epoch)
                assert len(again) == len(again.plan.bucket_ids) // num_processes - again.step
                rest += list(again)
            assert rest == wanted[finished:]


@pytest.mark.cases(fast=("plain-True-1",), slow=("stateful-True-2", "plain-False-2"))
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
def test_batches_that_workers_drew_ahead_are_not_lost(num_processes: int, persistent: bool, stateful: bool) -> None:
    options = {"stateful": stateful, "num_workers": 2, "persistent_workers": persistent}
    wanted = [list(batch) for batch in resumable(bucket, num_processes, 0)]
    loader = resumable(bucket, num_processes, 0, **options)
    loader.set_epoch(1)
    loader.set_epoch(0)  # a stateful loader drew it in prepare()
    seen = []
    for stop in (1, 4, len(wanted)):
        for batch in loader:
            seen.append(batch)
            if len(seen) == stop:
                break
        other = resumable(bucket, num_processes, 0, **options)
        other.load_state_dict(loader.state_dict())
        loader.base_dataloader._iterator = None  # its workers stop
        loader = other
    loader.base_dataloader._iterator = None
    assert seen == wanted


def test_the_epoch_moves_on_at_its_end_and_stays_after_its_last_batch() -> None:
    loader = resumable(bucket, 2, 0)
    for _batch in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, [[2, loader.sampler.plan(0).num_steps]])
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, [])
    again = resumable(bucket, 2, 0)
    again.load_state_dict(state)
    assert (again.epoch, len(again), list(again), again.epoch) == (0, 0, [], 1)
    again.set_epoch(5)
    assert list(again) == [batch.tolist() for batch in bucket(num_processes=2).plan(5).batches(process_index=0)]


def test_a_window_of_accumulation_that_was_not_finished_starts_again() -> None:
    loader = resumable(bucket, 1, 0)
    loader.accelerator.gradient_accumulation_steps = 3
    plan = loader.plan
    for step, _batch in enumerate(loader):
        loader.accelerator.sync_gradients = step % 3 == 2
        start = step // 3 * 3
        assert loader.samples_in_window == sum(map(len, list(plan.batches())[start : start + 3]))
        assert loader.state_dict()["consumed"] == ([[1, (step + 1) // 3 * 3]] if step > 1 else [])
        if step == 7:
            break


@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_iterating_again_starts_again_and_the_length_stays(num_processes: int, stateful: bool) -> None:
    loader = resumable(bucket, num_processes, 0, stateful=stateful)
    whole = [batch.tolist() for batch in loader.plan.batches(process_index=0)]
    assert next(iter(loader)) == next(iter(loader)) == whole[0]
    assert [batch for batch, _ in zip(loader, range(2), strict=False)] == whole[:2]
    state = loader.state_dict()
    assert state["consumed"] == [[num_processes, loader.step]], "what was handed out counts as finished"
    assert [(batch, len(loader)) for batch in loader] == [(batch, len(whole)) for batch in whole]
    loader.load_state_dict(state)
    rest = whole[state["consumed"][0][1] :]
    assert next(iter(loader)) == rest[0]
    assert [(batch, len(loader)) for batch in loader] == [(batch, len(rest)) for batch in rest]
    assert (loader.epoch, loader.step, len(loader)) == (1, 0, loader.plan.num_steps)


def test_a_validation_loader_under_resume_leaves_the_training_loaders_place_and_random_states(tmp_path) -> None:
    def start(folder=None):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        loaders = [
            resume(accelerator, accelerator.prepare(DataLoader(range(47), batch_sampler=make(), collate_fn=list)))
            for make in (bucket, pack)
        ]
        if folder is not None:
            accelerator.load_state(str(folder))
        return accelerator, *loaders

    def train(accelerator, training, validation, *, save_at=None):
        for batch in training:
            with accelerator.accumulate():
                yield batch, torch.rand(1).item()
            if training.step == 3:
                seen = [(torch.rand(1).item(), rows) for rows in validation]
                assert len(seen) > 3
            if training.step == save_at:
                accelerator.save_state(str(tmp_path / str(save_at)))

    whole = list(train(*start()))
    for step in (5, 6):  # within a window, and after it
        list(train(*start(), save_at=step))
        accelerator, training, validation = start(tmp_path / str(step))
        assert (training.step, validation.epoch, validation.step) == (step // 3 * 3, 1, 0)
        assert list(train(accelerator, training, validation)) == whole[step // 3 * 3 :]


def test_a_resumable_loader_has_what_the_prepared_one_has() -> None:
    accelerator = Accelerator(cpu=True)
    sampler, rows = make_sampler("bucket"), range(len(IDS))
    prepared = accelerator.prepare(DataLoader(rows, batch_sampler=sampler, collate_fn=torch.tensor, timeout=0))
    loader = resume(accelerator, prepared)
    for name in ("dataset", "batch_sampler", "collate_fn", "num_workers", "timeout", "pin_memory", "device"):
        assert getattr(loader, name) is getattr(prepared, name)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, DataLoaderShard)
    ends = [accelerator.gradient_state.end_of_dataloader for _ in loader]
    assert ends == [False] * (len(ends) - 1) + [True]
    with pytest.raises(PlanError, match="Only a prepared loader"):
        resume(accelerator, DataLoader(rows, batch_sampler=sampler))


def test_skip_first_batches_of_a_resumable_loader_keeps_its_epoch_and_is_never_saved() -> None:
    loader = resumable(bucket, 2, 1)
    for epoch in (0, 2):
        loader.set_epoch(epoch)
        wanted = [batch.tolist() for batch in loader.plan.batches(process_index=1)]
        assert list(skip_first_batches(loader, 3)) == wanted[3:]
    skipped = skip_first_batches(loader, 3)
    for _ in skipped:
        with pytest.raises(PlanError, match="cannot hold the place of skip_first_batches"):
            loader.state_dict()
    loader.load_state_dict({**loader.state_dict(), "consumed": [[2, 4]]})
    with pytest.raises(PlanError, match="resumes at step 4, and skip_first_batches would leave out 3 more"):
        list(skip_first_batches(loader, 3))


def test_each_epoch_reaches_the_collator() -> None:
    class Collator:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __call__(self, rows):
            return self.epoch

    loader = resumable(bucket, 1, 0)
    loader.base_dataloader.collate_fn = Collator()
    assert [set(loader) for _ in range(3)] == [{0}, {1}, {2}]
    plain = prepare_data_loader(
        DataLoader(range(len(IDS)), batch_sampler=bucket(num_processes=2), collate_fn=Collator()),
        num_processes=2,
        process_index=1,
    )
    plain.set_epoch(4)
    assert (set(plain), set(plain)) == ({4}, {5}), "without resume as well"


@samplers
@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(-1, 2), min_size=20, max_size=60).filter(lambda ids: sum(i >= 0 for i in ids) > 8),
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    seed=st.integers(0, 99),
    draws=st.randoms(use_true_random=False),
)
def test_changing_the_number_of_processes_in_an_epoch_loses_and_repeats_nothing(
    make, ids, counts: list[int], seed: int, draws: random.Random
) -> None:
    array, state, seen = np.array(ids), None, []
    for number, num_processes in enumerate(counts):
        sampler = make(array, num_processes=num_processes, seed=seed)
        if state is not None:
            sampler.load_state_dict(state)
        plan, first = sampler.plan(), sampler.first_step
        last = plan.num_steps if number == len(counts) - 1 else draws.randint(first, plan.num_steps)
        batches = list(sampler)
        assert len(batches) == len(sampler) == (plan.num_steps - first) * num_processes
        seen += [row for batch in batches[: (last - first) * num_processes] for row in batch]
        state = json.loads(json.dumps(sampler.state_dict(step=last)))
    assert len(seen) == len(set(seen))
    missing = set(np.flatnonzero(array >= 0)) - set(seen)
    assert len(missing) < max(counts)
    sampler.load_state_dict(state)
    assert list(sampler) == []
    assert len(json.dumps(state)) < 4096


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, "seed was 0 and is 1"),
    ({"batch_size": 3}, "batch_size was 4 and is 3"),
    ({"remainder": "drop"}, "remainder was 'short' and is 'drop'"),
    ({"ids": IDS[:-1]}, "rows was 47 values, digest .* and is 46 values"),
    ({"table": BucketTable(sizes=(*TABLE.sizes, Size(17, 64, 64)))}, "table was"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_by_the_name_of_what_differs(change, message: str) -> None:
    state = bucket(num_processes=2).state_dict(step=2)
    with pytest.raises(PlanError, match=message) as caught:
        bucket(num_processes=2, **change).load_state_dict(state)
    assert str(caught.value).count(" was ") == 1
    with pytest.raises(PlanError, match="max_tokens was absent"):
        pack().load_state_dict(state)
    with pytest.raises(PlanError, match="version 7"):
        bucket().load_state_dict({**state, "version": 7})
    other = bucket(num_processes=3)
    other.load_state_dict({**state, "consumed": [[2, 99]]})
    with pytest.raises(PlanError, match="99 steps on 2 processes"):
        other.plan()


def test_a_state_of_lengths_does_not_resume_in_another_order() -> None:
    make = partial(LengthBatchSampler, [1.0 + row % 7 for row in range(60)], max_tokens=20, num_processes=2)
    own = {"num_buckets": 3, "boundaries": "uniform"}
    state = make(**own).state_dict(step=2)
    with pytest.raises(PlanError, match=f"version {VERSION - 1}"):
        make(**own).load_state_dict({**state, "version": VERSION - 1})
    for change, said in (
        ({"num_buckets": 4}, "num_buckets was 3 and is 4"),
        ({"boundaries": (2.0, 7.0), "num_buckets": None}, "boundaries was 'uniform' and is"),
    ):
        with pytest.raises(PlanError, match=said):
            make(**{**own, **change}).load_state_dict(state)


def test_states_stay_small_whatever_the_settings() -> None:
    sampler = bucket(np.arange(3000) % 3, batch_size={number: 2 + number % 7 for number in range(5000)})
    assert len(json.dumps(sampler.state_dict(step=10))) < 4096


def test_check_loader_sends_stateful_loaders_to_resume_which_makes_them_exact() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(DataLoader(range(len(IDS)), batch_sampler=make_sampler("bucket"), collate_fn=list))
    with pytest.raises(PlanError, match=r"iterate resume\(accelerator, loader\)"):
        check_loader(accelerator, loader)
    resume(accelerator, loader)
    check_loader(accelerator, loader)
    sampler = make_sampler("bucket")
    sampler.batch_size = 4
    with pytest.raises(PlanError, match="batch_size=4"):
        check_loader(Accelerator(cpu=True), DataLoader(range(len(IDS)), batch_sampler=sampler))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "num_workers"), [(bucket, 0), (pack, 0), (bucket, 2)])
def test_a_stateful_loader_of_torchdata_resumes_with_the_batch_after_the_last_one(make, num_workers: int) -> None:
    def stateful() -> StatefulDataLoader:
        sampler = make(num_processes=1, weights=np.where(np.arange(len(IDS)) % 3, 1.0, 1.5))
        return StatefulDataLoader(range(len(IDS)), batch_sampler=sampler, collate_fn=list, num_workers=num_workers)

    def epochs(loader: StatefulDataLoader, start: int) -> Iterator[tuple[int, list[int]]]:
        for epoch in range(start, 2):
            loader.batch_sampler.set_epoch(epoch)
            yield from ((epoch, batch) for batch in loader)

    whole, states, wanted = stateful(), [], []
    for epoch, batch in epochs(whole, 0):
        wanted.append(batch)
        states.append((epoch, len(wanted), pickle.dumps(whole.state_dict())))
    plans = [stateful().batch_sampler.plan(epoch) for epoch in range(2)]
    assert wanted == [batch.tolist() for plan in plans for batch in plan.batches()]
    first = plans[0].num_steps
    for epoch, seen, state in [states[place] for place in (0, 5, first - 2, first - 1, first, -2)]:
        resumed = stateful()
        resumed.load_state_dict(pickle.loads(state))
        assert [batch for _, batch in epochs(resumed, epoch)] == wanted[seen:], (epoch, seen)
    ended = stateful()
    assert len(list(ended)) == first
    resumed = stateful()
    resumed.load_state_dict(ended.state_dict())
    resumed.batch_sampler.set_epoch(1)  # before torchdata loads the state, in `iter`
    assert list(resumed) == wanted[first:], "the epoch after the one that had ended"


@samplers
def test_a_state_without_a_step_counts_the_batches_that_were_handed_out(make) -> None:
    for num_processes in (1, 2):
        sampler = make(num_processes=num_processes)
        batches = [batch.tolist() for batch in sampler.plan().batches()]
        drawn = iter(sampler)
        for count in range(len(batches) + 1):
            steps = count // num_processes
            assert sampler.state_dict()["consumed"] == ([[num_processes, steps]] if steps else [])
            again = make(num_processes=num_processes)
            again.load_state_dict(sampler.state_dict())
            assert list(again) == batches[steps * num_processes :]
            next(drawn, None)
        sampler.set_epoch(0)
        assert sampler.state_dict()["consumed"] == [], "it is iterated again"
    sampler = make()
    loader = Accelerator(cpu=True).prepare(DataLoader(range(len(IDS)), batch_sampler=sampler, collate_fn=list))
    batches = iter(loader)
    next(batches)
    with pytest.raises(PlanError, match=r"draws ahead, .*: give state_dict\(step=…\)"):
        sampler.state_dict()


def test_a_plain_loader_that_repeats_an_epoch_is_warned_once_how_to_choose_the_next(caplog) -> None:
    def iterate(sampler, *, epochs: int = 3) -> int:
        caplog.clear()
        for _ in range(epochs):
            list(DataLoader(range(len(IDS)), batch_sampler=sampler, collate_fn=list))
        return sum("call sampler.set_epoch(epoch) before each epoch" in message for message in caplog.messages)

    for make in (bucket, pack, length):
        assert iterate(make(num_processes=1), epochs=1) == 0
        assert iterate(make(num_processes=1)) == 1
        assert iterate(make(num_processes=2, process_index=1)) == 0, "the first process says it"
        for same in ({"shuffle": False}, {"shuffle": False, "evaluation": True}):
            assert iterate(make(num_processes=1, **same)) == 0, "every epoch is the same"
    assert iterate(EqualEpochs(pack(num_processes=1))) == 1
    chosen = bucket(num_processes=1)
    for epoch in (0, 0, 1, 2):
        chosen.set_epoch(epoch)
        assert iterate(chosen, epochs=1) == 0
    prepared = Accelerator(cpu=True).prepare(DataLoader(range(len(IDS)), batch_sampler=bucket(), collate_fn=list))
    caplog.clear()
    assert list(prepared) != list(prepared)
    assert not caplog.messages
