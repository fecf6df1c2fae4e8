"""Sizes in which files of a condition are shown that need not have those of their sample."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..errors import BucketingError, explains_arguments

Rule = TypeVar("Rule", bound="SizeRule")

_LONGEST_SIDE = 4096
"""Longest side in pixels of a file that is kept whole."""


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """Choose the size in which each reference of a sample is shown.

    Args:
        max_pixels (`int`, *optional*): Largest area of a reference, height × width; larger ones are made smaller. By
            default the area of their sample.
        downscale_factor (`int`, *optional*): How many times larger the sample is than its references. They then lie
            over the sample: each has its crop, flip and times, at a fraction of its height and width. By default a
            reference keeps its own shape, and is neither cropped nor flipped nor made larger.
        short_side (`int`, *optional*): Shorter side of every reference in pixels, to which it is made smaller or
            larger in its own shape, at the nearest multiples.
        area (`int`, *optional*): Area of every reference in pixels, to which it is likewise made smaller or larger.
        shapes (`tuple[tuple[int, int], ...]`): Heights and widths in pixels; each reference is resized to the one
            whose ratio is nearest to its own. No more than one of these five may be given.
        cropped (`bool`): Whether a reference whose height or width is no multiple is cropped to one around its
            centre, instead of being resized to it.
        alone_pixels (`int`, *optional*): Largest area of a reference that is the only one of its sample: it is kept
            as a whole, and surrounded by its reflection up to the next multiples. By default it is as any other.
        as_stored (`bool`): Whether references keep the size of their file, and the model's recipe fits them into the
            sample.
        resample (`"bicubic"`, `"bilinear"` or `"lanczos"`): Filter with which references are resized: by default that
            of samples, else Pillow's, as in diffusers' pipelines.
        multiples (`tuple[int, int]`): Numbers of which height and width become multiples, see
            [`LatentSpec`][hf_bucketing.LatentSpec].
        min_side (`int`): Least height and width of a stored reference that the model takes, in pixels.

    Raises:
        BucketingError: If a number is below 1, or more than one of areas, factor and shorter side is given.
    """

    max_pixels: int | None = None
    downscale_factor: int | None = None
    short_side: int | None = None
    multiples: tuple[int, int] = (1, 1)
    area: int | None = None
    shapes: tuple[tuple[int, int], ...] = ()
    cropped: bool = False
    alone_pixels: int | None = None
    as_stored: bool = False
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    min_side: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "multiples", tuple(int(side) for side in self.multiples))
        object.__setattr__(self, "shapes", tuple((int(height), int(width)) for height, width in self.shapes))
        numbers = (self.max_pixels, self.downscale_factor, self.area, self.alone_pixels)
        if min(1 if number is None else number for number in numbers) < 1:
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
        chosen = (self.max_pixels, self.downscale_factor, self.short_side, self.area, self.shapes or None)
        if len(chosen) - chosen.count(None) > 1:
            raise BucketingError(
                "References have one of a largest area, a factor, a shorter side, an area and several shapes, got "
                f"{self}."
            )

    def within(self: Rule, max_pixels: int | None, downscale_factor: int | None = None) -> Rule:
        """Return this rule with the area, or the factor of references that lie over their sample, that a user gives.

        The area takes the place of the rule's own; where all references have one area, it is that.

        Example:
            >>> SizeRule(area=1024**2).within(512**2).area
            262144
        """
        if downscale_factor is not None:
            over = replace(self.unsized, resample=self.resample)
            return replace(over, max_pixels=max_pixels, downscale_factor=downscale_factor)
        if max_pixels is None:
            return self
        if self.area is not None:
            return replace(self, area=max_pixels)
        alone = None if self.alone_pixels is None else max_pixels
        return replace(self, max_pixels=max_pixels, shapes=(), alone_pixels=alone, as_stored=False)

    @property
    def unsized(self: Rule) -> Rule:
        """This rule without a model's way to make references the size in which they are shown."""
        kept = ("multiples", "min_side", "downscale_factor", "short_side")
        defaults: dict[str, Any] = {item.name: item.default for item in fields(SizeRule) if item.name not in kept}
        return replace(self, **defaults)

    @property
    def manner(self) -> str:
        """How references are made the size in which they are shown, in words; the area is left to the user."""
        kind = f"with a {self.resample} filter"
        if self.lie_over:
            return f"over their samples, {kind}"
        size = "of one area" if self.area is not None else "no larger than an area"
        size = size if self.short_side is None else f"with a shorter side of {self.short_side} pixels"
        fitted = "cropped" if self.cropped else "resized"
        alone = "" if self.alone_pixels is None else ", a single one surrounded by its reflection"
        return f"{size}, {fitted} to multiples{alone}, {kind}"

    @property
    def lie_over(self) -> bool:
        """Whether references lie over their sample, pixel by pixel."""
        return self.downscale_factor is not None

    def in_pixels(self: Rule, per_token: tuple[int, int]) -> Rule:
        """Return this rule, whose multiples are in tokens, for a model that has so many pixels per token.

        Example:
            >>> SizeRule(multiples=(2, 2)).in_pixels((16, 16)).multiples
            (32, 32)
        """
        return replace(self, multiples=tuple(np.multiply(self.multiples, per_token).tolist()))

    def sizes(self, stored: npt.ArrayLike, samples: npt.ArrayLike, *, alone: npt.ArrayLike | None = None) -> IntArray:
        """Return frames, height and width in which references are shown, `(k, 3)`.

        A picture has one frame, a video as many as its sample.

        Args:
            stored (array of `int`, shape `(k, 3)`): Frames, height and width of each reference as it is stored.
            samples (array of `int`, shape `(k, 3)`): Frames, height and width of the sample of each.
            alone (array of `bool`, shape `(k,)`, *optional*): Whether each is the only one of its sample; by default
                none is.

        Example:
            >>> SizeRule(multiples=(16, 16)).sizes([[1, 1080, 1920]], [[1, 512, 512]]).tolist()
            [[1, 384, 672]]
            >>> half = SizeRule(downscale_factor=2, multiples=(32, 32))
            >>> half.sizes([[90, 720, 1280]], [[49, 512, 704]]).tolist()
            [[49, 256, 352]]
            >>> SizeRule(short_side=2048, multiples=(32, 32)).sizes([[1, 1080, 1920]], [[49, 512, 704]]).tolist()
            [[1, 2048, 3648]]
            >>> SizeRule(area=1024**2, multiples=(32, 32)).sizes([[1, 200, 300]], [[1, 512, 512]]).tolist()
            [[1, 832, 1248]]
        """
        files, targets = (np.asarray(sizes, np.int64).reshape(-1, 3) for sizes in (stored, samples))
        sides = files[:, 1:]
        if not self.as_stored:
            sides = np.maximum(1, self._multiples(files, targets)).astype(np.int64) * self.multiples
        if self.alone_pixels is not None and alone is not None:
            padded = self._around(self._uncropped(files[:, 1:]))
            sides = np.where(np.broadcast_to(alone, len(files))[:, None], padded, sides)
        frames = np.where(files[:, 0] == 1, 1, targets[:, 0])
        return np.concatenate([frames[:, None], sides], 1)

    def resized(self, stored: npt.ArrayLike, sample: npt.ArrayLike, *, alone: bool = False) -> tuple[int, int]:
        """Return height and width to which a reference is resized before it is cropped or padded to [`sizes`].

        Args:
            stored (array of `int`, shape `(3,)`): Frames, height and width of the reference as it is stored.
            sample (array of `int`, shape `(3,)`): Those of its sample.
            alone (`bool`): Whether it is the only one of its sample.

        Example:
            >>> rule = SizeRule(multiples=(16, 16), cropped=True)
            >>> rule.resized((1, 200, 300), (1, 128, 128)), rule.sizes((1, 200, 300), (1, 128, 128)).tolist()
            ((104, 156), [[1, 96, 144]])
        """
        files, targets = (np.asarray(size, np.int64).reshape(-1, 3) for size in (stored, sample))
        if alone and self.alone_pixels is not None:
            height, width = self._uncropped(files[:, 1:])[0].tolist()
        elif self.cropped and not self.lie_over:
            height, width = self._limited(files[:, 1:], targets).astype(np.int64)[0].tolist()
        else:
            _, height, width = self.sizes(files, targets)[0].tolist()
        return height, width

    def _multiples(self, files: IntArray, targets: IntArray) -> npt.NDArray[np.float64]:
        """Return the multiples of height and width in which references are shown, `(k, 2)`."""
        sides = files[:, 1:]
        if self.downscale_factor is not None:
            return (targets[:, 1:] // self.downscale_factor // self.multiples).astype(np.float64)
        if self.short_side is not None:
            return np.rint(sides * (self.short_side / sides.min(1, initial=sys.maxsize))[:, None] / self.multiples)
        if self.area is not None:
            ratios = sides[:, 1] / sides[:, 0]
            widths = np.sqrt(self.area * ratios)
            return np.rint(np.stack([widths / ratios, widths], 1) / self.multiples)
        if self.shapes:
            shapes = np.array(sorted(self.shapes, key=lambda shape: shape[::-1]))  # the narrower one of equally near
            snapped = np.maximum(1, sides // self.multiples) * self.multiples
            distances = np.abs((snapped[:, 1] / snapped[:, 0])[:, None] - shapes[:, 1] / shapes[:, 0])
            return (shapes[distances.argmin(1)] // self.multiples).astype(np.float64)
        return self._limited(sides, targets) // self.multiples

    def _limited(self, sides: IntArray, targets: IntArray) -> npt.NDArray[np.float64]:
        """Return height and width of references that are no larger than their area, `(k, 2)`."""
        most = targets[:, 1:].prod(1) if self.max_pixels is None else self.max_pixels
        return sides * np.minimum(1.0, np.sqrt(most / sides.prod(1)))[:, None]

    def _uncropped(self, sides: IntArray) -> IntArray:
        """Return height and width of references that are kept whole, `(k, 2)`, whose surroundings fit their area.

        Like `Flux3ImageProcessor._resize_if_canvas_exceeds_area` (diffusers,
        `modular_pipelines/flux3/image_processor.py`).
        """
        assert self.alone_pixels is not None, "sizes and resized check it"
        scales = np.minimum(1.0, np.sqrt(self.alone_pixels / sides.prod(1)))
        scales = np.minimum(scales, _LONGEST_SIDE / sides.max(1, initial=1))
        while True:
            resized = np.maximum(1, np.rint(sides * scales[:, None])).astype(np.int64)
            least = (self._around(np.ones_like(resized)) == self._around(resized)).all(1)
            excess = (self._around(resized).prod(1) > self.alone_pixels) & ~least
            if not excess.any():
                return resized
            scales[excess] *= 0.995

    def _around(self, resized: IntArray) -> IntArray:
        """Return height and width of what surrounds references that are kept whole, `(k, 2)`."""
        return np.clip(-(-resized // self.multiples) * self.multiples, self.min_side, _LONGEST_SIDE)
