"""Losses of packs: per-sample values over each sample's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import BucketingError

if TYPE_CHECKING:
    from .layout import PackedLayout


def packed_mse(prediction: torch.Tensor, target: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return the mean squared error of each sample of a pack, over its own tokens.

    Args:
        prediction (`torch.Tensor` of shape `(rows, channels, p_t, p_h, strip_length·p_w)`): Half precision is
            computed in float32.
        target (`torch.Tensor`): As `prediction`.
        layout ([`PackedLayout`][hf_bucketing.packing.PackedLayout]): Of the pack.

    Returns:
        `torch.Tensor` of shape `(n,)`.

    Raises:
        BucketingError: If the shapes differ or are not the layout's.
    """
    prediction, target = real_tokens(prediction, target, layout=layout)
    return mean_per_sample((prediction - target).square(), layout)


def real_tokens(*strips: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    """Return strips of one shape as at least float32, zero where a strip holds padding.

    Raises:
        BucketingError: If the shapes differ or are not the layout's.
    """
    rows, width = layout.num_rows, layout.strip_length
    first = strips[0]
    if any(one.shape != first.shape for one in strips) or first.shape[0] != rows or first.shape[-1] % width:
        raise BucketingError(
            f"Expected tensors of one shape ({rows}, channels, p_t, p_h, {width}·p_w), got "
            f"{[tuple(one.shape) for one in strips]}."
        )
    dtype = torch.promote_types(first.dtype, torch.float32)
    real = (layout.segment_ids >= 0).view(rows, 1, 1, 1, width).repeat_interleave(first.shape[-1] // width, -1)
    return tuple(torch.where(real, one.to(dtype), 0) for one in strips)


def mean_per_sample(values: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """Return each sample's mean of `(rows, channels, p_t, p_h, strip_length·p_w)` over its own tokens, `(n,)`."""
    tokens = values.unflatten(4, (layout.strip_length, -1)).mean((1, 2, 3, 5)).flatten()
    return torch.stack([tokens[start:stop].mean() for start, stop in layout.spans])
