"""The backend `"varlen"`: a flash attention kernel for segments given as offsets, on CUDA devices."""

from __future__ import annotations

import torch

from ..segments import AttentionOptions, SegmentSpans
from .kernels import LOADED


def attend_by_offsets(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentSpans,
    options: AttentionOptions,
    *,
    kernel: str,
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention] by a kernel that was imported.

    Padding is not removed by a copy: flash attention writes zeros for segments without keys, and zero gradients for
    keys without queries.
    """
    offsets = segments.varlen(query.device)
    if offsets.key_index is not None:
        key, value = (side.index_select(0, offsets.key_index) for side in (key, value))
    return LOADED[kernel]((query, key, value), offsets, options)
