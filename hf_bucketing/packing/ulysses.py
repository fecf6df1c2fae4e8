"""Ulysses: processes that hold a part of every strip exchange tokens for heads around attention.

Sequence parallelism of DeepSpeed-Ulysses (Jacobs et al., 2023) with diffusers' own exchange, which carries gradients.
Where the processes do not divide the heads, heads of zeros fill them up, as diffusers' `ulysses_anything` does, which
has no backward pass. Without a `parallel_config` nothing is exchanged. L tokens of a strip, H heads, D channels of a
head, P processes of a group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def all_tokens(strips: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Turn this process's tokens `(strips, L/P, H, D)` into all tokens, with its heads: `(strips, L, H/P, D)`."""
    return _exchanged(_padded_heads(strips, parallel_config), parallel_config, scatter=2, gather=1)


def local_tokens(strips: torch.Tensor, parallel_config: Any, *, heads: int) -> torch.Tensor:
    """Turn all tokens with this process's heads, `(strips, L, H/P, D)`, into its tokens: `(strips, L/P, H, D)`."""
    return _exchanged(strips, parallel_config, scatter=1, gather=2)[:, :, :heads]


def local_heads(heads: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return the heads of this process, of text that every process has: `(any, H, D)` to `(any, H/P, D)`."""
    return _part(_padded_heads(heads, parallel_config), parallel_config)


def local_part(table: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return this process's part of a table of the tokens of strips: `(…, L, channels)` to `(…, L/P, channels)`."""
    return _part(table, parallel_config)


def _padded_heads(heads: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    """Return heads `(…, H, D)`, filled up with zeros to a multiple of P."""
    if parallel_config is None:
        return heads
    missing = -heads.shape[-2] % parallel_config.context_parallel_config.ulysses_degree
    return F.pad(heads, (0, 0, 0, missing)) if missing else heads


def _part(tensor: torch.Tensor, parallel_config: Any) -> torch.Tensor:
    if parallel_config is None:
        return tensor
    context = parallel_config.context_parallel_config
    return tensor.chunk(context.ulysses_degree, -2)[context._ulysses_local_rank]


def _exchanged(strips: torch.Tensor, parallel_config: Any, *, scatter: int, gather: int) -> torch.Tensor:
    if parallel_config is None:
        return strips
    from diffusers.models.attention_dispatch import SeqAllToAllDim

    group = parallel_config.context_parallel_config._ulysses_mesh.get_group()
    exchanged: torch.Tensor = SeqAllToAllDim.apply(group, strips, scatter, gather)
    return exchanged
