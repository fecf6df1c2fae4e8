"""What packing puts onto a transformer, kept on it as data, so that a copied or saved model carries its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from ..errors import PackingError
from .context import bind_checkpoints, keep_inputs_exact, release_checkpoints
from .family import Family
from .pack import Packing
from .unchanged import StockModules

ATTRIBUTE = "_hf_bucketing_packing"
"""Name under which a transformer carries its [`Attachment`]."""


@dataclass(frozen=True, kw_only=True)
class PackedAttention:
    """An attention module of a transformer: its stock processor, the one that runs packs, and how it projects."""

    name: str
    module: Any
    stock: Any
    packed: Any
    fused: bool

    @property
    def in_place(self) -> bool:
        """Whether the module is as packing left it."""
        return self.module.processor is self.packed and has_fused_projections(self.module) == self.fused


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """The hooks and attention processors of a packing on its transformer."""

    packing: Packing
    handles: tuple[Any, ...]
    attentions: tuple[PackedAttention, ...]
    stock: StockModules

    def check(self) -> None:
        """Raise PackingError if the transformer was changed since packing was enabled, see [`StockModules`]."""
        for attention in self.attentions:
            if not attention.in_place:
                raise PackingError(
                    f"The processor or the projections of {attention.name} were changed after enable_packing (its "
                    f"processor is a {type(attention.module.processor).__name__}), so it would not run a pack. Call "
                    "disable_packing(transformer), change the model, then enable_packing(transformer) again."
                )
        self.stock.check()

    def remove(self) -> None:
        """Restore the transformer as it was."""
        for handle in self.handles:
            handle.remove()
        for attention in self.attentions:
            _set_processor(attention.module, attention.stock)
        release_checkpoints(self.packing.transformer)
        delattr(self.packing.transformer, ATTRIBUTE)


def attach(packing: Packing) -> None:
    """Swap the attention processors of a packing's transformer and hook its positions."""
    model, family = packing.transformer, packing.family
    attentions = tuple(
        PackedAttention(
            name=name, module=module, stock=module.processor, packed=packed, fused=has_fused_projections(module)
        )
        for name, module in model.named_modules()
        if hasattr(module, "processor") and (packed := family.processor(name, packing.backend)) is not None
    )
    for attention in attentions:
        _check_processor(attention, family)
    stock = StockModules.of(model, attentions=[(attention.name, attention.module) for attention in attentions])
    stock.check()
    handles = keep_inputs_exact(model), *family.hook_positions(model, packing.base_size)
    for attention in attentions:
        _set_processor(attention.module, attention.packed)
    bind_checkpoints(model)
    setattr(model, ATTRIBUTE, Attachment(packing=packing, handles=handles, attentions=attentions, stock=stock))


def _set_processor(module: Any, processor: Any) -> None:
    """Give an attention module a processor; Mochi's has no method for that."""
    if hasattr(module, "set_processor"):
        module.set_processor(processor)
    else:
        module.processor = processor


def has_fused_projections(module: Any) -> bool:
    """Return whether diffusers fused the projections of an attention module."""
    return bool(getattr(module, "fused_projections", False))


def _check_processor(attention: PackedAttention, family: Family) -> None:
    """Refuse an attention module whose processor is not one that the packed processor replaces."""
    name, cls = attention.name, type(attention.stock)
    if cls.__name__ not in family.stock_processors or not cls.__module__.startswith("diffusers."):
        raise PackingError(
            f"{name} has the attention processor {cls.__module__}.{cls.__qualname__}, whose computation packing would "
            f"replace by that of diffusers' {' or '.join(family.stock_processors)}. Set one of these with "
            "set_processor, or train this model with bucketed batches, which work with any processor."
        )
    if attention.fused and "Fused" not in cls.__name__ and not family.processors_read_fusion:
        raise PackingError(
            f"{name} holds fused projections that its processor does not use, as diffusers' unfuse_qkv_projections "
            "leaves it; load the transformer again, or fuse it."
        )


def attachment_of(transformer: torch.nn.Module) -> Attachment:
    """Return the attachment of a transformer, wrapped or not.

    Raises:
        PackingError: If packing is not enabled.
    """
    bare = transformer if ATTRIBUTE in vars(transformer) else unwrap(transformer)  # which walks over all modules
    attachment: Attachment | None = getattr(bare, ATTRIBUTE, None)
    if attachment is None:
        raise PackingError("Packing is not enabled on this transformer; call enable_packing(transformer) first.")
    return attachment


def unwrap(transformer: torch.nn.Module) -> torch.nn.Module:
    """Return the transformer inside the wrappers of accelerate, torch.compile and peft."""
    model = extract_model_from_parallel(transformer, keep_torch_compile=False)
    # A PeftModel is recognised by its method, because peft need not be installed.
    base: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base
