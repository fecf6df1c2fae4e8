"""Batches from a stream: rows of a `datasets.IterableDataset` wait in groups until a batch is full."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any

from accelerate import Accelerator
from datasets import IterableDataset as Stream
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..buckets.assignment import Rejection
from ..columns.faults import path_of
from ..errors import BucketingError, MediaError, explains_arguments
from ..loaders.collators import PLANNED
from ..loaders.faults import FaultLog
from ..loaders.processes import num_running, process_rank
from ..loaders.state import describe
from ..randomness import ROW
from ..settings import check_at_least, chosen_config, names_of
from .config import StreamLimits
from .grouping import Group, Grouping, OpenGroups, Row, bytes_of
from .resume import Place, ResumableStream, StreamBatch, define
from .unreadable import UnreadableRows


@explains_arguments()
class StreamingBucketBatcher(IterableDataset[StreamBatch]):
    """Gather the rows of a stream into batches of one bucket, or into packs.

    Each process reads its own shards, and each worker its own among those. A stream whose shards do not divide evenly
    among the processes is read by all of them, and each keeps every n-th row. Batches come in the order in which
    groups fill up; rows that wait at the end come in smaller batches, in bucket order. Draw them with
    [`resume`][hf_bucketing.loaders.resume], which makes the steps of all processes equal and saves the place in the
    stream in checkpoints:

    ```python
    grouping = BucketGrouping(table=table, batch_size=8)
    stream = StreamingBucketBatcher(dataset, grouping, collate_fn=BucketCollator(table))
    loader = resume(accelerator, stream.make_loader(num_workers=2))  # not prepared
    ```

    Args:
        dataset (`datasets.IterableDataset`): Rows with `bucket_id` or `num_tokens`, or the columns they follow from.
            Split among the processes, unless `split_dataset_by_node` did that already.
        grouping ([`BucketGrouping`] or [`PackGrouping`]): The rule by which rows become batches.
        collate_fn (callable): Makes a `dict` from a list of rows, in the worker.
        steps_per_epoch (`int`, *optional*): Steps after which an epoch ends; see [`StreamLimits`].
        config ([`StreamLimits`], *optional*): Rows that wait for a batch, and `steps_per_epoch`, in one value.
        faults ([`FaultLog`][hf_bucketing.loaders.FaultLog], *optional*): Log of unreadable rows, for which
            `collate_fn` raises MediaError: the next row of its bucket takes the place of one, or in packs the next
            that has room. A batch then has the list `planned_index`, which holds unreadable rows in the places that
            others took. Rows whose `rejection` is `"unreadable"` are logged too. Rows need the column
            `hf_bucketing_row`. By default, an unreadable row is an error.
        kept (sequence of `str`): Columns that a batch has as lists, beside what `collate_fn` makes, which goes before.
        snapshot_every (`int`): Rows between two saved states of the stream. A resumed run reads again from the last
            one before its oldest waiting row; a stream with a shuffle buffer, whose state does not hold the buffer,
            from the start.
        num_processes (`int`, *optional*): Processes that share the stream; by default accelerate's, else those of
            torch.distributed, else the launcher's `WORLD_SIZE`, else 1.
        process_index (`int`, *optional*): This process's number; by default by the same, with the launcher's `RANK`;
            else 0.

    Raises:
        BucketingError: On a value below 1, a data set that is no stream or split for another process, bucket ids of
            another table, or if nothing or not the same says how many processes there are and which one this is.
    """

    def __init__(
        self,
        dataset: Stream,
        grouping: Grouping,
        *,
        collate_fn: Callable[[Sequence[Row]], dict[str, Any]],
        steps_per_epoch: int | None = None,
        config: StreamLimits | None = None,
        faults: FaultLog | None = None,
        kept: Sequence[str] = (),
        snapshot_every: int = 256,
        num_processes: int | None = None,
        process_index: int | None = None,
    ) -> None:
        if not isinstance(dataset, Stream):
            raise BucketingError(f"Expected a datasets.IterableDataset, got {type(dataset).__name__}; use a sampler.")
        self.config = chosen_config(StreamLimits, config, error=BucketingError, steps_per_epoch=steps_per_epoch)
        self.snapshot_every = snapshot_every
        check_at_least(1, self, "snapshot_every")
        grouping.check_columns(dataset.features)
        self.num_processes = num_processes or num_running()
        rank = process_rank() if process_index is None else process_index
        if rank is None and num_processes is None and self.num_processes > 1:
            raise BucketingError(
                f"{self.num_processes} processes share the stream, but there is no RANK that says which one this is; "
                "make it after the Accelerator, or give `process_index`."
            )
        self.process_index = rank or 0
        self.num_shards = dataset.num_shards
        self.dataset = _split(dataset, self.process_index, self.num_processes)
        self.grouping = grouping
        self.collate_fn = collate_fn
        self.faults = faults
        self.kept = kept
        self._definition = define(dataset)
        self._rereads = any("buffer_size" in step for step in self._definition)
        self.epoch = 0
        self._places: list[Place | None] = []
        self._turn = 0

    def make_loader(
        self,
        *,
        num_workers: int = 0,
        multiprocessing_context: BaseContext | str | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> DataLoader[StreamBatch]:
        """Return the loader for [`resume`][hf_bucketing.loaders.resume].

        The arguments are those of `DataLoader`; for the first three there is
        [`worker_options`][hf_bucketing.loaders.worker_options].

        Args:
            num_workers (`int`): Worker processes.
            multiprocessing_context (context or `str`, *optional*): How workers start.
            worker_init_fn (callable, *optional*): Called in each worker with its number, before its first row.
            timeout (`float`): Seconds to wait for a worker's batch before it is an error; 0 waits without end.
            prefetch_factor (`int`, *optional*): Batches that each worker prepares ahead.
            pin_memory (`bool`): Whether batches are copied to pinned memory.
        """
        return DataLoader(
            self,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
        )

    def fingerprint(self) -> dict[str, str]:
        """Return all that the batches depend on, beside seed and epoch."""
        parts = {
            **self.grouping.settings(),
            "stream": self._definition,
            **{name: getattr(self.config, name) for name in names_of(StreamLimits)},
            "num_shards": self.num_shards,
            "num_processes": self.num_processes,
        }
        return {name: describe(part) for name, part in parts.items()}

    def start_at(
        self, epoch: int, places: Sequence[Place | None] = (), *, began: int | None = None, turn: int = 0
    ) -> None:
        """Choose what the next iteration yields.

        Args:
            epoch (`int`): Passed to the collator.
            began (`int`, *optional*): Epoch in which this pass over the stream began, by default the same; passed to
                the stream, so that every pass is shuffled anew.
            places (sequence, *optional*): Each worker's place, from its last [`StreamBatch`]; by default the start.
            turn (`int`): The worker whose batch comes first; those before it send an empty one.
        """
        self.epoch, self._places, self._turn = epoch, list(places), turn
        self.dataset.set_epoch(epoch if began is None else began)
        if hasattr(self.collate_fn, "set_epoch"):
            self.collate_fn.set_epoch(epoch)

    def resumable(self, accelerator: Accelerator, loader: DataLoader[Any]) -> ResumableStream:
        """Return what [`resume`][hf_bucketing.loaders.resume] returns for a loader of this stream."""
        return ResumableStream(accelerator, loader, self)

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yield this worker's batches, and empty ones without end when there are no more."""
        info = get_worker_info()
        worker = info.id if info is not None else 0
        place = (self._places[worker] if self._places else None) or _START
        if worker < self._turn:
            yield StreamBatch(None, place, ended=False)
        place = yield from self._batches(place)
        while True:
            yield StreamBatch(None, place, ended=True)

    def _batches(self, place: Place) -> Generator[StreamBatch, None, Place]:
        """Yield the batches from a place on; return the last place."""
        snapshots = deque([(place["ordinal"], place["stream"])])
        read, rejected = place["read"], place["rejected"]
        self.dataset.load_state_dict(place["stream"])
        rows = iter(self.dataset)
        groups = self.grouping.start()
        complete = deque(_read_again(rows, place, groups))
        unreadable = UnreadableRows.of(place)
        nothing: tuple[None, None, int] = (None, None, 0)  # before the first row, for groups that were complete
        read_rows = itertools.chain([nothing], self._measured(rows, snapshots, read=read), [None])
        for item in read_rows:
            if item is not None and item[0] is not None:
                row, measure, num_bytes = item
                if measure is None and self._is_unreadable(row):
                    unreadable.count += 1
                    self._report([row], [f"{self._file_of(row)} cannot be read."], unreadable.count, read=read + 1)
                elif measure is None:
                    rejected += 1
                else:
                    complete.extend(groups.add(row, ordinal=read, measure=measure, num_bytes=num_bytes))
                read += 1
            while group := self._next_group(complete, groups, ended=item is None):
                batch = self._collate(group, groups, complete, unreadable=unreadable, read=read)
                if batch is not None:
                    after = _place(snapshots, complete, groups, unreadable, read=read, rejected=rejected)
                    yield StreamBatch(batch, after, ended=False, size=len(group.rows))
        return _place(snapshots, (), groups, unreadable, read=read, rejected=rejected)

    def _next_group(self, complete: deque[Group], groups: OpenGroups, *, ended: bool) -> Group | None:
        """Return the group that is to be sent now, which waits no longer; None if more rows may join all of them."""
        if complete:
            return complete.popleft()
        if ended and groups.waiting:
            return groups.flush(min(groups.waiting))
        if groups.num_rows > self.config.max_buffered or groups.num_bytes > self.config.max_buffered_bytes:
            return groups.flush(next(iter(groups)).key)
        return None

    def _collate(
        self, group: Group, groups: OpenGroups, complete: deque[Group], *, unreadable: UnreadableRows, read: int
    ) -> dict[str, Any] | None:
        """Return the batch of a group; None if rows of it are unreadable, so that the others wait again."""
        try:
            batch = self.collate_fn(group.rows)
        except MediaError:
            if self.faults is None:
                raise
            if reasons := self._faults_of(group.rows):
                if len(reasons) < len(group.rows):
                    self.faults.consecutive = 0
                rows = unreadable.take_out(group, reasons, slot=groups.slot(group.key), read=read)
                self._report(rows, [*reasons.values()], unreadable.count, read=read)
                complete.extend(groups.put_back(group) if group.rows else ())
                return None
            batch = self.collate_fn(group.rows)  # of a server that did not answer at once
        if self.faults is not None:
            self.faults.consecutive = 0
            batch[PLANNED] = unreadable.planned(group, slot=groups.slot(group.key))
        return {**{name: [row[name] for row in group.rows] for name in self.kept}, **batch}

    def _is_unreadable(self, row: Row) -> bool:
        """Return whether a row without a measure counts as unreadable, instead of rejected."""
        return self.faults is not None and row.get("rejection") == Rejection.UNREADABLE.label

    def _file_of(self, row: Row) -> str:
        return path_of(row.get(getattr(self.collate_fn, "column", ""))) or "A file without a path"

    def _report(self, rows: Sequence[Row], reasons: Sequence[str], count: int, *, read: int) -> None:
        """Log unreadable rows, the last of so many in this pass."""
        assert self.faults is not None
        for row, reason in zip(rows, reasons, strict=True):
            self.faults.report(epoch=self.epoch, index=int(row[ROW]), reason=reason)
        if count > self.faults.faults.max_errors:
            self.faults.check_share(count, rows=read, epoch=self.epoch, reason=reasons[-1])

    def _faults_of(self, rows: Sequence[Row]) -> dict[int, str]:
        """Return why rows cannot be read, by their positions."""
        reasons = {}
        for position, row in enumerate(rows):
            try:
                self.collate_fn([row])
            except MediaError as error:
                reasons[position] = str(error)
        return reasons

    def _measured(
        self, rows: Iterator[Row], snapshots: deque[tuple[int, Any]], *, read: int
    ) -> Iterator[tuple[Row, int | None, int]]:
        """Yield rows with their measures and bytes, measured many at a time; save states of the stream."""
        while True:
            chunk: list[Row] = []
            sizes: list[int] = []
            num_bytes = 0
            for row in itertools.islice(rows, _READ_AHEAD):
                read += 1
                if read % self.snapshot_every == 0 and not self._rereads:
                    snapshots.append((read, self.dataset.state_dict()))
                chunk.append(row)
                sizes.append(bytes_of(row))
                num_bytes += sizes[-1]
                if num_bytes > self.config.max_buffered_bytes // 4:
                    break
            if not chunk:
                return
            yield from zip(chunk, self.grouping.measures(chunk), sizes, strict=True)


_READ_AHEAD = 1024

_START: Place = {"ordinal": 0, "stream": None, "read": 0, "rejected": 0, "groups": []}


def _place(
    snapshots: deque[tuple[int, Any]],
    complete: Sequence[Group],
    groups: OpenGroups,
    unreadable: UnreadableRows,
    *,
    read: int,
    rejected: int,
) -> Place:
    """Return the place, with the last state of the stream before the oldest row that still waits."""
    oldest = min((group.ordinals[0] for group in (*complete, *groups)), default=read)
    while len(snapshots) > 1 and snapshots[1][0] <= oldest:
        snapshots.popleft()
    ordinal, stream = snapshots[0]
    waiting = [group.saved for group in complete] + [group.saved for group in groups.waiting.values()]
    counts = {"read": read, "rejected": rejected, **unreadable.saved()}
    return {"ordinal": ordinal, "stream": stream, **counts, "groups": waiting}


def _read_again(rows: Iterator[Row], place: Place, groups: OpenGroups) -> Iterator[Group]:
    """Read up to where the place stands, put the rows that waited back, and yield groups that were complete."""
    saved = [Group(key, list(ordinals)) for key, ordinals in place["groups"]]
    waiting = {ordinal: group for group in saved for ordinal in group.ordinals}
    for ordinal in range(place["ordinal"], place["read"]):
        row = next(rows, None)
        if row is None:
            raise BucketingError(
                f"The stream ended after {ordinal} rows, but the saved run read {place['read']}; it has changed."
            )
        if ordinal in waiting:
            waiting[ordinal].rows.append(row)
    for group in saved:
        yield from groups.put_back(group)


def _split(dataset: Stream, process: int, num_processes: int) -> Stream:
    split = dataset._distributed
    if split is None:
        return split_dataset_by_node(dataset, rank=process, world_size=num_processes)
    if (split.rank, split.world_size) != (process, num_processes):
        raise BucketingError(
            f"The stream is split for process {split.rank} of {split.world_size} already, but this is process "
            f"{process} of {num_processes}; give the stream before split_dataset_by_node, which is applied here."
        )
    return dataset


def _unchanged(batch: Any) -> Any:
    return batch
