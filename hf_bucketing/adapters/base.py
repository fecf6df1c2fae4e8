"""The base model below adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer


@contextmanager
def base_model(transformer: torch.nn.Module) -> Iterator[None]:
    """Switch all adapters of a transformer, bare or wrapped, off inside a `with` block."""
    # peft's own switch also stops the gradients of adapters: FSDP2 keeps what it finds in the first forward.
    layers = [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled
