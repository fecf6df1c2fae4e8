"""The backend `"dense"`: one call of `scaled_dot_product_attention` with a mask of all queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...errors import PackingError
from ...units import format_bytes
from ..segments import AttentionOptions, SegmentSpans

MASK_LIMIT = 2 * 2**30
"""Largest mask in bytes; a pair of a query and a key takes one byte."""


def attend_densely(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention].

    Raises:
        PackingError: If the mask would be larger than 2 GiB.
    """
    mask, has_key = dense_mask(segments, query.device), segments.has_key(query.device)
    # (tokens, heads, head_dim) -> (1, heads, tokens, head_dim)
    q, k, v = (side.transpose(0, 1)[None] for side in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options.for_sdpa())
    return torch.where(has_key[:, None, None], out[0].transpose(0, 1), 0)


def dense_mask(segments: SegmentSpans, device: torch.device) -> torch.Tensor:
    """Return which queries attend to which keys, `bool`, `(num_queries, num_keys)`.

    A query without keys attends to all keys: kernels disagree on rows without keys, up to NaN gradients.
    """
    size = segments.num_queries * segments.num_keys
    if size > MASK_LIMIT:
        raise PackingError(
            f"A mask of {segments.num_queries} queries and {segments.num_keys} keys takes {format_bytes(size)}, and "
            f"the backend 'dense' takes at most {format_bytes(MASK_LIMIT)}; use 'varlen' on a CUDA device, or "
            "'segments'."
        )

    def make() -> torch.Tensor:
        mask, keys = ~segments.has_key(device)[:, None], torch.arange(segments.num_keys, device=device)
        for start, stop in segments.key_bounds(device):
            mask = mask | ((keys >= start[:, None]) & (keys < stop[:, None]))
        return mask

    return segments.made(("dense", device), make)
