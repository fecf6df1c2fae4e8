"""The backend `"flex"`: torch's FlexAttention, which skips the blocks that no segment touches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ...devices import to_device
from ..segments import AttentionOptions, SegmentSpans

BLOCK = 128
"""Queries and keys of a block, FlexAttention's default."""


def attend_by_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention]."""
    # (tokens, heads, head_dim) -> (1, heads, tokens, head_dim)
    q, k, v = (side.transpose(0, 1)[None] for side in (query, key, value))
    attend: Any = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    mask = block_mask(segments, query.device)
    out: torch.Tensor = attend(q, k, v, block_mask=mask, scale=options.scale, enable_gqa=options.enable_gqa)
    return out[0].transpose(0, 1)


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled; uncompiled it computes all pairs."""
    return torch.compile(flex_attention)


def block_mask(segments: SegmentSpans, device: torch.device) -> BlockMask:
    """Return the blocks that segments touch, made from the segments' bounds alone.

    Evaluating a mask function at every pair would take time and memory quadratic in the tokens.
    """

    def make() -> BlockMask:
        touched, full = block_tables(segments)
        (start, stop), *more = segments.key_bounds(device)

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            inside = (key >= start[query]) & (key < stop[query])
            for first, last in more:
                inside = inside | ((key >= first[query]) & (key < last[query]))
            return inside

        return BlockMask.from_kv_blocks(
            *_ordered(touched & ~full, device),
            *_ordered(full, device),
            BLOCK_SIZE=BLOCK,
            mask_mod=attends,
            seq_lengths=(segments.num_queries, segments.num_keys),
        )

    return segments.made(("flex", device), make)


def block_tables(segments: SegmentSpans) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of queries and keys a segment touches, and which one fills: two `bool` tables."""
    shape = -(-segments.num_queries // BLOCK), -(-segments.num_keys // BLOCK)
    touched, full = np.zeros(shape, bool), np.zeros(shape, bool)
    for side in segments.key_sides:
        for queries, keys in zip(segments.queries, side, strict=True):
            if keys[1] > keys[0]:
                touched[tuple(slice(start // BLOCK, -(-stop // BLOCK)) for start, stop in (queries, keys))] = True
                full[tuple(slice(-(-start // BLOCK), stop // BLOCK) for start, stop in (queries, keys))] = True
    return touched, full


def _ordered(table: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks per row, `(1, 1, rows)`, and which they are, `(1, 1, rows, columns)`."""
    indices = torch.from_numpy(np.argsort(~table, axis=1, kind="stable").astype(np.int32))
    counts = torch.from_numpy(table.sum(1, dtype=np.int32))
    return to_device(counts[None, None], device), to_device(indices[None, None], device)
