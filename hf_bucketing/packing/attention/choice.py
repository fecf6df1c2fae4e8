"""The choice that `"auto"` stands for: a function of the device, the call, its segments and the kernels at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..names import Backend
from ..segments import SegmentSpans
from .kernels import HALF, KERNELS, Capability, Device

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
