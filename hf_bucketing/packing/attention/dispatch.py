"""Choose the backend of packed attention and call it."""

from __future__ import annotations

import functools
import logging
from typing import get_args

import torch

from ...errors import PackingError
from ..names import Backend
from ..segments import AttentionOptions, SegmentSpans
from .dense import attend_densely, dense_mask
from .flex import attend_by_blocks, block_mask
from .grouped import attend_by_segments
from .varlen import attend_by_offsets, varlen_kernel

logger = logging.getLogger(__name__)

_BACKENDS = {
    "segments": attend_by_segments,
    "dense": attend_densely,
    "flex": attend_by_blocks,
    "varlen": attend_by_offsets,
}
_ONE_SPAN = ("segments", "varlen")
"""Backends that take one span of keys for each segment, so that keys of several segments are copied for each."""
_HALF = (torch.float16, torch.bfloat16)


def resolve_backend(backend: str) -> Backend:
    """Return a backend by its name if this machine can run it at all.

    `"auto"` stays `"auto"`: a model may be moved or cast after packing is enabled, so the choice is made at the first
    attention on each device and in each dtype, and logged.

    Raises:
        PackingError: If the name is unknown, or `"varlen"` has no kernel or no CUDA device.
    """
    if backend not in get_args(Backend):
        raise PackingError(f"Unknown attention backend {backend!r}; use one of {get_args(Backend)}.")
    if backend == "varlen" and not torch.cuda.is_available():
        raise PackingError("The attention backend 'varlen' needs a CUDA device, and there is none; use 'auto'.")
    if backend == "varlen" and varlen_kernel() is None:
        raise PackingError(
            "The attention backend 'varlen' needs torch.nn.attention.varlen (torch 2.13 has it) or flash-attn; "
            "install one of them or use 'auto'."
        )
    return backend  # type: ignore[return-value]


def choose_backend(
    query: torch.Tensor, options: AttentionOptions | None = None, *, segments: SegmentSpans | None = None
) -> Backend:
    """Return the backend that `"auto"` stands for on the device and in the dtype of `query`.

    It is `"varlen"` in half precision on CUDA devices if there is a kernel, and `"segments"` otherwise. Segments that
    are too short or too many for such kernels, as in Latte's attention over frames, stay on `"segments"` too. Where
    segments have two spans of keys, `"flex"` takes the place of `"varlen"`, which would copy keys for each segment.
    """
    options = options or AttentionOptions()
    reason = _refusal("varlen", query, options)
    if reason is None and segments is not None and not segments.suits_varlen:
        reason = "computes short segments in blocks, and takes a limited number of them"
    chosen: Backend = "segments" if reason else "varlen"
    if chosen == "varlen" and segments is not None and segments.more_keys is not None and not options.dropout:
        chosen, reason = "flex", "copies keys for each segment where segments have two spans of them"
    if not torch.compiler.is_compiling():
        _announce(chosen, query.device.type, query.dtype, reason)
    return chosen


@functools.cache
def _announce(backend: Backend, device: str, dtype: torch.dtype, reason: str | None) -> None:
    because = f", as 'varlen' {reason}" if reason else ""
    logger.info(f"Packed attention on {device} in {dtype} runs on the backend {backend!r}{because}.")


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: SegmentSpans,
    *,
    backend: Backend = "segments",
    scale: float | None = None,
    dropout: float = 0.0,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend inside each segment and nowhere else.

    With `"segments"`, the specification, and `"varlen"`, no value of one segment enters the computation of another.
    `"dense"` and `"flex"` weight everything outside a segment with 0, and 0 times a NaN is a NaN.

    Args:
        query (`torch.Tensor` of shape `(num_queries, heads, head_dim)`): Queries of the pack's tokens.
        key (`torch.Tensor` of shape `(num_keys, key_heads, head_dim)`): Keys of the pack's tokens, or of its text.
        value (`torch.Tensor` of shape `(num_keys, key_heads, head_dim)`): Value of each key.
        segments ([`SegmentSpans`]): Pairs of query and key spans that attend, such as `layout.self_segments` or
            `layout.cross_segments`.
        backend (`str`): `"segments"`: one call of `scaled_dot_product_attention` for all segments of the same lengths;
            any device and dtype. `"varlen"`: a flash attention kernel; CUDA, half precision. `"flex"`: FlexAttention;
            on the CPU without gradients. `"dense"`: a mask of all pairs, up to 2 GiB. `"auto"`: see
            [`choose_backend`]. A backend that cannot compute the call raises; it is never replaced.
        scale (`float`, *optional*): Factor of the products; by default, `head_dim ** -0.5`.
        dropout (`float`): Share of the attention weights that are set to zero, from 0 to below 1; for training.
        enable_gqa (`bool`): Whether `key_heads` may be a divisor of `heads`: each serves `heads / key_heads` heads.

    Returns:
        `torch.Tensor` of shape `(num_queries, heads, head_dim)`: Zero for padding, and where a segment has no key.

    Raises:
        PackingError: If the tokens do not fit the segments, or the backend is unknown or cannot compute the call.
    """
    options = AttentionOptions(scale, dropout, enable_gqa)
    query, key, value = _in_autocast_dtype(query, key, value)
    _check(query, key, segments, options)
    if backend == "auto":
        backend = choose_backend(query, options, segments=segments)
    elif reason := _refusal(backend, query, options):
        raise PackingError(
            f"The attention backend {backend!r} {reason}; use 'auto', or 'segments', which always works."
        )
    if not segments.num_keys:
        return _zeros_joined_to(query, key, value)
    if segments.more_keys is not None and backend in _ONE_SPAN:
        index, segments = segments.joined(query.device)
        key, value = key.index_select(0, index), value.index_select(0, index)
    return _BACKENDS[backend](query, key, value, segments, options)


def prepare_segments(segments: SegmentSpans, backend: Backend, device: torch.device) -> None:
    """Make what a backend derives from segments before a compiled model needs it.

    Made inside a compiled graph, it would become part of the graph, which would then serve this pack alone.
    """
    if not segments.num_keys:
        return
    if backend == "dense":
        dense_mask(segments, device)
    elif backend == "flex":
        block_mask(segments, device)
    elif segments.more_keys is not None:
        if backend == "auto" and device.type == "cuda":
            block_mask(segments, device)
        prepare_segments(segments.joined(device)[1], backend, device)
    elif backend == "varlen" or (backend == "auto" and segments.suits_varlen and device.type == "cuda"):
        segments.varlen(device)


def _in_autocast_dtype(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tokens as autocast does for `scaled_dot_product_attention`, but not for other kernels."""
    device = tokens[0].device.type
    usable = torch.amp.is_autocast_available(device)
    if not usable or not torch.is_autocast_enabled(device) or tokens[0].dtype == torch.float64:
        return tokens
    dtype = torch.get_autocast_dtype(device)
    return tuple(side.to(dtype) for side in tokens)


def _zeros_joined_to(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return zeros whose gradients are zero instead of absent: DDP waits for one from every parameter."""
    nothing = torch.stack([side[:0].sum() for side in (query, *others)]).sum()
    return torch.zeros_like(query) + nothing


def _check(query: torch.Tensor, key: torch.Tensor, segments: SegmentSpans, options: AttentionOptions) -> None:
    if (len(query), len(key)) != (segments.num_queries, segments.num_keys):
        raise PackingError(
            f"Expected {segments.num_queries} queries and {segments.num_keys} keys, got {len(query)} and {len(key)}."
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if heads != key_heads and (not options.enable_gqa or heads % key_heads):
        raise PackingError(
            f"Queries have {heads} heads and keys {key_heads}; with enable_gqa=True the latter may be a divisor."
        )
    if not 0 <= options.dropout < 1:
        raise PackingError(f"dropout must be at least 0 and below 1, got {options.dropout}.")


def _refusal(backend: str, query: torch.Tensor, options: AttentionOptions) -> str | None:
    """Return why a backend cannot compute attention of these queries; None if it can."""
    on_cpu, head_dim = query.device.type == "cpu", query.shape[-1]
    if backend == "varlen":
        if query.device.type != "cuda":
            return f"needs a CUDA device, and the tokens are on {query.device}"
        if query.dtype not in _HALF:
            return f"computes in float16 and bfloat16, and the tokens are {query.dtype}"
        if head_dim > 256 or head_dim % 8:
            return f"takes heads of up to 256 channels, a multiple of 8, and these have {head_dim}"
        if varlen_kernel(dropout=options.dropout > 0) is None:
            return "has no kernel here" + (" that can drop out; install flash-attn" if options.dropout else "")
    elif backend == "flex":
        if options.dropout:
            return "has no dropout"
        if on_cpu and query.requires_grad and torch.is_grad_enabled():
            return "has no backward on the CPU"
    elif backend not in get_args(Backend):
        return f"is unknown; there are {get_args(Backend)}"
    return None
