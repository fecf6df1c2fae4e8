"""The backend `"varlen"`: a flash attention kernel for segments given as offsets, on CUDA devices."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Literal, cast

import torch

from ..segments import AttentionOptions, SegmentSpans

Kernel = Literal["torch", "flash-attn"]


@torch.compiler.assume_constant_result
@functools.cache
def varlen_kernel(*, dropout: bool = False) -> Kernel | None:
    """Return the installed kernel: that of `torch.nn.attention.varlen`, which has no dropout, else flash-attn's."""
    if not dropout and importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        if {"scale", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters):
            return "torch"
    return "flash-attn" if importlib.util.find_spec("flash_attn") is not None else None


def attend_by_offsets(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: SegmentSpans, options: AttentionOptions
) -> torch.Tensor:
    """Compute [`packed_attention`][hf_bucketing.packing.packed_attention].

    Padding is not removed by a copy: flash attention writes zeros for segments without keys, and zero gradients for
    keys without queries.
    """
    cu_seqlens_q, cu_seqlens_k, max_q, max_k, key_index = segments.varlen(query.device)
    if key_index is not None:
        key, value = key.index_select(0, key_index), value.index_select(0, key_index)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    if varlen_kernel(dropout=options.dropout > 0) == "torch":
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(query, key, value, *offsets, scale=options.scale, enable_gqa=options.enable_gqa)
    else:
        from flash_attn import flash_attn_varlen_func

        attended = flash_attn_varlen_func(
            query, key, value, *offsets, dropout_p=options.dropout, softmax_scale=options.scale
        )
    return cast("torch.Tensor", attended)
