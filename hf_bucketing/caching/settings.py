"""Settings of a cache of latents and texts; they need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..errors import BucketingError
from ..media.views import ViewRule
from ..plans.ways import CachedAs, stacks
from ..settings import check_at_least, check_literals, setting


class CachedView(NamedTuple):
    """Rule of one view of each sample, the epoch of its draws, and the minimum side of its size, if that is drawn."""

    rule: ViewRule
    epoch: int
    random_resize: int | None


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
        views_per_sample (`int`): Views of each sample, of which an epoch draws one or holds all. Of several,
            the first has no random crop, frames or flip; the others are random.
        random_resize (`int`, *optional*): Minimum side, in pixels, of the views after the first in a cache for packs,
            each of a size of its own, drawn as `random_resize` of training does; by default all views of a sample have
            one size.
        seed (`int`): Seed of random views. They are those of the first epochs of training from files with this seed,
            and need an `index` column.
        batch_size (`int`): Largest number of samples, or captions, per call of the encoder.
        num_threads (`int`): Threads that decode files while the encoder runs.
        on_error (`"raise"` or `"reject"`): Whether a file that is unreadable, or a file or a caption of which the
            model makes NaN or infinite numbers, is an error, or its row is rejected.
        appended_frames (`"first"`, `"last"` or `"all"`, *optional*): Frames of each view that are also encoded by
            themselves, for runs whose `condition` appends them: the first or the last one, or those of all latent
            frames after the first. By default none is.
        more_captions (`list` of `str`, *optional*): Captions to encode beside those of the rows, such as those that
            `preservation_caption` and `slider` of a run name; by default none.

    Raises:
        BucketingError: On a number below 1, an unknown `batching` or `on_error`, several views of which none is
            random, or `random_resize` with one view, or with buckets.
    """

    folder: str = field(metadata={"flag": False})
    batching: CachedAs = "bucket"
    views: ViewRule = field(default_factory=lambda: ViewRule(random_crop=False))
    views_per_sample: int = 1
    random_resize: int | None = None
    seed: int = 0
    batch_size: int = 8
    num_threads: int = 2
    on_error: Literal["raise", "reject"] = "raise"
    appended_frames: Literal["first", "last", "all"] | None = setting(None, flag=False)
    more_captions: list[str] | None = None

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, self, "batch_size", "num_threads", "views_per_sample", "random_resize")
        if self.views_per_sample > 1 and not (self.views.num_draws or self.random_resize):
            raise BucketingError(
                f"`views_per_sample={self.views_per_sample}` would encode equal views, as nothing is random; give "
                '`random_crop`, `flip_probability`, `frame_picking="random"` or, for packs, `random_resize`.'
            )
        if self.random_resize is not None and self.views_per_sample == 1:
            raise BucketingError(
                "`random_resize` draws the sizes of all views but the first; give `views_per_sample` too."
            )
        if self.random_resize is not None and stacks(self.batching):
            raise BucketingError(
                "Omit `random_resize`: all views of a sample in a bucket have its size. Prepare with `each_budget`, "
                "by which each sample is a row at every one of `bucket_tokens`."
            )

    def appended_at(self, latent_frames: int) -> range:
        """Return the latent frames of a sample at which `appended_frames` are encoded by themselves."""
        if self.appended_frames == "first":
            return range(min(1, latent_frames - 1))  # none of an image
        return range(max(1, latent_frames - 1) if self.appended_frames == "last" else 1, latent_frames)

    @property
    def view_rules(self) -> list[CachedView]:
        """Rule of each view of a sample."""
        drawn = [CachedView(self.views, epoch, self.random_resize) for epoch in range(self.views_per_sample)]
        return drawn if self.views_per_sample == 1 else [CachedView(self.views.fixed, 0, None), *drawn[:-1]]
