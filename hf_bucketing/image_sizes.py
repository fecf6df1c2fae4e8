"""Heights and widths that images take instead of their own, in packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .assignment import Assignment, AssignmentRule, IntArray, Rejection
from .errors import BucketingError


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
