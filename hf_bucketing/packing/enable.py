"""Switch packing on and off on a stock transformer."""

from __future__ import annotations

import torch

from ..errors import PackingError
from .attention import resolve_backend
from .families import family_of
from .pack import ATTRIBUTE, Packing, packing_of, unwrap
from .precision import keep_scalars_exact


def enable_packing(transformer: torch.nn.Module, *, backend: str = "auto", strip_length: int = 64) -> Packing:
    """Swap the attention processors of a diffusers transformer and hook its positions, so that it runs packs.

    The module stays the stock one: LoRA, gradient checkpointing, DDP and `save_pretrained` keep working. Source of
    the idea of packing: NaViT (Dehghani et al., 2023), and Open-Sora-Plan's use of it for video.

    Args:
        transformer (`torch.nn.Module`): Of a family that packing knows.
        backend (`"auto"`, `"segments"`, `"varlen"`, `"flex"` or `"dense"`): How attention is computed, see
            [`packed_attention`][hf_bucketing.packing.packed_attention]. `"auto"` chooses at the first forward, as the
            model may be moved until then, and says so in the log.
        strip_length (`int`): Tokens per strip, which is one batch row of the model. Each sample is padded to whole
            strips; per-row modulation takes memory in proportion to the rows.

    Returns:
        [`Packing`]: Its `pack` makes packs for [`packed_forward`].

    Raises:
        PackingError: If the family is unknown or the model cannot run such strips, the backend is unknown or not to
            be had on this machine, or packing is enabled already.
    """
    model = unwrap(transformer)
    family = family_of(model)
    if hasattr(model, ATTRIBUTE):
        raise PackingError("Packing is already enabled on this transformer; call disable_packing(transformer) first.")
    if strip_length < 1:
        raise PackingError(f"strip_length must be at least 1, got {strip_length}.")
    family.check(model, strip_length=strip_length)
    resolved = resolve_backend(backend)
    detach_family = family.attach(model, resolved)
    handle = keep_scalars_exact(model)

    def detach() -> None:
        handle.remove()
        detach_family()

    packing = Packing(transformer=model, family=family, strip_length=strip_length, backend=resolved, detach=detach)
    setattr(model, ATTRIBUTE, packing)
    return packing


def disable_packing(transformer: torch.nn.Module) -> None:
    """Put the original attention processors and positions back.

    Raises:
        PackingError: If packing is not enabled.
    """
    packing = packing_of(transformer)
    packing.detach()
    delattr(packing.transformer, ATTRIBUTE)
