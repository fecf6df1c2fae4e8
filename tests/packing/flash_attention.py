"""FlashAttention 4 on the CPU: functions with its signature, so that what hands them its tokens can be run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_bucketing.packing.attention import dispatch, kernels
from hf_bucketing.packing.attention.kernels import Device

HOPPER = Device("cuda", (9, 0))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what flash-attn-4 4.0.0b36 documents under this name, and hold the caller to it."""
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    assert return_lse
    check_offsets(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out = torch.zeros_like(q)
    log_sum_exp = torch.zeros(q.shape[1], len(q), dtype=torch.float32)
    for queries, keys in _segments(cu_seqlens_q, cu_seqlens_k):
        weights, sums = _softmax(q[queries], k[keys], softmax_scale)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, _repeated(v[keys], q)).to(q.dtype)
        log_sum_exp[:, queries] = sums
    return out, log_sum_exp


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> tuple[torch.Tensor, ...]:
    check_offsets(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    slopes = tuple(torch.zeros_like(side) for side in (q, k, v))
    for queries, keys in _segments(cu_seqlens_q, cu_seqlens_k):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        weights, sums = _softmax(q[queries], k[keys], softmax_scale)
        assert torch.allclose(sums, lse[:, queries], atol=1e-4)
        key, value, slope = _repeated(k[keys], q), _repeated(v[keys], q), dout[queries]
        assert torch.allclose(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype), out[queries], atol=1e-4)
        by_weight = torch.einsum("qhd,khd->hqk", slope, value)
        by_product = weights * (by_weight - (weights * by_weight).sum(-1, keepdim=True)) * scale
        slopes[0][queries] = torch.einsum("hqk,khd->qhd", by_product, key)
        slopes[1][keys] += _summed(torch.einsum("hqk,qhd->khd", by_product, q[queries]), k)
        slopes[2][keys] += _summed(torch.einsum("hqk,qhd->khd", weights, slope), v)
    return slopes


def check_offsets(q: Any, k: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> None:
    """Check what kernels of variable lengths document of their offsets."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.shape == cu_k.shape
    for offsets, tokens, longest in ((cu_q, q, max_q), (cu_k, k, max_k)):
        lengths = offsets.diff()
        assert (int(offsets[0]), int(offsets[-1])) == (0, len(tokens))
        assert lengths.min() >= 0
        assert lengths.max() <= longest <= max(2, 2 * lengths.max())


def _segments(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for queries, keys in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        if queries[0] < queries[1] and keys[0] < keys[1]:
            yield slice(*queries), slice(*keys)


def _repeated(side: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return side.repeat_interleave(query.shape[1] // side.shape[1], 1)


def _summed(slopes: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """Add the slopes of the heads that share a head of the keys."""
    return slopes.unflatten(1, (side.shape[1], -1)).sum(2)


def _softmax(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights `(H, queries, keys)` and the logarithm of their sums before they were divided by these."""
    products = torch.einsum("qhd,khd->hqk", q, _repeated(k, q)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return products.softmax(-1).to(q.dtype), products.logsumexp(-1).float()


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """Install these functions as flash-attn-4 does, whose package `flash_attn` holds `cute` alone, and allow CPUs."""
    assert dispatch.device_of is kernels.device_of, "an earlier test left a device"
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = _flash_attn_bwd  # type: ignore[attr-defined]
    cute = ModuleType("flash_attn.cute")
    cute.__path__ = []
    cute.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    namespace = ModuleType("flash_attn")
    namespace.__path__ = []
    modules = {"flash_attn": namespace, "flash_attn.cute": cute, "flash_attn.cute.interface": interface}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(dispatch, "device_of", lambda device: HOPPER)
        patch.setitem(kernels.KERNELS, "fa4", replace(kernels.KERNELS["fa4"], head_dims=lambda *_: True))
        patch.setattr(dispatch, "HALF", (*kernels.HALF, torch.float32, torch.float64))
        clear()
        try:
            yield
        finally:
            patch.undo()
            clear()


def clear() -> None:
    """Forget what was installed and chosen before."""
    kernels.LOADED.clear()
    for function in (kernels.missing, dispatch._choice, dispatch._first_kernel):
        function.cache_clear()
