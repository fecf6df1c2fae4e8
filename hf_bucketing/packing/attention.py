"""Attention inside the segments of a pack."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ..errors import PackingError
from .segments import SegmentSpans

logger = logging.getLogger(__name__)

Backend = Literal["segments"]


def resolve_backend(backend: str) -> Backend:
    """Return the backend that `"auto"` stands for, and say so; an explicit one is returned as it is.

    Raises:
        PackingError: On an unknown name.
    """
    if backend == "auto":
        logger.info("Packed attention runs on the backend 'segments'.")
        return "segments"
    if backend not in get_args(Backend):
        raise PackingError(f"Unknown attention backend {backend!r}; use 'auto' or one of {get_args(Backend)}.")
    return backend  # type: ignore[return-value]


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentSpans,
    *,
    backend: Backend = "segments",
) -> torch.Tensor:
    """Attend inside each segment and nowhere else.

    `"segments"` is the specification: one call of `scaled_dot_product_attention` for all segments of the same
    lengths, on any device and in any dtype. Nothing of one segment enters the computation of another.

    Args:
        query (`torch.Tensor` of shape `(num_queries, heads, head_dim)`): Tokens of the pack.
        key (`torch.Tensor` of shape `(num_keys, heads, head_dim)`): Tokens of the pack, or of its text.
        value (`torch.Tensor` of shape `(num_keys, heads, head_dim)`): As `key`.
        segments ([`SegmentSpans`]): `layout.self_segments` or `layout.cross_segments`.
        backend (`"segments"`): How it is computed.

    Returns:
        `torch.Tensor` of shape `(num_queries, heads, head_dim)`: Zero for padding, and where a segment has no key.

    Raises:
        PackingError: If the tokens do not fit the segments, or the backend is unknown.
    """
    if resolve_backend(backend) != backend or (len(query), len(key)) != (segments.num_queries, segments.num_keys):
        raise PackingError(
            f"Expected {segments.num_queries} queries, {segments.num_keys} keys and a resolved backend, got "
            f"{len(query)}, {len(key)} and {backend!r}."
        )
    groups = defaultdict(list)
    for position, (queries, keys) in enumerate(zip(segments.queries, segments.keys, strict=True)):
        groups[queries[1] - queries[0], keys[1] - keys[0]].append(position)
    outputs: list[torch.Tensor] = [query] * len(segments.queries)
    for members in groups.values():
        # (segments, tokens, heads, head_dim) -> (segments, heads, tokens, head_dim)
        q = torch.stack([query[slice(*segments.queries[member])] for member in members]).transpose(1, 2)
        k, v = (
            torch.stack([side[slice(*segments.keys[member])] for member in members]).transpose(1, 2)
            for side in (key, value)
        )
        out = F.scaled_dot_product_attention(q, k, v) if k.shape[2] else torch.zeros_like(q)
        for member, rows in zip(members, out.transpose(1, 2), strict=True):
            outputs[member] = rows
    return _with_padding(outputs, segments)


def _with_padding(outputs: list[torch.Tensor], segments: SegmentSpans) -> torch.Tensor:
    pieces, end = [], 0
    for rows, (start, stop) in zip(outputs, segments.queries, strict=True):
        pieces += [rows.new_zeros(start - end, *rows.shape[1:]), rows] if start > end else [rows]
        end = stop
    pieces.append(outputs[0].new_zeros(segments.num_queries - end, *outputs[0].shape[1:]))
    return torch.cat(pieces)
