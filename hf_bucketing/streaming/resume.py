"""Equal steps on all processes from a stream, and the place in it, saved in accelerate's checkpoints."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from torch.utils.data import DataLoader

from ..errors import BucketingError, PlanError
from ..loaders.state import VERSION, check_state, epoch_number
from ..loaders.window import AccumulationWindow
from ..randomness import Purpose, integer_seed
from .config import StreamLimits

Place = dict[str, Any]
"""Where one worker stands: a state of the stream and its ordinal, rows read and rejected, and the waiting groups."""


class StreamBatch(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: The collator's batch; None if the worker has nothing (more) to give.
        place (`dict`): The worker's place after it.
        ended (`bool`): Whether this worker's part of the stream is at its end.
        size (`int`): Rows in the batch.
    """

    batch: Any
    place: Place
    ended: bool
    size: int = 0


class BatchStream(Protocol):
    """A stream that says where it stands, as [`StreamingBucketBatcher`] does."""

    num_processes: int
    process_index: int
    num_shards: int
    config: StreamLimits
    collate_fn: Any

    def start_at(self, epoch: int, places: Sequence[Place | None] = (), *, began: int, turn: int = 0) -> None: ...
    def fingerprint(self) -> dict[str, str]: ...


class StreamPlace(NamedTuple):
    """Place of this process in its stream.

    Attributes:
        step (`int`): Finished steps of the epoch.
        began (`int`): Epoch in which the present pass over the stream began.
        workers (tuple): The place of each worker.
        turn (`int`): The worker whose batch comes next.
        ended (`bool`): Whether its part of the stream is at its end; the place is then before its last batch, which
            it repeats.
    """

    step: int = 0
    began: int = 0
    workers: tuple[Any, ...] = ()
    turn: int = 0
    ended: bool = False


class ResumableStream(DataLoaderStateMixin):
    """Iterate the batches of a [`StreamingBucketBatcher`] in equal steps on all processes; see `resume`.

    A process that has no more batches repeats its last one with weight 0 until all are done. So each batch, a `dict`,
    gets a `weight` (`float32`, shape `(n,)`) for [`global_mean`][hf_bucketing.losses.global_mean]. Before each step,
    the processes ask each other whether any has a batch left.

    Each `iter()` yields the whole epoch, or what was left of it when it was loaded; the next epoch follows once an
    iteration has reached the end. So a look at the first batch, `next(iter(loader))`, takes nothing from training.

    With `steps_per_epoch`, the next epoch continues where the last one stopped, until all rows have come; the epoch
    after the end of the stream begins the next pass over it, shuffled anew. So does one that `set_epoch` jumps to.

    What [`ResumableLoader`][hf_bucketing.loaders.ResumableLoader] says of saving holds here as well. All processes
    must save together, and a run is resumed on as many processes and workers as it had.

    Args:
        accelerator (`Accelerator`): Its device receives the batches.
        loader (`DataLoader`): From `StreamingBucketBatcher.make_loader`, not prepared.
        stream ([`StreamingBucketBatcher`]): The loader's data set.

    Raises:
        PlanError: If the loader was prepared, has persistent workers, `in_order=False`, or is for other processes than
            run.
    """

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any], stream: BatchStream) -> None:
        if hasattr(loader, "base_dataloader") or loader.dataset is not stream:
            raise PlanError("accelerate would shard the stream a second time: pass its loader without preparing it.")
        if loader.persistent_workers:
            raise PlanError("Persistent workers would not learn of the next epoch; leave persistent_workers out.")
        if not getattr(loader, "in_order", True):
            raise PlanError("With in_order=False nobody knows which batches came already; leave in_order=False out.")
        if (stream.num_processes, stream.process_index) != (accelerator.num_processes, accelerator.process_index):
            raise PlanError(
                f"This is process {accelerator.process_index} of {accelerator.num_processes}, but the stream is for "
                f"process {stream.process_index} of {stream.num_processes}; make it after the Accelerator."
            )
        self.accelerator = accelerator
        self.loader = loader
        self.stream = stream
        self.dataset = stream
        self.gradient_state = GradientState()
        self._drop_last = True  # accelerate shall not compute a remainder for gather_for_metrics
        self.epoch = 0
        self._first = self._place = StreamPlace()
        self._window = AccumulationWindow(accelerator, self._place)
        self._read: list[Any] = []
        self._generator = torch.Generator()
        if loader.generator is None:
            loader.generator = self._generator
        accelerator.register_for_checkpointing(self)

    @property
    def step(self) -> int:
        """Finished steps of the epoch, including that of the current batch."""
        return self._place.step

    @property
    def began(self) -> int:
        """Epoch in which the present pass over the stream began."""
        return self._place.began

    @property
    def rejected(self) -> int:
        """Rejected rows among those that this process's workers have read in this epoch."""
        return sum(place["rejected"] for place in self._read if place is not None)

    @property
    def unreadable(self) -> int:
        """Unreadable rows among those that this process's workers have read in this epoch."""
        return sum(place.get("unreadable", 0) for place in self._read if place is not None)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to read, from its start; choosing the current one changes nothing.

        Raises:
            PlanError: If it is no whole number from 0.
        """
        epoch = epoch_number(epoch)
        if epoch != self.epoch:
            self._begin_at(epoch, StreamPlace(began=epoch))

    def _begin_at(self, epoch: int, place: StreamPlace) -> None:
        """Make a place in an epoch the one at which every iteration begins, until the epoch has ended."""
        self.epoch = epoch
        self._first = self._place = self._window.start = place

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._generator.manual_seed(integer_seed(Purpose.LOADER, self.epoch))
        # What an iteration that was left early has drawn, such as a peek at the first batch, comes again.
        place = self._place = self._window.start = self._first
        self.stream.start_at(self.epoch, place.workers, began=place.began, turn=place.turn)
        self.begin()
        try:
            rows_left = yield from self._steps()
        finally:
            self.end()
        if rows_left:
            self._begin_at(self.epoch + 1, self._place._replace(step=0))
        else:
            self.set_epoch(self.epoch + 1)

    def _steps(self) -> Generator[dict[str, Any], None, bool]:
        """Yield the batches of an epoch; return whether any process has rows left in this pass over the stream."""
        limit = self.stream.config.steps_per_epoch or math.inf
        source = self._batches_of_process()
        last = None
        if self._place.ended:  # only to repeat it
            last, source = next(source), iter(())
        current = next(source, None)
        rows_left = self._any(current is not None)
        while rows_left and self.step < limit:
            following = next(source, None) if current is not None else None
            rows_left = self._any(following is not None)
            self._window.enter(self._place)
            if current is not None:
                last = current
                place = self._place._replace(ended=True) if following is None else current[1]
            elif last is not None:
                place = self._place
            else:
                raise BucketingError(
                    f"Process {self.accelerator.process_index} has no row of the stream in epoch {self.epoch}; it has "
                    f"{self.stream.num_shards} shards: make more of them, or run fewer processes."
                )
            self._place = place._replace(step=self.step + 1, began=self._place.began)
            self.end_of_dataloader = not rows_left or self.step == limit
            yield self._weighted(last[0], weight=float(current is not None))
            current = following
        return rows_left

    def _batches_of_process(self) -> Iterator[tuple[StreamBatch, StreamPlace]]:
        """Yield this process's batches, each with the place after it."""
        num_workers = max(1, self.loader.num_workers)
        places: list[Any] = list(self._place.workers) or [None] * num_workers
        ended = [False] * num_workers
        self._read = places
        for position, item in enumerate(self.loader):
            worker = position % num_workers
            places[worker], ended[worker] = item.place, item.ended
            if item.batch is not None:
                turn = (position + 1) % num_workers
                yield item, StreamPlace(workers=tuple(places), turn=turn)
            elif all(ended):
                return

    def _weighted(self, item: StreamBatch, *, weight: float) -> dict[str, Any]:
        batch = {**item.batch, "weight": torch.full((item.size,), weight)}
        moved: dict[str, Any] = send_to_device(batch, self.accelerator.device)
        return moved

    def _any(self, flag: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return flag
        count = torch.tensor(float(flag), device=self.accelerator.device)
        return bool(self.accelerator.reduce(count, "sum") > 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the place of all processes, the same on each; all must call it together."""
        place = self._window.resume_from(self._place)
        mine = {"workers": list(place.workers), "turn": place.turn, "ended": place.ended}
        return {
            "version": VERSION,
            "fingerprint": self._fingerprint(),
            "seed": self._seed,
            "epoch": self.epoch,
            "began": place.began,
            "consumed": place.step,
            "processes": gather_object([mine]) if self.accelerator.num_processes > 1 else [mine],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` stood.

        Raises:
            PlanError: If the stream, its settings, or the number of processes or workers differ.
        """
        check_state(state, fingerprint=self._fingerprint(), seed=self._seed)
        mine = state["processes"][self.accelerator.process_index]
        place = StreamPlace(
            int(state["consumed"]), int(state["began"]), tuple(mine["workers"]), mine["turn"], mine["ended"]
        )
        self._begin_at(int(state["epoch"]), place)
        self._window.restore(place)

    @property
    def _seed(self) -> int:
        return getattr(self.stream.collate_fn, "seed", None) or 0

    def _fingerprint(self) -> dict[str, str]:
        return {**self.stream.fingerprint(), "num_workers": str(self.loader.num_workers)}


def define(dataset: IterableDataset) -> list[dict[str, Any]]:
    """Return each step of a stream as a `dict`: its kind and its settings; the sources come last.

    Settings are plain values, digests of functions (of their `identity`, where they have one) and data sets, and
    states of random generators. What else a step
    holds, such as a connection, is named by its type only, since nobody could compare it in another run.
    """
    steps, waiting = [], [dataset._ex_iterable]
    while waiting:
        step: Any = waiting.pop(0)
        held = {name: value for name, value in vars(step).items() if "state_dict" not in name}
        waiting += [held.pop("ex_iterable")] if "ex_iterable" in held else []
        waiting += held.pop("ex_iterables", [])
        steps.append({"kind": type(step).__name__, **{name: _plain(value) for name, value in held.items()}})
    return steps


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    if isinstance(value, Dataset):
        return value._fingerprint
    if isinstance(value, functools.partial):
        return [_plain(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType) or not callable(value):
        return f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
    return Hasher.hash(getattr(value, "identity", value))
