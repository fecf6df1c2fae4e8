"""Settings of streams, and of a run that draws its rows from one."""

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
