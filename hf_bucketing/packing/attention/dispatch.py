"""Choose the backend of packed attention, as settings name it or by what `"auto"` stands for, and call it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch

from ...errors import PackingError
from ..names import Backend
from ..segments import AttentionOptions, SegmentSpans
from .kernels import HALF, KERNELS, Capability, Device, attend_by_offsets, device_of, installed, missing
from .torch_backends import attend_by_blocks, attend_by_segments, attend_densely, block_mask, dense_mask

CUDNN_FROM: Capability = (9, 0)
"""Compute capability from which torch's SDPA takes cuDNN by itself, which is faster there than FlashAttention 2."""
WORK_OF_A_CALL = 7.0e9
"""Pairs of tokens times channels of all heads, for each call of SDPA, from which its calls cost less than they save.

On an H100, calls of 2.6e9 and 4.3e9 lost against one call of FlashAttention 2 for all segments, and calls of 1.1e10
and more won (docs/benchmarks/h100.md).
"""


class Segments(NamedTuple):
    """What a choice reads of segments.

    Attributes:
        suit_varlen (`bool`): Whether kernels of variable lengths compute them well.
        two_spans (`bool`): Whether a segment has two spans of keys.
        long_calls (`bool`): Whether each call of the backend `"segments"` computes much, see [`WORK_OF_A_CALL`].
    """

    suit_varlen: bool = True
    two_spans: bool = False
    long_calls: bool = True

    @classmethod
    def of(cls, segments: SegmentSpans, *, width: int) -> Segments:
        """Return what a choice reads of segments whose queries have so many channels in all heads."""
        long_calls = segments.pairs_of_a_call * width >= WORK_OF_A_CALL
        return cls(segments.suits_varlen, segments.more_keys is not None, long_calls)


class Choice(NamedTuple):
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str


def choose(
    device: Device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    dropout: bool,
    segments: Segments,
    kernels: Sequence[str],
) -> Choice:
    """Return the backend for a call of attention.

    Args:
        device (`Device`): Where the tokens are.
        dtype (`torch.dtype`): Their dtype.
        head_dim (`int`): Channels of a head.
        dropout (`bool`): Whether weights are dropped.
        segments (`Segments`): What attends to what.
        kernels (sequence of `str`): The kernels that are installed, the first of which is taken first.
    """
    if device.type != "cuda" or dtype not in HALF:
        return Choice("segments", "kernels of variable lengths run on CUDA devices in half precision")
    if not segments.suit_varlen:
        return Choice("segments", "kernels of variable lengths compute short segments in blocks, and not too many")
    refusals = {name: KERNELS[name].refusal(device, head_dim, dropout=dropout) for name in kernels}
    fit = [name for name, refusal in refusals.items() if refusal is None]
    if not fit:
        whys = "; ".join(f"{KERNELS[name].title} {why}" for name, why in refusals.items())
        return Choice("segments", whys or "no kernel of variable lengths is installed")
    if segments.two_spans and not dropout:
        return Choice("flex", "it reads two spans of keys where they lie, and other backends copy them")
    chosen = KERNELS[fit[0]]
    backend: Backend = f"varlen:{chosen.name}"  # type: ignore[assignment]
    if chosen.name == "fa4":
        return Choice(backend, f"{chosen.title} was the fastest kernel on an H100")
    if (device.capability or (0, 0)) >= CUDNN_FROM:
        if segments.long_calls:
            source = KERNELS["fa4"].source
            return Choice("segments", f"SDPA takes cuDNN here, and FlashAttention 4 is not installed ({source})")
        return Choice(backend, "it takes one call for many short segments of different lengths")
    return Choice(backend, f"{chosen.title} takes one call for all segments")


logger = logging.getLogger(__name__)

_BACKENDS = {
    "segments": attend_by_segments,
    "dense": attend_densely,
    "flex": attend_by_blocks,
    **{f"varlen:{name}": functools.partial(attend_by_offsets, kernel=name) for name in KERNELS},
}
_ONE_SPAN = ("segments", *(f"varlen:{name}" for name in KERNELS))
"""Backends that take one span of keys for each segment, so that keys of several segments are copied for each."""


def resolve_backend(backend: str) -> Backend:
    """Return a backend by its name if this machine can run it at all.

    `"auto"` stays `"auto"`, and `"varlen"` stays `"varlen"`: a model may be moved or cast after packing is enabled, so
    the choice is made at the first attention on each device and in each dtype, and logged.

    Raises:
        PackingError: If the name is unknown, or `"varlen"` has no kernel or no CUDA device.
    """
    if backend not in get_args(Backend):
        raise PackingError(f"Unknown attention backend {backend!r}; use one of {get_args(Backend)}.")
    names = _kernels_of(backend)
    if names and not torch.cuda.is_available():
        raise PackingError(f"The attention backend {backend!r} needs a CUDA device, and there is none; use 'auto'.")
    if names and all(map(missing, names)):
        lacks = "; ".join(f"{KERNELS[name].title}, of {KERNELS[name].source}: {missing(name)}" for name in names)
        raise PackingError(
            f"The attention backend {backend!r} has no kernel here ({lacks}); install one or use 'auto'."
        )
    return backend  # type: ignore[return-value]


def _kernels_of(backend: str) -> list[str]:
    """Return the kernels that a backend stands for: one, all for `"varlen"`, or none."""
    return [name for name in KERNELS if backend in ("varlen", f"varlen:{name}")]


def choose_backend(
    query: torch.Tensor, options: AttentionOptions | None = None, *, segments: SegmentSpans | None = None
) -> Backend:
    """Return the backend that `"auto"` stands for on the device and in the dtype of `query`, see [`choose`].

    In half precision on CUDA devices it is FlashAttention 4 where it is installed and the device is a Hopper or newer
    one; else there `"segments"`, whose SDPA takes cuDNN, where each of its calls computes enough; else a kernel of
    variable lengths. Where segments have two spans of keys, `"flex"` takes their place, which would copy keys for each
    segment. Elsewhere, and for very short segments, it is `"segments"`; a graph of `torch.compile` that holds
    FlashAttention 4 takes it for all segments.
    """
    dropout = options is not None and options.dropout > 0
    kind = Segments() if segments is None else Segments.of(segments, width=query.shape[-2] * query.shape[-1])
    return _chosen(query.device, query.dtype, query.shape[-1], dropout, *kind)


@torch.compiler.assume_constant_result  # which torch.compile does not see on a function that is itself a cache
def _chosen(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool, *kind: bool) -> Backend:
    choice = _choice(device, dtype, head_dim, dropout, Segments(*kind))
    said = f"Packed attention on {device.type} in {dtype} runs on the backend {choice.backend!r}, as {choice.reason}."
    if said not in _SAID:
        _SAID.append(said)
        logger.info(said)
    return choice.backend


@functools.cache
def _choice(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool, segments: Segments) -> Choice:
    where = device_of(device)
    return choose(where, dtype, head_dim=head_dim, dropout=dropout, segments=segments, kernels=installed())


_SAID: list[str] = []


def choices() -> tuple[str, ...]:
    """Return what `"auto"` chose, and why, since [`announce_anew`] was called, as sentences that were logged."""
    return tuple(_SAID)


def announce_anew() -> None:
    """Log choices again that were made before: those of another model or run."""
    _SAID.clear()


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
    if not torch.compiler.is_compiling():  # a graph of these numbers would serve no other pack
        _check(query, key, segments, options)
    head_dim = value.shape[-1]  # which graphs of torch.compile know, as nothing rotates values
    if backend == "auto":
        if torch.compiler.is_compiling():  # the graph holds one kernel for all packs, also of short segments
            kind = Segments(two_spans=segments.more_keys is not None)
        else:
            kind = Segments.of(segments, width=query.shape[1] * head_dim)
        backend = _chosen(query.device, query.dtype, head_dim, dropout > 0, *kind)
    elif backend.startswith("varlen"):
        backend = _kernel_for(backend, query.device, query.dtype, head_dim, dropout > 0)
    elif reason := _refusal(backend, query, options):
        raise PackingError(
            f"The attention backend {backend!r} {reason}; use 'auto', or 'segments', which always works."
        )
    if not segments.has_keys:
        return _zeros_joined_to(query, key, value)
    if segments.more_keys is not None and backend in _ONE_SPAN:
        index, segments = segments.joined(query.device)
        key, value = key.index_select(0, index), value.index_select(0, index)
    return _BACKENDS[backend](query, key, value, segments, options)


def prepare_segments(segments: SegmentSpans, backend: Backend, device: torch.device) -> None:
    """Make what a backend derives from segments before a compiled model needs it.

    Made inside a compiled graph, it would become part of the graph, which would then serve this pack alone.
    """
    if not segments.has_keys:
        return
    if backend == "dense":
        dense_mask(segments, device)
    elif backend == "flex":
        block_mask(segments, device)
    elif segments.more_keys is not None:
        if backend == "auto" and device_of(device).type == "cuda":
            block_mask(segments, device)
        prepare_segments(segments.joined(device)[1], backend, device)
    elif backend.startswith("varlen") or (backend == "auto" and device_of(device).type == "cuda"):
        segments.varlen(device)


def breaks_graphs(backend: Backend, tokens: torch.Tensor) -> bool:
    """Return whether `torch.compile` breaks its graph at the attention of a backend, where it may be `"segments"`.

    `tokens` are the inputs of a block, on its device, in the dtype of its computations unless autocast names another.
    """
    if backend != "auto":
        return backend == "segments"
    (cast,), where = _in_autocast_dtype(tokens[:0]), device_of(tokens.device)
    fits = where.type == "cuda" and (where.capability or (0, 0)) >= KERNELS["fa4"].capability and cast.dtype in HALF
    return not fits or "fa4" not in installed()


def _in_autocast_dtype(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast tokens as autocast does for `scaled_dot_product_attention`, but not for other kernels."""
    device = tokens[0].device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device) or tokens[0].dtype == torch.float64:
        return tokens
    dtype = torch.get_autocast_dtype(device)
    return tuple(side.to(dtype) for side in tokens)


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


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


@torch.compiler.assume_constant_result
def _kernel_for(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool) -> Backend:
    return _first_kernel(backend, device, dtype, head_dim, dropout)


@functools.cache
def _first_kernel(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: bool) -> Backend:
    """Return the backend of the first kernel that a backend stands for and that computes such a call.

    Raises:
        PackingError: If none does.
    """
    where, names = device_of(device), _kernels_of(backend)
    if where.type != "cuda":
        refusal = f"needs a CUDA device, and the tokens are on {device}"
    elif dtype not in HALF:
        refusal = f"computes in float16 and bfloat16, and the tokens are {dtype}"
    elif not names:
        refusal = f"is unknown; there are {get_args(Backend)}"
    else:
        whys = {name: missing(name) or KERNELS[name].refusal(where, head_dim, dropout=dropout) for name in names}
        for name, why in whys.items():
            if why is None:
                return f"varlen:{name}"  # type: ignore[return-value]
        refusal = "has no kernel for this: " + "; ".join(f"{KERNELS[name].title}: {why}" for name, why in whys.items())
    raise PackingError(f"The attention backend {backend!r} {refusal}; use 'auto', or 'segments', which always works.")


def _refusal(backend: str, query: torch.Tensor, options: AttentionOptions) -> str | None:
    """Return why a backend without kernels of variable lengths cannot compute attention of these queries."""
    if backend == "flex":
        if options.dropout:
            return "has no dropout"
        if query.device.type == "cpu" and query.requires_grad and torch.is_grad_enabled():
            return "has no backward on the CPU"
    elif backend not in get_args(Backend):
        return f"is unknown; there are {get_args(Backend)}"
    return None
