"""Batches from a stream: rows of a `datasets.IterableDataset` wait in groups until a batch is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from accelerate import PartialState
from datasets import IterableDataset as Stream
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..errors import BucketingError
from ..loaders.state import describe
from .grouping import Group, Grouping, Row

Place = dict[str, Any]
"""Where one worker stands: a state of the stream and its ordinal, rows read and rejected, and the open groups."""


class StreamBatch(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: What the collator made; None if the worker has nothing (more) to give.
        place (`dict`): Where the worker stands after it.
        ended (`bool`): Whether this worker's part of the stream is at its end.
        size (`int`): Rows in the batch.
    """

    batch: Any
    place: Place
    ended: bool
    size: int = 0


class StreamingBucketBatcher(IterableDataset[StreamBatch]):
    """Gather the rows of a stream into batches of one bucket, or into packs.

    Each process reads its own shards, and each worker its own among those; a stream of fewer shards than processes is
    read by all, who take turns. Batches come in the order in which groups fill up; rows that wait at the end come in
    smaller batches, in bucket order. Draw them with [`resume`][hf_bucketing.loaders.resume], which makes the steps of
    all processes equal and puts the place in the stream into checkpoints:

    ```python
    grouping = BucketGrouping(table=table, batch_size=8)
    stream = StreamingBucketBatcher(dataset, grouping, collate_fn=BucketCollator(table))
    loader = resume(accelerator, stream.make_loader(num_workers=2))  # not prepared
    ```

    Args:
        dataset (`datasets.IterableDataset`): Rows with `bucket_id` or `num_tokens`, or the columns they follow from.
        grouping ([`BucketGrouping`] or [`PackGrouping`]): Which rows make a batch.
        collate_fn (callable): Makes a `dict` of a list of rows, in the worker.
        max_buffered (`int`): Rows that may wait at once in a worker; above it, the group of the oldest row is flushed.
        steps_per_epoch (`int`, *optional*): Ends the epoch after as many steps, or earlier when all are done.
        snapshot_every (`int`): Rows between two states of the stream, from one of which resuming reads again. A stream
            with a shuffle buffer, whose state does not hold the buffer, is read again from the start.
        num_processes (`int`, *optional*): Defaults to accelerate's `PartialState` if it is up, else to 1.
        process_index (`int`, *optional*): As `num_processes`.

    Raises:
        BucketingError: On a value below 1, or a data set that is no stream.
    """

    def __init__(
        self,
        dataset: Stream,
        grouping: Grouping,
        *,
        collate_fn: Callable[[Sequence[Row]], dict[str, Any]],
        max_buffered: int = 1024,
        steps_per_epoch: int | None = None,
        snapshot_every: int = 256,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        if not isinstance(dataset, Stream):
            raise BucketingError(f"Expected a datasets.IterableDataset, got {type(dataset).__name__}; use a sampler.")
        if min(max_buffered, snapshot_every, steps_per_epoch or 1) < 1 or steps_per_epoch == 0:
            raise BucketingError(
                f"Expected values of 1 or more, got max_buffered={max_buffered}, snapshot_every={snapshot_every} and "
                f"steps_per_epoch={steps_per_epoch}."
            )
        state = PartialState() if PartialState._shared_state else None
        self.num_processes = num_processes or (state.num_processes if state else 1)
        self.process_index = process_index if process_index is not None else (state.process_index if state else 0)
        self.num_shards = dataset.num_shards
        self.dataset = split_dataset_by_node(dataset, rank=self.process_index, world_size=self.num_processes)
        self.grouping = grouping
        self.collate_fn = collate_fn
        self.max_buffered = max_buffered
        self.steps_per_epoch = steps_per_epoch
        self.snapshot_every = snapshot_every
        self._rereads = _has_shuffle_buffer(dataset)
        self.epoch = 0
        self._places: list[Place | None] = []
        self._turn = 0

    def make_loader(self, *, num_workers: int = 0, **options: Any) -> DataLoader[StreamBatch]:
        """Return the loader for [`resume`][hf_bucketing.loaders.resume].

        Args:
            num_workers (`int`): Worker processes.
            **options: Others of `DataLoader`, such as `timeout`, `prefetch_factor` and `pin_memory`.
        """
        return DataLoader(self, batch_size=None, collate_fn=_unchanged, num_workers=num_workers, **options)

    def fingerprint(self) -> dict[str, str]:
        """Return all that the batches depend on, beside seed and epoch."""
        parts = {
            **self.grouping.settings(),
            "columns": self.dataset.column_names,
            "max_buffered": self.max_buffered,
            "num_shards": self.num_shards,
            "num_processes": self.num_processes,
            "steps_per_epoch": self.steps_per_epoch,
        }
        return {name: describe(part) for name, part in parts.items()}

    def start_at(self, epoch: int, places: Sequence[Place | None] = (), *, turn: int = 0) -> None:
        """Choose what the next iteration yields.

        Args:
            epoch (`int`): Passed to the stream, so that it shuffles anew.
            places (sequence, *optional*): Of each worker, from its last [`StreamBatch`]; by default the start.
            turn (`int`): The worker whose batch comes first; those before it send an empty one.
        """
        self.epoch, self._places, self._turn = epoch, list(places), turn
        self.dataset.set_epoch(epoch)
        if hasattr(self.collate_fn, "set_epoch"):
            self.collate_fn.set_epoch(epoch)

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield this worker's batches, and empty ones without end when there are no more."""
        info = get_worker_info()
        worker = info.id if info is not None else 0
        place = (self._places[worker] if self._places else None) or _START
        if worker < self._turn:
            yield StreamBatch(None, place, ended=False)
        for rows, after in self._batches(place):
            place = after
            if rows:
                yield StreamBatch(self.collate_fn(rows), place, ended=False, size=len(rows))
        while True:
            yield StreamBatch(None, place, ended=True)

    def _batches(self, place: Place) -> Iterator[tuple[list[Row], Place]]:
        snapshots = deque([(place["ordinal"], place["stream"])])
        read, rejected = place["read"], place["rejected"]
        self.dataset.load_state_dict(place["stream"])
        rows = iter(self.dataset)
        groups = _read_again(rows, place)
        for row in rows:
            measure = self.grouping.measure(row)
            if measure is None:
                complete, rejected = None, rejected + 1
            else:
                complete = self.grouping.add(groups, row, ordinal=read, measure=measure)
            read += 1
            if read % self.snapshot_every == 0 and not self._rereads:
                snapshots.append((read, self.dataset.state_dict()))
            if complete is None and sum(len(group.rows) for group in groups) > self.max_buffered:
                complete = min(groups, key=lambda group: group.ordinals[0])
            if complete is not None:
                groups.remove(complete)
                yield complete.rows, _place(snapshots, groups, read=read, rejected=rejected)
        for group in sorted(groups, key=lambda group: group.key):
            groups.remove(group)
            yield group.rows, _place(snapshots, groups, read=read, rejected=rejected)
        yield [], _place(snapshots, groups, read=read, rejected=rejected)


_START: Place = {"ordinal": 0, "stream": None, "read": 0, "rejected": 0, "groups": []}


def _place(snapshots: deque[tuple[int, Any]], groups: list[Group], *, read: int, rejected: int) -> Place:
    """Return the place, with the last state of the stream before the oldest row that still waits."""
    oldest = min((group.ordinals[0] for group in groups), default=read)
    while len(snapshots) > 1 and snapshots[1][0] <= oldest:
        snapshots.popleft()
    ordinal, stream = snapshots[0]
    waiting = [[group.key, group.used, list(group.ordinals)] for group in groups]
    return {"ordinal": ordinal, "stream": stream, "read": read, "rejected": rejected, "groups": waiting}


def _read_again(rows: Iterator[Row], place: Place) -> list[Group]:
    """Read up to where the place stands, and keep the rows that waited in groups."""
    groups = [Group(key, list(ordinals), used=used) for key, used, ordinals in place["groups"]]
    waiting = {ordinal: group for group in groups for ordinal in group.ordinals}
    for ordinal in range(place["ordinal"], place["read"]):
        row = next(rows, None)
        if row is None:
            raise BucketingError(
                f"The stream ended after {ordinal} rows, but the saved run read {place['read']}; it has changed."
            )
        if ordinal in waiting:
            group = waiting[ordinal]
            group.rows.append({**row, "bucket_id": group.key} if group.key >= 0 else row)
    return groups


def _has_shuffle_buffer(dataset: Stream) -> bool:
    step: Any = dataset._ex_iterable
    while step is not None:
        if "Shuffled" in type(step).__name__ and hasattr(step, "buffer_size"):
            return True
        step = getattr(step, "ex_iterable", None)
    return False


def _unchanged(batch: Any) -> Any:
    return batch
