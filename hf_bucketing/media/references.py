"""References: pictures and videos of sizes of their own that a model is shown as further tokens of a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..errors import BucketingError, explains_arguments

REFERENCE_SIZES = "reference_sizes"
"""Column of the sizes of each row's references as they are stored: frames, height and width of one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLimits:
    """Shapes of the references that the pipeline of a model takes.

    Args:
        min_reference_side (`int`): Least pixels of height and width.
        max_reference_ratio (`float`, *optional*): Largest ratio of the longer to the shorter side (default: any).
    """

    min_reference_side: int = 1
    max_reference_ratio: float | None = None

    def fault(self, height: int, width: int) -> str:
        """Return what is wrong with a reference of this size in pixels, or ""."""
        shorter, longer = sorted((height, width))
        if shorter < self.min_reference_side:
            return f"{width}×{height} pixels; the model takes references of at least {self.min_reference_side} a side"
        if self.max_reference_ratio is not None and longer > self.max_reference_ratio * shorter:
            return f"{width}×{height} pixels; the model takes references up to {self.max_reference_ratio:g} to 1"
        return ""


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRule:
    """Choose the size in which a reference is shown.

    Args:
        max_pixels (`int`, *optional*): Largest area of a reference, height × width; larger ones are made smaller. By
            default the area of their sample.
        downscale_factor (`int`, *optional*): How many times larger the sample is than its references. They then lie
            over the sample: each has its crop, flip and times, at a fraction of its height and width. By default a
            reference keeps its own shape, and is neither cropped nor flipped nor made larger.
        multiples (`tuple[int, int]`): Numbers of which height and width become multiples, see
            [`LatentSpec`][hf_bucketing.LatentSpec].

    Raises:
        BucketingError: If a number is below 1, or both a largest area and a factor are given.
    """

    max_pixels: int | None = None
    downscale_factor: int | None = None
    multiples: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiples", tuple(int(side) for side in self.multiples))
        if min(1 if number is None else number for number in (self.max_pixels, self.downscale_factor)) < 1:
            raise BucketingError(f"The largest area and the factor of references must be at least 1, got {self}.")
        if None not in (self.max_pixels, self.downscale_factor):
            raise BucketingError(
                "References have a largest area or lie over their sample (downscale_factor), not both."
            )

    @property
    def text_tokens(self) -> int:
        """Tokens that each reference adds to the text of its sample, see [`CountingRule`]."""
        return 0

    @property
    def lie_over(self) -> bool:
        """Whether references lie over their sample, pixel by pixel."""
        return self.downscale_factor is not None

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
        """
        own, targets = (np.asarray(sizes, np.int64).reshape(-1, 3) for sizes in (stored, samples))
        sides, areas = own[:, 1:], targets[:, 1:].prod(1)
        if self.downscale_factor is None:
            most = areas if self.max_pixels is None else self.max_pixels
            scaled = sides * np.minimum(1.0, np.sqrt(most / sides.prod(1)))[:, None]
        else:
            scaled = targets[:, 1:] // self.downscale_factor
        whole = np.maximum(1, scaled // self.multiples).astype(np.int64) * self.multiples
        frames = np.where(own[:, 0] == 1, 1, targets[:, 0])
        return np.concatenate([frames[:, None], whole], 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingRule(ReferenceRule):
    """Rule of references that the text encoder of a model sees too, for counting their tokens.

    Args:
        text_tokens (`int`): Tokens that each reference adds to the text of its sample, counted with its own.
    """

    text_tokens: int = 0
