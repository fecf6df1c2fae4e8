"""Ulysses: processes that hold a part of every strip exchange tokens for heads around attention.

Sequence parallelism of DeepSpeed-Ulysses (Jacobs et al., 2023) with diffusers' own exchange, which carries gradients.
Without a `parallel_config` nothing is exchanged. N tokens of all strips in order, H heads, D channels of a head, P
processes of a group.
"""

from __future__ import annotations

from typing import Any

import torch


def all_tokens(heads: torch.Tensor, parallel_config: Any, *, num_strips: int) -> torch.Tensor:
    """Turn this process's tokens `(N/P, H, D)` into all tokens, with this process's heads: `(N, H/P, D)`."""
    return _exchanged(heads, parallel_config, num_strips=num_strips, scatter=2, gather=1)


def own_tokens(heads: torch.Tensor, parallel_config: Any, *, num_strips: int) -> torch.Tensor:
    """Turn all tokens with this process's heads, `(N, H/P, D)`, back into its tokens: `(N/P, H, D)`."""
    return _exchanged(heads, parallel_config, num_strips=num_strips, scatter=1, gather=2)


def own_heads(heads: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return the heads of this process, of text that every process has: `(any, H, D)` to `(any, H/P, D)`."""
    return _part(heads, parallel_config, dim=1)


def own_part(table: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return this process's part of each strip: `(strips, strip_length, …)` to `(strips, strip_length/P, …)`."""
    return _part(table, parallel_config, dim=1)


def _part(tensor: torch.Tensor, parallel_config: Any, *, dim: int) -> torch.Tensor:
    if parallel_config is None:
        return tensor
    context = parallel_config.context_parallel_config
    return tensor.chunk(context.ulysses_degree, dim)[context._ulysses_local_rank]


def _exchanged(
    heads: torch.Tensor, parallel_config: Any, *, num_strips: int, scatter: int, gather: int
) -> torch.Tensor:
    if parallel_config is None:
        return heads
    from diffusers.models.attention_dispatch import SeqAllToAllDim

    group = parallel_config.context_parallel_config._ulysses_mesh.get_group()
    by_strip = heads.unflatten(0, (num_strips, -1))
    exchanged: torch.Tensor = SeqAllToAllDim.apply(group, by_strip, scatter, gather)
    return exchanged.flatten(0, 1)
