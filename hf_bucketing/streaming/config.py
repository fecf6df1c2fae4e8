"""Settings of streams, and what it costs where their shards do not divide among processes and workers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BucketingError, quoted
from ..settings import check_at_least, names_of, not_default, setting


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Rows that wait for a batch, and the length of an epoch.

    Args:
        max_buffered (`int`): Most rows that wait in a worker until their batch is full; above it, the batch of the
            oldest one is sent incomplete.
        max_buffered_bytes (`int`): Most bytes that these rows take, likewise. A worker reads up to 1,024 rows ahead,
            of a quarter as many bytes and one row more.
        steps_per_epoch (`int`, *optional*): Steps of each process after which an epoch ends, earlier if no process has
            a row left; the next one continues the stream. By default, an epoch is a pass over all rows.

    Raises:
        BucketingError: On a number below 1.
    """

    max_buffered: int = 1024
    max_buffered_bytes: int = 2**30
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, *names_of(StreamLimits))


@dataclass(frozen=True, kw_only=True)
class StreamConfig(StreamLimits):
    """Rows from a stream.

    Args:
        streaming (`bool`): Whether rows are read while training, in the order of the files, and nothing is planned:
            for data sets that do not fit on a disk, and more rows than a plan holds.
        shuffle_buffer (`int`): Rows held in each worker, with their files where these are in tars or parquet, among
            which the next one is drawn at random; 0 keeps the order of the files. The buffer is in no checkpoint: a
            resumed run reads again all rows since the start of its pass over the stream.

    Raises:
        BucketingError: On a number that is too small, or a setting without `streaming`.
    """

    streaming: bool = setting(False, on_resume="equal")
    shuffle_buffer: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, self, "shuffle_buffer")
        others = not_default(self, "shuffle_buffer", *names_of(StreamLimits))
        if others and not self.streaming:
            raise BucketingError(f"Omit {quoted(others)}: no effect without `streaming`.")


def warn_of_shards(num_shards: int, *, num_processes: int, num_workers: int) -> list[str]:
    """Return what is slow about sharing a stream, one sentence each; none if every worker reads as many shards.

    Where the shards divide among the processes, each process reads its own; else datasets lets every process read all
    rows and keep every n-th. The workers of a process share out the shards that it reads.

    Args:
        num_shards (`int`): Files, or parts of files.
        num_processes (`int`): Training processes.
        num_workers (`int`): Workers of each of them; with 0, the process reads itself.

    Example:
        >>> warn_of_shards(8, num_processes=2, num_workers=4)
        []
        >>> print(*warn_of_shards(2, num_processes=1, num_workers=4))
        2 of the 4 workers of each process have no shard to read: give `dataloader_num_workers=2`, or make 4 shards.
    """
    workers = max(1, num_workers)
    divides = num_shards % num_processes == 0
    per_process = num_shards // num_processes if divides else num_shards
    enough = num_processes * workers
    make = f"make {-(-num_shards // enough) * enough} shards"
    if not divides:
        fewer = max(count for count in range(1, num_processes + 1) if num_shards % count == 0)
        return [
            f"The {num_shards} shards do not divide among {num_processes} processes, so each reads all of them and "
            f"keeps one row in {num_processes}: reading takes {num_processes} times as long. Run "
            f"{fewer} process{'es' if fewer > 1 else ''}, or {make}."
        ]
    if per_process < workers:
        return [
            f"{workers - per_process} of the {workers} workers of each process have no shard to read: give "
            f"`dataloader_num_workers={per_process}`, or {make}."
        ]
    if per_process % workers:
        fewer = max(count for count in range(1, workers) if per_process % count == 0)
        return [
            f"The {per_process} shards of each process do not divide among its {workers} workers: "
            f"{workers - per_process % workers} of them read {per_process // workers} and then wait for the others, "
            f"which read {per_process // workers + 1}. Give "
            f"`dataloader_num_workers={fewer}`, or {make}."
        ]
    return []
