"""The open table: no fixed buckets, each sample keeps its own size."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .assignment import Assignment, IntArray, Rejection, as_columns, unusable
from .errors import BucketingError
from .geometry import LatentSpec, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTable:
    """No fixed buckets: each sample keeps its own size, rounded up to whole tokens, frames cut to a valid number.

    A bucket id is the size's place in the grid of all sizes, so it means the same in every data set and needs no
    list: 9 bits of latent frames, 11 of rows, 11 of columns, in units of one patch. Make one with [`open_table`].

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
    """

    spec: LatentSpec
    base: None = field(default=None, init=False)

    def size(self, bucket_id: int) -> Size:
        """Return the size that a bucket id stands for.

        Raises:
            BucketingError: If the id is negative.
        """
        if bucket_id < 0:
            raise BucketingError(f"A rejected sample (bucket_id {bucket_id}) has no size.")
        t, h, w = bucket_id >> 22, bucket_id >> 11 & 2047, bucket_id & 2047
        step_height, step_width = self.spec.multiples
        frames = ((t + 1) * self.spec.patch[0] - 1) * self.spec.temporal_stride + 1
        return Size(frames, (h + 1) * step_height, (w + 1) * step_width)

    def num_tokens(self, bucket_ids: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of each bucket id, 0 for −1; shape as given.

        Raises:
            BucketingError: If `spec` is not the table's own.
        """
        if spec != self.spec:
            raise BucketingError(f"The open table was made for {self.spec}, not for {spec}.")
        ids = np.asarray(bucket_ids, np.int64)
        tokens = ((ids >> 22) + 1) * ((ids >> 11 & 2047) + 1) * ((ids & 2047) + 1)
        return np.where(ids < 0, 0, tokens)

    def assign(self, frames: npt.ArrayLike, heights: npt.ArrayLike, widths: npt.ArrayLike) -> Assignment:
        """Give each sample the id of its own rounded size; arguments as in [`BucketTable.assign`].

        Raises:
            BucketingError: If the arrays differ in length, or a sample is larger than 512 × 2048 × 2048 tokens.
        """
        count, height, width = as_columns(frames, heights, widths)
        rejection = unusable(count, height, width)
        usable = rejection == Rejection.NONE
        whole = self.spec.snap_arrays(*(np.where(usable, column, 1) for column in (count, height, width)))
        t = ((whole[0] - 1) // self.spec.temporal_stride + 1) // self.spec.patch[0] - 1
        h, w = (side // step - 1 for side, step in zip(whole[1:], self.spec.multiples, strict=True))
        if len(count) and (t.max() >= 512 or max(h.max(), w.max()) >= 2048):
            raise BucketingError("A sample is larger than 512 × 2048 × 2048 tokens; use a BucketTable to bound it.")
        error = np.abs(np.log(whole[2] / whole[1]) - np.log(np.maximum(width, 1) / np.maximum(height, 1)))
        return Assignment(
            bucket_id=np.where(usable, t << 22 | h << 11 | w, -1).astype(np.int32),
            rejection=rejection,
            aspect_error=np.where(usable, error, np.nan).astype(np.float32),
        )

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with the strides or the patch."""
        return hashlib.sha256(f"open {self.spec}".encode()).hexdigest()[:16]


def open_table(spec: LatentSpec) -> OpenTable:
    """Return the table in which each sample keeps its own size: for packing, or one bucket per rounded size.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> table = open_table(spec)
        >>> table.size(int(table.assign([50], [470], [830]).bucket_id[0]))
        Size(frames=49, height=480, width=832)
    """
    return OpenTable(spec=spec)
