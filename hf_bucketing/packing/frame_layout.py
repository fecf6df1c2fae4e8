"""Which tokens attend to which in models whose blocks attend inside a frame and over the frames in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .segments import SegmentSpans

if TYPE_CHECKING:
    from .layout import PackedLayout


@dataclass(frozen=True, kw_only=True)
class FrameLayout:
    """The frames of a pack, and the places in them; `layout.by_frame` of a [`PackedLayout`].

    Attributes:
        frames ([`SegmentSpans`]): The tokens of each frame attend to each other.
        places ([`SegmentSpans`]): The tokens of one row and column attend to each other over the frames of a sample,
            laid out by `order`.
        order (`torch.Tensor` of shape `(num_tokens,)`): The tokens of the pack with each sample's frames innermost.
        inverse (`torch.Tensor` of shape `(num_tokens,)`): What puts them back.
    """

    frames: SegmentSpans
    places: SegmentSpans
    order: torch.Tensor
    inverse: torch.Tensor


def frame_layout(layout: PackedLayout) -> FrameLayout:
    """Return the frames of a pack of which no token was dropped.

    Example:
        Two frames of three tokens:

        >>> from hf_bucketing.packing import PackedLayout
        >>> by_frame = frame_layout(PackedLayout(grids=((2, 1, 3),), text_lengths=(1,), strip_length=6))
        >>> by_frame.frames.queries, by_frame.places.queries
        (((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6)))
        >>> by_frame.order.tolist()
        [0, 3, 1, 4, 2, 5]
    """
    order = torch.arange(layout.num_tokens)
    for (start, stop), (t, h, w) in zip(layout.spans, layout.grids, strict=True):
        order[start:stop] = order[start:stop].view(t, h * w).t().flatten()
    return FrameLayout(
        frames=_segments(layout, [h * w for _, h, w in layout.grids]),
        places=_segments(layout, [t for t, _, _ in layout.grids]),
        order=order.to(layout.device),
        inverse=order.argsort().to(layout.device),
    )


def _segments(layout: PackedLayout, lengths: Sequence[int]) -> SegmentSpans:
    """Cut the tokens of each sample into segments of its length."""
    spans = tuple(
        (first, first + length)
        for (start, stop), length in zip(layout.spans, lengths, strict=True)
        for first in range(start, stop, length)
    )
    return SegmentSpans(queries=spans, keys=spans, num_queries=layout.num_tokens, num_keys=layout.num_tokens)
