"""The open table: no fixed buckets, each sample keeps its own size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .assignment import Assignment, AssignmentRule, IntArray, Rejection, as_columns, unusable
from .sizes import LatentSpec, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTable:
    """No fixed buckets: each sample keeps its own size, rounded up to whole tokens, frames cut to a valid number.

    A bucket id is the size's place in the grid of all sizes, so it means the same in every data set and needs no
    list: 9 bits of latent frames, 11 of rows, 11 of columns, in units of one patch. Make one with [`open_table`].
    With `image_sizes`, the rounded height and width of an image are assigned to one of those instead; with
    `max_frames`, longer samples are cut.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        image_sizes ([`ImageSizes`], *optional*): What images take instead of their own size.
        max_frames (`int`, *optional*): Frames that a sample keeps at most.

    Raises:
        BucketingError: If one of `image_sizes` does not divide into whole tokens, or `max_frames` is below 1.
    """

    spec: LatentSpec
    image_sizes: ImageSizes | None = None
    max_frames: int | None = None
    base: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.max_frames is not None and self.max_frames < 1:
            raise BucketingError(f"`max_frames` must be at least 1, got {self.max_frames}.")
        step_height, step_width = self.spec.multiples
        for height, width in self.image_sizes.sizes if self.image_sizes is not None else ():
            if height % step_height or width % step_width:
                raise BucketingError(
                    f"Images cannot take {height}×{width} pixels: sides must be multiples of {step_height} and "
                    f"{step_width}."
                )

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

    def cut(self, frames: npt.ArrayLike) -> IntArray:
        """Return how many frames of each sample are left; shape as given."""
        count = np.asarray(frames, np.int64)
        return count if self.max_frames is None else np.minimum(count, self.max_frames)

    def assign(self, frames: npt.ArrayLike, heights: npt.ArrayLike, widths: npt.ArrayLike) -> Assignment:
        """Give each sample the id of its own rounded size; arguments as in [`BucketTable.assign`].

        Images get the id of one of `image_sizes` where the table has them, or are rejected.

        Raises:
            BucketingError: If the arrays differ in length, or a sample is larger than 512 × 2048 × 2048 tokens.
        """
        count, height, width = as_columns(self.cut(frames), heights, widths)
        rejection = unusable(count, height, width)
        usable = rejection == Rejection.NONE
        whole = self.spec.snap_arrays(*(np.where(usable, column, 1) for column in (count, height, width)))
        t = ((whole[0] - 1) // self.spec.temporal_stride + 1) // self.spec.patch[0] - 1
        h, w = (side // step - 1 for side, step in zip(whole[1:], self.spec.multiples, strict=True))
        if len(count) and (t.max() >= 512 or max(h.max(), w.max()) >= 2048):
            raise BucketingError("A sample is larger than 512 × 2048 × 2048 tokens; use a BucketTable to bound it.")
        error = np.abs(np.log(whole[2] / whole[1]) - np.log(np.maximum(width, 1) / np.maximum(height, 1)))
        own = Assignment(
            bucket_id=np.where(usable, t << 22 | h << 11 | w, -1).astype(np.int32),
            rejection=rejection,
            aspect_error=np.where(usable, error, np.nan).astype(np.float32),
        )
        if self.image_sizes is not None:
            self._move_images(own, np.flatnonzero(usable & (count == 1)), whole[1:])
        return own

    def _move_images(self, own: Assignment, rows: IntArray, sides: Sequence[IntArray]) -> None:
        """Replace the assignment of the rows that are images."""
        assert self.image_sizes is not None
        taken = self.image_sizes.assign(sides[0][rows], sides[1][rows])
        h, w = (np.array(self.image_sizes.sizes) // self.spec.multiples - 1)[taken.bucket_id].T
        ids = own.bucket_id[rows] >> 22 << 22 | h << 11 | w
        own.bucket_id[rows] = np.where(taken.bucket_id < 0, -1, ids)
        own.rejection[rows] = taken.rejection
        own.aspect_error[rows] = taken.aspect_error

    def images_at_video_sizes(
        self,
        frames: npt.ArrayLike,
        heights: npt.ArrayLike,
        widths: npt.ArrayLike,
        *,
        rule: AssignmentRule | None = None,
    ) -> OpenTable:
        """Return the table in which images take the rounded heights and widths of a data set's videos.

        Args:
            frames (array of `int`, shape `(n,)`): Of the whole data set; rows of more than one frame are videos.
            heights (array of `int`, shape `(n,)`): In pixels.
            widths (array of `int`, shape `(n,)`): In pixels.
            rule ([`AssignmentRule`], *optional*): Metric and limits; by default log, ln 2, and no enlarging.

        Raises:
            BucketingError: If the arrays differ in length, a sample is larger than the table, or there is no video.

        Example:
            >>> table = open_table(LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)))
            >>> table = table.images_at_video_sizes([49, 1], [470, 1000], [830, 2000])
            >>> table.size(int(table.assign([1], [1000], [2000]).bucket_id[0]))
            Size(frames=1, height=480, width=832)
        """
        columns = as_columns(self.cut(frames), heights, widths)
        videos = [column[columns[0] > 1] for column in columns]
        ids = np.unique(OpenTable(spec=self.spec).assign(*videos).bucket_id)
        sizes = {self.size(bucket)[1:] for bucket in ids.tolist() if bucket >= 0}
        if not sizes:
            raise BucketingError("There is no readable video whose size images could take; let them keep their own.")
        return replace(self, image_sizes=ImageSizes(sizes=tuple(sizes), rule=rule or AssignmentRule()))

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with the strides, the patch, the sizes that images take, or `max_frames`."""
        options = "".join(f" {option}" for option in (self.image_sizes, self.max_frames) if option is not None)
        return hashlib.sha256(f"open {self.spec}{options}".encode()).hexdigest()[:16]


def open_table(spec: LatentSpec, *, max_frames: int | None = None) -> OpenTable:
    """Return the table in which each sample keeps its own size: for packing, or one bucket per rounded size.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        max_frames (`int`, *optional*): Frames that a sample keeps at most, such as those of a model's positions.

    Raises:
        BucketingError: If `max_frames` is below 1.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> table = open_table(spec)
        >>> table.size(int(table.assign([50], [470], [830]).bucket_id[0]))
        Size(frames=49, height=480, width=832)
    """
    return OpenTable(spec=spec, max_frames=max_frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """Heights and widths of a data set's videos, which its images are cover-resized and cropped to.

    An image takes, of the sizes that do not enlarge it beyond the rule's `max_upscale`, the one nearest in aspect
    ratio; of equally near ones the largest. Training images at the sizes of videos is Open-Sora-Plan's way of joint
    training. Make one with [`OpenTable.images_at_video_sizes`].

    Args:
        sizes (`tuple[tuple[int, int], ...]`): Different `(height, width)` in pixels, at least one; kept from the
            largest area to the smallest.
        rule ([`AssignmentRule`]): Metric and limits.

    Raises:
        BucketingError: If there is no size, one is named twice, or a side is below 1.
    """

    sizes: tuple[tuple[int, int], ...]
    rule: AssignmentRule

    def __post_init__(self) -> None:
        sizes = sorted({(int(h), int(w)) for h, w in self.sizes}, key=lambda size: (-size[0] * size[1], size))
        if not sizes or len(sizes) != len(self.sizes) or min(map(min, sizes)) < 1:
            raise BucketingError(f"Images need one or more different sizes of at least 1×1, got {self.sizes}.")
        object.__setattr__(self, "sizes", tuple(sizes))

    def assign(self, heights: IntArray, widths: IntArray) -> Assignment:
        """Return the position in `sizes` of each image's size, as `bucket_id`.

        An image is rejected as `ASPECT` if no size is near enough, as `TOO_SMALL` if all that are would enlarge it.

        Args:
            heights (array of `int`, shape `(n,)`): In pixels, at least 1.
            widths (array of `int`, shape `(n,)`): In pixels, at least 1.

        Returns:
            [`Assignment`]: Arrays of shape `(n,)`.
        """
        least = np.full(len(heights), np.inf, np.float32)
        position = np.full(len(heights), -1, np.int32)
        any_near = np.zeros(len(heights), np.bool_)
        shapes = self._shape(heights, widths)
        largest_heights, largest_widths = heights * self.rule.max_upscale, widths * self.rule.max_upscale
        for number, (height, width) in enumerate(self.sizes):
            error = np.abs(shapes - self._shape(np.array([height]), np.array([width])))
            error = np.round(error, 9).astype(np.float32)  # equal ratios of unequal sizes differ in the last bits
            near = self.rule.is_near(error)
            better = near & (height <= largest_heights) & (width <= largest_widths) & (error < least)
            least[better], position[better] = error[better], number
            any_near |= near
        rejection = np.where(any_near, Rejection.TOO_SMALL, Rejection.ASPECT)
        return Assignment(
            bucket_id=position,
            rejection=np.where(position >= 0, Rejection.NONE, rejection).astype(np.int8),
            aspect_error=np.where(position >= 0, least, np.float32(np.nan)),
        )

    def _shape(self, heights: IntArray, widths: IntArray) -> npt.NDArray[np.float64]:
        """Return what the metric measures; a difference of logarithms, which transposing only turns in sign."""
        if self.rule.metric == "log":
            return np.asarray(np.log(widths) - np.log(heights))
        return np.asarray(widths / heights)
