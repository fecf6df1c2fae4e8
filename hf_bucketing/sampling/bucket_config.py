"""What a bucket plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ..errors import PlanError
from .deal import TailPolicy
from .plan import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlanConfig:
    """What a bucket plan depends on, beside the rows, the epoch and the number of processes.

    Args:
        batch_size (`int` or mapping of bucket id to `int`): Samples per process and step.
        tail (`str`): What happens to a bucket's samples that do not fill a step on all processes.
            `"short"` deals them evenly in one smaller step, and what remains of all buckets one by one in mixed
            steps, so that fewer than `num_processes` samples are dropped per epoch, other ones each epoch.
            `"drop"` leaves them out of this epoch.
            `"repeat"` fills their step up with samples of the same bucket, which are counted as repeated.
            `"catch_all"` deals what remains of all buckets in batches at the size of the bucket `base`; the last such
            step is smaller, and fewer than `num_processes` samples are dropped. A catch-all batch whose rows happen
            to be of one bucket keeps that bucket's size.
        base (`int`, *optional*): Bucket of catch-all batches; `tail="catch_all"` needs it.
        lockstep (`bool`): All processes take the same bucket and as many samples in the same step. If False, each
            process draws from its own share, as in NovelAI's aspect ratio bucketing: rows are trimmed to a multiple
            of `batch_size · num_processes`, dealt to the processes in turn, and each process makes batches of them by
            itself, of its remainders in the base bucket. So steps hold different buckets, which DDP allows as every
            process runs as many steps, but the fastest waits for the slowest. Needs one `batch_size` for all buckets
            and `tail="catch_all"`.
        seed (`int`): Not negative.

    Raises:
        PlanError: On a batch size below 1, an unknown tail policy, or options that do not go together.
    """

    batch_size: int | Mapping[int, int]
    tail: TailPolicy = "short"
    base: int | None = None
    lockstep: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = self.batch_size.values() if isinstance(self.batch_size, Mapping) else [self.batch_size]
        if not sizes or min(sizes) < 1:
            raise PlanError(f"Every batch size must be at least 1, got {self.batch_size!r}.")
        if self.tail not in get_args(TailPolicy):
            raise PlanError(f"tail must be one of {', '.join(get_args(TailPolicy))}; got {self.tail!r}.")
        if self.tail == "catch_all" and self.base is None:
            raise PlanError('tail="catch_all" needs base=, the bucket whose size the mixed batches get.')
        if not self.lockstep and self.tail != "catch_all":
            raise PlanError(
                "lockstep=False puts what remains of a process's buckets into batches of the base bucket: "
                f'give tail="catch_all" with it, got {self.tail!r}.'
            )
        if not self.lockstep and isinstance(self.batch_size, Mapping):
            raise PlanError(
                "lockstep=False needs one batch size for all buckets: with several, the processes would not have "
                "equally many steps."
            )

    def batch_sizes(self, bucket_ids: IntArray) -> IntArray:
        """Return the batch size of each of the given buckets.

        Raises:
            PlanError: If a mapping names no batch size for one of them.
        """
        if not isinstance(self.batch_size, Mapping):
            return np.full(len(bucket_ids), self.batch_size, np.int64)
        missing = [int(bucket) for bucket in bucket_ids if int(bucket) not in self.batch_size]
        if missing:
            raise PlanError(f"batch_size names no size for buckets {missing}; add them or reject their samples.")
        return np.array([self.batch_size[int(bucket)] for bucket in bucket_ids], np.int64)

    @property
    def base_size(self) -> int | None:
        """Samples per process and step of a catch-all batch; None for other tails.

        Raises:
            PlanError: If a mapping names no batch size for the base bucket.
        """
        if self.base is None or self.tail != "catch_all":
            return None
        return int(self.batch_sizes(np.array([self.base]))[0])
