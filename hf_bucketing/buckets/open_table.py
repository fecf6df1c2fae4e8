"""The open table: each sample keeps its own size, and images may take the sizes of videos."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError
from .arrays import FloatArray, IntArray, column_values
from .assignment import (
    REJECTED_BUCKET,
    Assignment,
    AssignmentRule,
    Rejection,
    as_columns,
    has_bucket,
    unusable,
)
from .sizes import IntOrArray, LatentSpec, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """Heights and widths of a data set's videos, to which its images are cover-resized and cropped.

    Among the sizes that do not enlarge it beyond the rule's `max_upscale`, an image takes the one nearest in aspect
    ratio; among equally near ones, the largest. Open-Sora-Plan trains images and videos jointly in this way. Make one
    with [`OpenTable.images_at_video_sizes`].

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
        """Assign each image to one of `sizes`; its position is the `bucket_id`.

        An image is rejected as `ASPECT` if no size has a similar ratio, as `TOO_SMALL` if all those would enlarge it.

        Args:
            heights (array of `int`, shape `(n,)`): Heights in pixels, at least 1.
            widths (array of `int`, shape `(n,)`): Widths in pixels, at least 1.

        Returns:
            [`Assignment`]: Arrays of shape `(n,)`.
        """
        least = np.full(len(heights), np.inf, np.float32)
        position = np.full(len(heights), REJECTED_BUCKET, np.int32)
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
        taken = has_bucket(position)
        rejection = np.where(any_near, Rejection.TOO_SMALL, Rejection.ASPECT)
        return Assignment(
            bucket_id=position,
            rejection=np.where(taken, Rejection.NONE, rejection).astype(np.int8),
            aspect_error=np.where(taken, least, np.float32(np.nan)),
        )

    def _shape(self, heights: IntArray, widths: IntArray) -> FloatArray:
        """Return the coordinate in which the metric measures distances.

        For `"log"` a difference of logarithms, whose sign alone changes when height and width are exchanged.
        """
        if self.rule.metric == "log":
            return np.asarray(np.log(widths) - np.log(heights))
        return np.asarray(widths / heights)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTable:
    """A table without fixed buckets: each sample keeps its own size, rounded up to whole tokens, frames rounded down.

    A bucket id encodes the token grid of the size, so it means the same in every data set and needs no list: 9 bits of
    token frames, 11 of rows, 11 of columns, each less one. Make one with [`open_table`].
    With `image_sizes`, the rounded height and width of an image are assigned to one of those instead; with
    `max_frames`, longer samples are cut.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        image_sizes ([`ImageSizes`], *optional*): Sizes that images take instead of their own.
        max_frames (`int`, *optional*): Most frames that a sample keeps.

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
        """Return the size of a bucket id.

        Raises:
            BucketingError: If the id is negative.
        """
        if bucket_id <= REJECTED_BUCKET:
            raise BucketingError(f"A rejected sample (bucket_id {bucket_id}) has no size.")
        return self.spec.size_of(*_grid_of_id(bucket_id))

    def num_tokens(self, bucket_ids: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens of each bucket id, 0 for rejected samples; shape as given.

        Raises:
            BucketingError: If `spec` is not the table's own.
        """
        if spec != self.spec:
            raise BucketingError(f"The open table was made for {self.spec}, not for {spec}.")
        ids = column_values(bucket_ids, np.int64)
        t, h, w = _grid_of_id(ids)
        return np.where(has_bucket(ids), t * h * w, 0)

    def cut(self, frames: npt.ArrayLike) -> IntArray:
        """Return the frames that each sample keeps; shape as given."""
        count = column_values(frames, np.int64)
        return count if self.max_frames is None else np.minimum(count, self.max_frames)

    def assign(self, frames: npt.ArrayLike, heights: npt.ArrayLike, widths: npt.ArrayLike) -> Assignment:
        """Assign each sample to its own rounded size; arguments as in [`BucketTable.assign`].

        If the table has `image_sizes`, an image is assigned to one of them or rejected. A sample of more than
        512 × 2048 × 2048 tokens is rejected.

        Raises:
            BucketingError: If the arrays differ in length.
        """
        count, height, width = as_columns(self.cut(frames), heights, widths)
        rejection = unusable(count, height, width)
        usable = rejection == Rejection.NONE
        snapped = self.spec.snap_arrays(*(np.where(usable, column, 1) for column in (count, height, width)))
        t, h, w = self.spec.grid_of(*snapped)
        rejection[usable & ((t > 512) | (np.maximum(h, w) > 2048))] = Rejection.TOO_LARGE
        usable = rejection == Rejection.NONE
        error = np.abs(np.log(snapped[2] / snapped[1]) - np.log(np.maximum(width, 1) / np.maximum(height, 1)))
        assignment = Assignment(
            bucket_id=np.where(usable, _id_of_grid(t, h, w), REJECTED_BUCKET).astype(np.int32),
            rejection=rejection,
            aspect_error=np.where(usable, error, np.nan).astype(np.float32),
        )
        if self.image_sizes is not None:
            self._move_images(assignment, np.flatnonzero(usable & (count == 1)), snapped[1:])
        return assignment

    def _move_images(self, assignment: Assignment, rows: IntArray, sides: Sequence[IntArray]) -> None:
        """Replace the assignment of the rows that are images."""
        assert self.image_sizes is not None
        taken = self.image_sizes.assign(sides[0][rows], sides[1][rows])
        height, width = np.array(self.image_sizes.sizes)[taken.bucket_id].T
        ids = _id_of_grid(*self.spec.grid_of(np.ones_like(height), height, width))
        assignment.bucket_id[rows] = np.where(has_bucket(taken.bucket_id), ids, REJECTED_BUCKET)
        assignment.rejection[rows] = taken.rejection
        assignment.aspect_error[rows] = taken.aspect_error

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
            frames (array of `int`, shape `(n,)`): Frames of all rows of the data set; videos have more than one.
            heights (array of `int`, shape `(n,)`): Heights in pixels.
            widths (array of `int`, shape `(n,)`): Widths in pixels.
            rule ([`AssignmentRule`], *optional*): Metric and limits; by default log, ln 2, and no enlargement.

        Raises:
            BucketingError: If the arrays differ in length, or there is no video.

        Example:
            >>> table = open_table(LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)))
            >>> table = table.images_at_video_sizes([49, 1], [470, 1000], [830, 2000])
            >>> table.size(int(table.assign([1], [1000], [2000]).bucket_id[0]))
            Size(frames=1, height=480, width=832)
        """
        columns = as_columns(self.cut(frames), heights, widths)
        videos = [column[columns[0] > 1] for column in columns]
        ids = np.unique(OpenTable(spec=self.spec).assign(*videos).bucket_id)
        sizes = {self.size(bucket)[1:] for bucket in ids[has_bucket(ids)].tolist()}
        if not sizes:
            raise BucketingError("There is no readable video whose size images could take; let them keep their own.")
        return replace(self, image_sizes=ImageSizes(sizes=tuple(sizes), rule=rule or AssignmentRule()))

    @property
    def ids_mark(self) -> str:
        """Text that marks a `bucket_id` column as this table's; it depends on all that gives an id its meaning."""
        return f"ids of open table {hashlib.sha256(str(self.spec).encode()).hexdigest()[:16]}"

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that depend on the strides, the patch, `image_sizes` and `max_frames`."""
        options = "".join(f" {option}" for option in (self.image_sizes, self.max_frames) if option is not None)
        return hashlib.sha256(f"open {self.spec}{options}".encode()).hexdigest()[:16]


def _id_of_grid(t: IntArray, h: IntArray, w: IntArray) -> IntArray:
    return t - 1 << 22 | h - 1 << 11 | w - 1


def _grid_of_id(bucket_id: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
    return (bucket_id >> 22) + 1, (bucket_id >> 11 & 2047) + 1, (bucket_id & 2047) + 1


def open_table(spec: LatentSpec, *, max_frames: int | None = None) -> OpenTable:
    """Return the table in which each sample keeps its own size, for packing or one bucket per rounded size.

    Args:
        spec ([`LatentSpec`]): Strides and patch of the model.
        max_frames (`int`, *optional*): Most frames that a sample keeps, such as those that a model has positions for.

    Raises:
        BucketingError: If `max_frames` is below 1.

    Example:
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> table = open_table(spec)
        >>> table.size(int(table.assign([50], [470], [830]).bucket_id[0]))
        Size(frames=49, height=480, width=832)
    """
    return OpenTable(spec=spec, max_frames=max_frames)
