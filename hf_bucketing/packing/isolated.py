"""Stacks of samples without audio, in models that are trained with it: their video is isolated from zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .batch import Rows
from .context import bind_checkpoints, layout_in_use, use_layout
from .layout import PackedLayout

Outputs = tuple[torch.Tensor, list[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class SilentStack(PackedLayout):
    """Layout of a stack without audio, in a model that is trained with it: what tells its forward from a pack's."""


def run_isolated(
    run: Callable[[Rows], Outputs], transformer: Any, rows: Rows, *, attentions: Iterable[torch.nn.Module]
) -> Outputs:
    """Run samples of one size without audio, whose video is isolated.

    All layers compute all the same, on a token of zeros, so that weights get gradients of 0, for which other processes
    may wait.

    Args:
        run (callable): Runs a stack with audio as the pipeline does.
        transformer (`torch.nn.Module`): Transformer.
        rows ([`Rows`]): The samples.
        attentions (iterable of `torch.nn.Module`): Modules in which video attends to audio.
    """
    assert rows.audio is not None, "the caller has audio"
    for attention in attentions:  # hooks stay, as gradient checkpointing runs them again in the backward pass
        if _isolate not in attention._forward_hooks.values():
            attention.register_forward_hook(_isolate)
    bind_checkpoints(transformer)
    silent = (0,) * len(rows.latents)
    layout = SilentStack(
        grids=(rows.grid,) * len(silent),
        text_lengths=silent,
        strip_length=1,
        audio_lengths=silent,
        device=rows.text.device,
    )
    token = [latent.new_zeros(1, latent.shape[1]) for latent in rows.audio.latents]
    with use_layout(layout):
        output, sounds = run(replace(rows, audio=replace(rows.audio, latents=token)))
    return output, [audio[:0] for audio in sounds]


def _isolate(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return what attention to audio adds to video: nothing in a stack of samples without audio, and all in others."""
    return 0 * output if isinstance(layout_in_use(), SilentStack) else output
