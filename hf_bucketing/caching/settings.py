"""Settings of a cache of latents and texts; they need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..media.views import ViewRule
from ..settings import check_at_least, check_literals


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of a cache: its folder, the views of the files that it holds, and how they are encoded.

    Args:
        folder (`str`): Folder of the entries, or a URL such as `s3://bucket/cache`. One that holds entries is
            completed.
        batching (`"bucket"` or `"pack"`): Whether each sample gets its size in `table` or in `open_table` of the
            [`PreparedDataset`][hf_bucketing.columns.PreparedDataset].
        views ([`ViewRule`][hf_bucketing.media.ViewRule]): Frames, crop, flip and decoder; by default nothing is
            random, and PyAV decodes.
        seed (`int`): Seed of random views. They are those of epoch 0 and need an `index` column.
        batch_size (`int`): Largest number of samples, or captions, per call of the encoder.
        num_threads (`int`): Threads that decode files while the encoder runs.
        on_error (`"raise"` or `"reject"`): Whether an unreadable file is an error, or its row is rejected.
        more_captions (`list` of `str`, *optional*): Captions to encode beside those of the rows, such as those that
            `preservation_caption` and `slider` of a run name; by default none.

    Raises:
        BucketingError: On a number below 1, or an unknown `batching` or `on_error`.
    """

    folder: str = field(metadata={"flag": False})
    batching: Literal["bucket", "pack"] = "bucket"
    views: ViewRule = field(default_factory=lambda: ViewRule(random_crop=False))
    seed: int = 0
    batch_size: int = 8
    num_threads: int = 2
    on_error: Literal["raise", "reject"] = "raise"
    more_captions: list[str] | None = None

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "batch_size", "num_threads")
