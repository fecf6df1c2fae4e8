"""Settings of a run that draws its rows from a stream."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BucketingError, quoted
from ..settings import check_at_least, not_default, setting


@dataclass(frozen=True, kw_only=True)  # no slots: others read the defaults from the class
class StreamConfig:
    """Rows from a stream.

    Args:
        streaming (`bool`): Whether rows are read while training, in the order of the files, and nothing is planned:
            for data sets that do not fit on a disk, and more rows than a plan holds.
        shuffle_buffer (`int`): Rows held in each worker, with their files where these are in tars or parquet, among
            which the next one is drawn at random; 0 keeps the order of the files. The buffer is in no checkpoint: a
            resumed run reads again all rows since the start of its pass over the stream.
        max_buffered (`int`): Most rows that wait in a worker until their batch is full; above it, the batch of the
            oldest one is sent incomplete.
        max_buffered_bytes (`int`): Most bytes that these rows take, likewise.
        steps_per_epoch (`int`, *optional*): Steps of each process after which an epoch ends; the next one continues
            the stream. By default, an epoch is a pass over all rows.

    Raises:
        BucketingError: On a number that is too small, or a setting without `streaming`.
    """

    streaming: bool = setting(False, on_resume="equal")
    shuffle_buffer: int = 0
    max_buffered: int = 1024
    max_buffered_bytes: int = 2**30
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, self, "shuffle_buffer")
        check_at_least(1, self, "max_buffered", "max_buffered_bytes", "steps_per_epoch")
        others = not_default(self, "shuffle_buffer", "max_buffered", "max_buffered_bytes", "steps_per_epoch")
        if others and not self.streaming:
            raise BucketingError(f"Omit {quoted(others)}: no effect without `streaming`.")
