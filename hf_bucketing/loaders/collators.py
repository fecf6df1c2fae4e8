"""Collators: rows of a data set become tensors, in a DataLoader worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..buckets.assignment import Rejection
from ..buckets.open_table import OpenTable, open_table
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..errors import BucketingError
from .faults import StandIns
from .media_collator import MediaCollator, Row, require
from .random_resize import RandomResize


class BucketCollator(MediaCollator):
    """Make a batch of one bucket: cover-resize and crop every sample to the bucket's size, and stack them.

    Rows of several buckets, a catch-all batch, get the size of the table's base bucket.

    Called with rows of a data set that has `bucket_id`, `num_frames` and `fps` columns, returns a `dict` with
    `pixel_values` (`float32`, `(B, 3, F, H, W)`, in [−1, 1]), `bucket_id`, and the lists `caption`, `size`, `crop`,
    `flip`, `fps` (0 for images) and `index`.

    Args:
        table ([`BucketTable`] or [`OpenTable`]): The table that the `bucket_id` column belongs to.
        **options: Those of [`MediaCollator`].
    """

    def __init__(self, table: BucketTable | OpenTable, **options: Any) -> None:
        super().__init__(**options)
        self.table = table

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return the size of the rows' bucket for each row.

        Raises:
            ColumnError: If there is no `bucket_id` column.
            BucketingError: If the rows are of none, or of several buckets and the table has no base bucket.
        """
        return [self.table.size(self._bucket(rows))] * len(rows)

    def _bucket(self, rows: Sequence[Row]) -> int:
        """Return the bucket of all rows, or the base bucket of the table for a catch-all batch of several."""
        require(rows[0], ["bucket_id"])
        ids = {int(row["bucket_id"]) for row in rows}
        if len(ids) == 1:
            return ids.pop()
        if self.table.base is None:
            raise BucketingError(
                f"A batch holds the buckets {sorted(ids)}, which cannot be stacked; draw it with a "
                "BucketBatchSampler, or give the table a base bucket for batches that mix buckets."
            )
        return self.table.base

    def candidates(self, row: Row, stand_ins: StandIns) -> npt.NDArray[np.int64]:
        """Return the rows of the same bucket."""
        return np.flatnonzero(stand_ins.column("bucket_id") == int(row["bucket_id"]))

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch; errors as in `load` and `target`."""
        batch = self.load(rows)
        return {**batch, "pixel_values": torch.stack(batch["pixel_values"]), "bucket_id": self._bucket(rows)}


class PackCollator(MediaCollator):
    """Make a list of samples, each at its own size, rounded up to whole tokens (frames: down to a valid number).

    Called with rows of a data set that has `width`, `height`, `num_frames` and `fps` columns, returns a `dict` with
    `pixel_values` (a list of `float32` tensors `(3, F, H, W)`, in [−1, 1]), `caption`, `size`, `crop`, `flip`,
    `fps` (0 for images) and `index`.

    Args:
        table ([`OpenTable`][hf_bucketing.OpenTable] or [`LatentSpec`]): The one that `num_tokens` was counted with; a
            spec stands for `open_table(spec)`.
        resize ([`RandomResize`], *optional*): Draws each sample's own size anew in every epoch; the sampler must count
            its tokens (`resize.token_counter`).
        **options: Those of [`MediaCollator`].

    Raises:
        BucketingError: If `resize` is of another spec, or comes with sizes of videos for images or with stand-ins,
            whose tokens it changes.
    """

    def __init__(
        self,
        table: OpenTable | LatentSpec,
        *,
        resize: RandomResize | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.table = open_table(table) if isinstance(table, LatentSpec) else table
        spec = self.table.spec
        if resize is not None and resize.spec != spec:
            raise BucketingError(f"resize rounds to {resize.spec}, but the collator to {spec}; give both the same.")
        if resize is not None and self.stand_ins is not None:
            raise BucketingError('on_error="replace" needs sizes that stay; leave resize out.')
        if resize is not None and self.table.image_sizes is not None:
            raise BucketingError(
                "Images cannot take both sizes of videos and sizes drawn at random: leave `resize` "
                "out, or the table's image_sizes (--image_sizes own in scripts/prepare_dataset.py)."
            )
        self.resize = resize

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return each row's own size in whole tokens, or the one that it takes as an image.

        Raises:
            ColumnError: If a size column is missing.
            BucketingError: If a row has no frames or pixels, or is an image that no size of a video fits.
        """
        require(rows[0], ["num_frames", "height", "width"])
        sizes = [Size(*(int(row[key]) for key in ("num_frames", "height", "width"))) for row in rows]
        sizes = [size._replace(frames=int(self.table.cut(size.frames))) for size in sizes]
        if self.resize is not None:
            require(rows[0], ["index"])
            indices = [int(row["index"]) for row in rows]
            return self.resize.sizes(sizes, indices=indices, epoch=int(self._epoch))
        assigned = self.table.assign(*zip(*sizes, strict=True))
        for size, reason in zip(sizes, assigned.rejection.tolist(), strict=True):
            if reason != Rejection.NONE:
                raise BucketingError(
                    f"A row of {size} is rejected as {Rejection(reason).label}; leave out rows whose num_tokens is 0."
                )
        return [self.table.size(int(bucket)) for bucket in assigned.bucket_id]

    def candidates(self, row: Row, stand_ins: StandIns) -> npt.NDArray[np.int64]:
        """Return the rows of as many tokens, or those of fewer if there is no other."""
        tokens, own = stand_ins.column("num_tokens"), int(row["num_tokens"])
        alike = np.flatnonzero(tokens == own)
        return alike if len(alike) > 1 else np.flatnonzero((tokens > 0) & (tokens < own))

    def stand_in_size(self, row: Row, size: Size) -> Size:
        """Return the row's own size."""
        return self.target([row])[0]

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch; errors as in `load` and `target`."""
        return self.load(rows)
