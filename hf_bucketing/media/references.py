"""References: pictures and videos of sizes of their own that a model is shown as further tokens of a sample."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..errors import BucketingError, explains_arguments

REFERENCE_SIZES = "reference_sizes"
"""Column of the sizes of each row's references as they are stored: frames, height and width of one after another."""


class Appended(NamedTuple):
    """Frames that a run appends to samples; see `appended` of [`ReferenceRule`] and what follows there."""

    most: int = 0
    first: bool = False
    text: int | None = None


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRule:
    """Say how many references a sample may have, and choose the size in which each is shown.

    Args:
        max_pixels (`int`, *optional*): Largest area of a reference, height × width; larger ones are made smaller. By
            default the area of their sample.
        downscale_factor (`int`, *optional*): How many times larger the sample is than its references. They then lie
            over the sample: each has its crop, flip and times, at a fraction of its height and width. By default a
            reference keeps its own shape, and is neither cropped nor flipped nor made larger.
        short_side (`int`, *optional*): Shorter side of every reference in pixels, to which it is made smaller or
            larger in its own shape, at the nearest multiples; neither of the two before may then be given.
        multiples (`tuple[int, int]`): Numbers of which height and width become multiples, see
            [`LatentSpec`][hf_bucketing.LatentSpec].
        least (`int`): Fewest references of a sample with which the model can be trained.
        most (`int`): Most references of a sample that the model takes; by default any number.
        in_front (`bool`): Whether the model takes references as latent frames in front of their sample, where each
            has the tokens of a frame of the sample, whatever its own size.
        text_tokens (`int`): Tokens that each reference adds to the text of its sample, for models whose text encoder
            sees it; they are counted with its own.
        text_factor (`int`): How many further ones it adds to that text for each token that it has itself.
        min_side (`int`): Least height and width of a stored reference that the model takes, in pixels.
        max_ratio (`float`, *optional*): Largest ratio of its longer to its shorter side; by default any.
        pictures_only (`bool`): Whether the model takes pictures alone, no videos.
        appended (`int`): Most frames of a sample that a run appends behind its references, each of the sample's height
            and width; at most one less than it has latent frames.
        appended_first (`bool`): Whether its first frame may be one of them, so that there may be one more.
        appended_text (`int`, *optional*): Where the text encoder sees these frames, tokens that each adds to the text
            beside as many as it has itself.

    Raises:
        BucketingError: If a number is below 1, or more than one of area, factor and shorter side is given.
    """

    max_pixels: int | None = None
    downscale_factor: int | None = None
    short_side: int | None = None
    multiples: tuple[int, int] = (1, 1)
    least: int = 0
    most: int = sys.maxsize
    in_front: bool = False
    text_tokens: int = 0
    text_factor: int = 0
    min_side: int = 1
    max_ratio: float | None = None
    pictures_only: bool = False
    appended: int = 0
    appended_first: bool = False
    appended_text: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiples", tuple(int(side) for side in self.multiples))
        if min(1 if number is None else number for number in (self.max_pixels, self.downscale_factor)) < 1:
            raise BucketingError(f"The largest area and the factor of references must be at least 1, got {self}.")
        if None not in (self.max_pixels, self.downscale_factor):
            raise BucketingError(
                "References have a largest area or lie over their sample (downscale_factor), not both."
            )
        if self.short_side is not None and (self.max_pixels, self.downscale_factor) != (None, None):
            raise BucketingError(
                f"Omit `reference_pixels` and `reference_downscale_factor`: the model is shown references with a "
                f"shorter side of {self.short_side} pixels."
            )

    def appending(self, frames: Appended) -> ReferenceRule:
        """Return this rule for a run that appends these frames."""
        return replace(self, appended=frames.most, appended_first=frames.first, appended_text=frames.text)

    @property
    def lie_over(self) -> bool:
        """Whether references lie over their sample, pixel by pixel."""
        return self.downscale_factor is not None

    def in_pixels(self, per_token: tuple[int, int]) -> ReferenceRule:
        """Return this rule, whose multiples are in tokens, for a model that has so many pixels per token.

        Example:
            >>> ReferenceRule(multiples=(2, 2)).in_pixels((16, 16)).multiples
            (32, 32)
        """
        return replace(self, multiples=tuple(np.multiply(self.multiples, per_token).tolist()))

    @property
    def counted(self) -> ReferenceRule:
        """Rule of the sizes by which tokens are counted: those that are shown, or in front of a sample its own."""
        return replace(self, max_pixels=None, downscale_factor=1) if self.in_front else self

    def fault(self, count: int) -> str:
        """Return why a sample with as many references cannot be trained, `""` if it can.

        Example:
            >>> ReferenceRule(most=1).fault(2)
            'It has 2 references, but the model takes at most 1'
        """
        if self.least <= count <= self.most:
            return ""
        takes = f"at most {self.most}" if self.most else "none"
        wanted = f"takes {takes}" if count > self.most else f"needs {self.least}"
        return f"It has {count or 'no'} reference{'' if count == 1 else 's'}, but the model {wanted}"

    def shape_fault(self, height: int, width: int) -> str:
        """Return why the model takes no reference of a size in pixels, `""` if it does.

        Example:
            >>> ReferenceRule(min_side=64).shape_fault(40, 80)
            '80×40 pixels; the model takes references of at least 64 a side'
        """
        shorter, longer = sorted((height, width))
        if shorter < self.min_side:
            return f"{width}×{height} pixels; the model takes references of at least {self.min_side} a side"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return f"{width}×{height} pixels; the model takes references up to {self.max_ratio:g} to 1"
        return ""

    def sizes(self, stored: npt.ArrayLike, samples: npt.ArrayLike) -> IntArray:
        """Return frames, height and width in which references are shown, `(k, 3)`.

        A picture has one frame, a video as many as its sample.

        Args:
            stored (array of `int`, shape `(k, 3)`): Frames, height and width of each reference as it is stored.
            samples (array of `int`, shape `(k, 3)`): Frames, height and width of the sample of each.

        Example:
            >>> ReferenceRule(multiples=(16, 16)).sizes([[1, 1080, 1920]], [[1, 512, 512]]).tolist()
            [[1, 384, 672]]
            >>> half = ReferenceRule(downscale_factor=2, multiples=(32, 32))
            >>> half.sizes([[90, 720, 1280]], [[49, 512, 704]]).tolist()
            [[49, 256, 352]]
            >>> ReferenceRule(short_side=2048, multiples=(32, 32)).sizes([[1, 1080, 1920]], [[49, 512, 704]]).tolist()
            [[1, 2048, 3648]]
        """
        own, targets = (np.asarray(sizes, np.int64).reshape(-1, 3) for sizes in (stored, samples))
        sides, areas = own[:, 1:], targets[:, 1:].prod(1)
        if self.short_side is not None:
            shown = np.rint(sides * (self.short_side / sides.min(1, initial=sys.maxsize))[:, None] / self.multiples)
            return self._whole(own, targets, shown)
        if self.downscale_factor is None:
            most = areas if self.max_pixels is None else self.max_pixels
            scaled = sides * np.minimum(1.0, np.sqrt(most / sides.prod(1)))[:, None]
        else:
            scaled = targets[:, 1:] // self.downscale_factor
        return self._whole(own, targets, scaled // self.multiples)

    def _whole(self, own: IntArray, targets: IntArray, counts: npt.NDArray[np.float64]) -> IntArray:
        """Return sizes of that many multiples, at least one, with the frames of pictures or of their samples."""
        whole = np.maximum(1, counts).astype(np.int64) * self.multiples
        frames = np.where(own[:, 0] == 1, 1, targets[:, 0])
        return np.concatenate([frames[:, None], whole], 1)
