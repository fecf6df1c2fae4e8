"""FlashAttention 4 as an operator, which `torch.compile` keeps as one node of its graph.

Importing this module imports flash-attn-4, which is pure Python. It compiles a kernel for each size of heads when it
is first called, but none for the lengths of a pack.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute import flash_attn_varlen_func
from flash_attn.cute.interface import _flash_attn_bwd

from ..segments import AttentionOptions, VarlenOffsets


def flash_attention_4(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor], offsets: VarlenOffsets, options: AttentionOptions
) -> torch.Tensor:
    """Call the kernel; see `kernels.Call`."""
    out: torch.Tensor = _attend(*tokens, *offsets.arguments, options.scale)[0]
    return out


@torch.library.custom_op("hf_bucketing::flash_attention_4", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, log_sum_exp = flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=scale,
        return_lse=True,
    )
    return out, log_sum_exp


@_attend.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = query.shape[:2]
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("hf_bucketing::flash_attention_4_backward", mutates_args=())
def _differentiate(
    slope: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_query, of_key, of_value = _flash_attn_bwd(
        query,
        key,
        value,
        out,
        slope,
        log_sum_exp,
        softmax_scale=scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
    )
    return of_query, of_key, of_value


@_differentiate.register_fake
def _(slope: torch.Tensor, *tokens: Any) -> tuple[torch.Tensor, ...]:
    return tuple(side.new_empty(side.shape) for side in tokens[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.max_q, ctx.max_k, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, slope: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, cu_seqlens_q, cu_seqlens_k, out, log_sum_exp = ctx.saved_tensors
    numbers = ctx.max_q, ctx.max_k, ctx.scale
    slopes = _differentiate(slope, query, key, value, out, log_sum_exp, cu_seqlens_q, cu_seqlens_k, *numbers)
    return *slopes, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)
