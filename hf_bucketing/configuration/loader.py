"""Worker processes that read samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..loaders.workers import worker_options
from ..settings import check_at_least, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Worker processes that decode samples.

    Args:
        dataloader_num_workers (`int`): Decoding processes per training process; with 0, training processes decode.
        dataloader_timeout (`int`): Seconds without a batch after which a worker counts as hung; 0 waits forever.

    Raises:
        BucketingError: On a negative number.
    """

    dataloader_num_workers: int = setting(2, argument="num_workers")
    dataloader_timeout: int = setting(600, argument="timeout")

    def __post_init__(self) -> None:
        check_at_least(0, self, "dataloader_num_workers", "dataloader_timeout")

    def options(self) -> dict[str, Any]:
        """Return options of a `DataLoader`; batches for a GPU lie in pinned memory, which it reads while it computes.

        Raises:
            BucketingError: As [`worker_options`][hf_bucketing.loaders.worker_options].
        """
        from accelerate import PartialState

        workers = self.dataloader_num_workers
        return {
            "timeout": self.dataloader_timeout if workers else 0,
            "pin_memory": PartialState().device.type == "cuda",
            **worker_options(workers),
        }
