"""The backend `"varlen"`: kernels for segments given as offsets, what each needs, and how it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from ..segments import AttentionOptions, SegmentSpans, VarlenOffsets

HALF = (torch.float16, torch.bfloat16)
"""Dtypes that these kernels compute in."""

Capability = tuple[int, int]


class Device(NamedTuple):
    """What a choice of kernels reads of a device: its type, and the compute capability of a CUDA device."""

    type: str
    capability: Capability | None = None


Tokens: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries `(num_queries, H, D)`, and keys and values `(num_keys, key heads, D)`."""

Call: TypeAlias = Callable[[Tokens, VarlenOffsets, AttentionOptions], torch.Tensor]
"""How a kernel is called with the segments of a pack; the result has the shape of the queries."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel for segments given as offsets.

    Attributes:
        name (`str`): Its name behind `varlen:`.
        title (`str`): What it is, for messages.
        source (`str`): What brings it.
        capability (two `int`): Least compute capability that computes forward and backward.
        head_dims (function): Whether it takes heads of so many channels on a device of a compute capability.
        drops_out (`bool`): Whether it has dropout.
        load (function): Imports the function that is called, and returns how; raises ImportError where it is absent.
    """

    name: str
    title: str
    source: str
    capability: Capability
    head_dims: Callable[[int, Capability], bool]
    drops_out: bool
    load: Callable[[], Call]

    def refusal(self, device: Device, head_dim: int, *, dropout: bool) -> str | None:
        """Return why the kernel cannot compute a call, wherever it is installed; None if it can."""
        capability = device.capability or (0, 0)
        if capability < self.capability:
            return f"needs compute capability {_written(self.capability)}, and this device has {_written(capability)}"
        if not self.head_dims(head_dim, capability):
            return f"takes no heads of {head_dim} channels on this device"
        return "has no dropout" if dropout and not self.drops_out else None


def _written(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _flash_attention_4() -> Call:
    from .fa4 import flash_attention_4

    return flash_attention_4


def _flash_attention_of_torch() -> Call:
    """Call what `torch.nn.attention.varlen` calls: that function takes cuDNN by itself in torch 2.14 and newer."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this build of torch has no FlashAttention")
    kernel = torch.ops.aten._flash_attention_forward

    def call(tokens: Tokens, offsets: VarlenOffsets, options: AttentionOptions) -> torch.Tensor:
        settings = options.dropout, False, False  # neither causal nor with its mask for debugging
        return cast("torch.Tensor", kernel(*tokens, *offsets.arguments, *settings, scale=options.scale)[0])

    return call


def _flash_attention_2() -> Call:
    from flash_attn import flash_attn_varlen_func

    def call(tokens: Tokens, offsets: VarlenOffsets, options: AttentionOptions) -> torch.Tensor:
        settings: dict[str, Any] = {"dropout_p": options.dropout, "softmax_scale": options.scale}
        return cast("torch.Tensor", flash_attn_varlen_func(*tokens, *offsets.arguments, **settings))

    return call


def _heads_of_fa4(head_dim: int, capability: Capability) -> bool:
    """Return what `_validate_head_dims` of flash-attn-4 4.0.0b36 allows, where keys and values have equal channels."""
    most = 256 if capability[0] == 9 else 128
    return head_dim % 8 == 0 and (head_dim <= most or (head_dim == 256 and capability[0] in (10, 11)))


def _heads_of_fa2(head_dim: int, capability: Capability) -> bool:
    return head_dim % 8 == 0 and head_dim <= 256


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="fa4",
            title="FlashAttention 4",
            source="pip install hf_bucketing[hopper]",
            capability=(9, 0),
            head_dims=_heads_of_fa4,
            drops_out=False,
            load=_flash_attention_4,
        ),
        Kernel(
            name="torch",
            title="the FlashAttention 2 of torch",
            source="a build of torch for CUDA",
            capability=(8, 0),
            head_dims=_heads_of_fa2,
            drops_out=True,
            load=_flash_attention_of_torch,
        ),
        Kernel(
            name="fa2",
            title="FlashAttention 2",
            source="pip install flash-attn",
            capability=(8, 0),
            head_dims=_heads_of_fa2,
            drops_out=True,
            load=_flash_attention_2,
        ),
    )
}
"""Kernels by name, the first of which is taken where several can compute a call."""


LOADED: dict[str, Call] = {}
"""How the kernels that were imported are called."""


@functools.cache
def missing(name: str) -> str | None:
    """Return why a kernel cannot be imported; None if it can.

    What is imported is the function that is called: flash-attn-4 alone makes a package `flash_attn` that can be found,
    but has none of the functions of flash-attn 2.
    """
    try:
        LOADED[name] = KERNELS[name].load()
    except ImportError as error:
        return str(error)
    return None


def installed() -> tuple[str, ...]:
    """Return the names of the kernels that can be imported."""
    return tuple(name for name in KERNELS if missing(name) is None)


def describe_kernels() -> list[str]:
    """Return a line for each kernel: whether it can be imported, and if not, why and what brings it."""
    lines = []
    for name, kernel in KERNELS.items():
        why = missing(name)
        lines.append(f"varlen:{name}: " + (f"{kernel.title}" if why is None else f"none, {why} ({kernel.source})"))
    return lines


@functools.cache
def device_of(device: torch.device) -> Device:
    """Return what a choice reads of a device."""
    return Device(device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


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
