"""What a report is made from: the sizes of the samples, and the settings of the plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy.typing as npt

from ..buckets.assignment import AssignmentRule
from ..buckets.cost import CostModel
from ..errors import BucketingError


class SizeColumns(NamedTuple):
    """Sizes of all samples, as columns of one length.

    Args:
        frames (array of `int`, shape `(n,)`): At the frame rate of training; 1 for an image, negative if unreadable.
        heights (array of `int`, shape `(n,)`): In pixels.
        widths (array of `int`, shape `(n,)`): In pixels.
    """

    frames: npt.ArrayLike
    heights: npt.ArrayLike
    widths: npt.ArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Settings of the plans that a report makes.

    Args:
        batch_size (`int`): Samples per process and step, for bucketing and padding.
        num_processes (`int`): Processes that share the steps.
        capacity (`int`, *optional*): Tokens per process and step, for packing. Defaults to `batch_size` samples of
            median tokens, or the largest sample where that is more.
        strip_length (`int`): Tokens per strip of a pack; each sample takes whole strips.
        rule ([`AssignmentRule`][hf_bucketing.AssignmentRule]): How near a sample must come to its bucket.
        max_area (`int`, *optional*): Largest frame, in pixels, at which padding and packing take a sample; a larger
            one is shrunk to it. By default they take every sample at its own size.
        width (`int`): Width of the model, for the cost of tokens; the default is that of Wan 2.1 1.3B.
        seed (`int`): Of the plans, not negative.

    Raises:
        BucketingError: On a value out of range.
    """

    batch_size: int = 4
    num_processes: int = 8
    capacity: int | None = None
    strip_length: int = 64
    rule: AssignmentRule = field(default_factory=AssignmentRule)
    max_area: int | None = None
    width: int = 1536
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_processes", "capacity", "strip_length", "max_area", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BucketingError(f"`{name}` must be at least 1, got {value}.")
        if self.seed < 0:
            raise BucketingError(f"`seed` must not be negative, got {self.seed}.")

    @property
    def cost_model(self) -> CostModel:
        """Floating-point operations of one transformer block of this width."""
        return CostModel.for_transformer(self.width)
