"""Where text tokens lie that ride in the strips of their own sample, for models whose attention is joint.

Each strip carries `text_slots` text tokens beside its `strip_length` tokens, so that whatever a model does per batch
row (modulation by timestep and pooled text) is right for both. Attention wants each sample's tokens and text tokens
side by side: they are gathered out of the strips before it and put back after it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import PackingError
from .segments import SegmentSpans

if TYPE_CHECKING:
    from .layout import PackedLayout


@dataclass(frozen=True, kw_only=True)
class JointLayout:
    """Each sample's tokens and its text tokens as one sequence; `layout.joint` of a [`PackedLayout`].

    Attributes:
        text_slots (`int`): Text tokens that each strip carries.
        strip_length (`int`): Tokens that each strip carries.
        rows (`int`): Strips of the pack.
        order (`torch.Tensor` of shape `(places,)`): For each token of the sequence its place among the tokens of all
            strips, `rows·strip_length`, followed by their text slots, `rows·text_slots`. Padding comes last.
        inverse (`torch.Tensor` of shape `(places,)`): For each place its token of the sequence.
        segments ([`SegmentSpans`]): Each sample's part of the sequence attends to itself.
        text_source (`torch.Tensor` of shape `(num_text_tokens,)`, *optional*): Place of each sample's text tokens
            among the stored ones; none where they lie in order.
        text_target (`torch.Tensor` of shape `(num_text_tokens,)`): The text slots of each sample's text tokens.
        first_rows (`torch.Tensor` of shape `(n,)`): The first strip of each sample.
    """

    text_slots: int
    strip_length: int
    rows: int
    order: torch.Tensor
    inverse: torch.Tensor
    segments: SegmentSpans
    text_source: torch.Tensor | None
    text_target: torch.Tensor
    first_rows: torch.Tensor

    def gather(self, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the sequence `(places, …)` of what lies in strips.

        Args:
            tokens (`torch.Tensor` of shape `(rows, strip_length, …)`): Of the strips.
            text (`torch.Tensor` of shape `(rows, text_slots, …)`): Their text slots.
        """
        return torch.cat([tokens.flatten(0, 1), text.flatten(0, 1)]).index_select(0, self.order)

    def scatter(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a sequence back into strips: the inverse of [`gather`]."""
        places = sequence.index_select(0, self.inverse)
        tokens, text = places.split([self.rows * self.strip_length, self.rows * self.text_slots])
        return tokens.unflatten(0, (self.rows, -1)), text.unflatten(0, (self.rows, -1))

    def text_rows(self, text: torch.Tensor) -> torch.Tensor:
        """Put a pack's stored texts into the strips of the samples that read them: `(rows, text_slots, …)`."""
        return self.deal(text if self.text_source is None else text.index_select(0, self.text_source))

    def deal(self, texts: torch.Tensor) -> torch.Tensor:
        """Put the samples' text tokens, one sample after the other, into strips; zeros as padding."""
        slots = texts.new_zeros(self.rows * self.text_slots, *texts.shape[1:])
        return slots.index_copy(0, self.text_target, texts).unflatten(0, (self.rows, -1))

    def collect(self, text: torch.Tensor) -> torch.Tensor:
        """Take the samples' text tokens out of strips `(rows, text_slots, …)` again: the inverse of [`deal`]."""
        return text.flatten(0, 1).index_select(0, self.text_target)


def joint_layout(layout: PackedLayout) -> JointLayout:
    """Return where the tokens of joint attention lie in a pack.

    Raises:
        PackingError: If the layout's strips carry no text.
    """
    if not layout.text_slots:
        raise PackingError("The strips of this layout carry no text; make one with text_slots of at least 1.")
    rows, width = layout.num_rows, layout.text_slots
    first_rows = [0, *itertools.accumulate(layout.rows)][:-1]
    targets = [row * width + np.arange(length) for row, length in zip(first_rows, layout.text_lengths, strict=True)]
    pieces = [
        np.concatenate([np.arange(*span), layout.num_tokens + slots])
        for span, slots in zip(layout.spans, targets, strict=True)
    ]
    stops = list(itertools.accumulate(map(len, pieces)))
    spans = tuple(zip([0, *stops[:-1]], stops, strict=True))
    places, real = rows * (layout.strip_length + width), np.concatenate(pieces)
    order = np.concatenate([real, np.setdiff1d(np.arange(places), real)])

    def on_device(index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(index).to(layout.device)

    return JointLayout(
        text_slots=width,
        strip_length=layout.strip_length,
        rows=rows,
        order=on_device(order),
        inverse=on_device(np.argsort(order)),
        segments=SegmentSpans(queries=spans, keys=spans, num_queries=places, num_keys=places),
        text_source=layout.text_index,
        text_target=on_device(np.concatenate(targets)),
        first_rows=on_device(np.array(first_rows)),
    )


def fewest_places(layout: PackedLayout) -> int:
    """Return the text slots per strip with which a pack takes fewest places, tokens and text slots together.

    One slot per strip suits a long video; a small image with a long text needs many slots, or more strips than its
    tokens fill. The number is the same in all strips of a pack, so it is a compromise over its samples.

    Example:
        One token with a text of 12 beside a sample of 40 tokens with the same text, in strips of four. With two
        slots the first takes six strips and the second ten, `16·6 = 96` places; with twelve slots they would take one
        and ten, `11·16 = 176`:

        >>> from hf_bucketing.packing import PackedLayout
        >>> fewest_places(PackedLayout(grids=((1, 1, 1), (1, 5, 8)), text_lengths=(12, 12), strip_length=4))
        2
    """
    strips = -(-np.array(layout.lengths) // layout.strip_length)
    slots = np.arange(1, max(1, *layout.text_lengths) + 1)
    rows = np.maximum(strips, -(-np.array(layout.text_lengths) // slots[:, None])).sum(1)
    return int(slots[np.argmin(rows * (layout.strip_length + slots))])
