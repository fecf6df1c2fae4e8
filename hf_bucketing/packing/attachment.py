"""What packing puts onto a transformer, kept on it as data, so that a copied or saved model carries its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import extract_model_from_parallel

from ..errors import PackingError
from .context import keep_scalars_exact

if TYPE_CHECKING:
    from .pack import Packing

ATTRIBUTE = "_hf_bucketing_packing"
"""Name under which a transformer carries its [`Attachment`]."""


@dataclass(frozen=True, kw_only=True)
class PackedAttention:
    """An attention module of a transformer: its own processor, and the one that runs packs."""

    name: str
    module: Any
    own: Any
    packed: Any


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """The hooks and attention processors of a packing on its transformer."""

    packing: Packing
    handles: tuple[Any, ...]
    attentions: tuple[PackedAttention, ...]

    def remove(self) -> None:
        """Restore the transformer as it was."""
        for handle in self.handles:
            handle.remove()
        for attention in self.attentions:
            attention.module.set_processor(attention.own)
        delattr(self.packing.transformer, ATTRIBUTE)


def attach(packing: Packing) -> None:
    """Swap the attention processors of a packing's transformer and hook its positions."""
    model, family = packing.transformer, packing.family
    attentions = tuple(
        PackedAttention(name=name, module=module, own=module.processor, packed=packed)
        for name, module in model.named_modules()
        if hasattr(module, "set_processor") and (packed := family.processor(name, packing.backend)) is not None
    )
    handles = *family.hook_positions(model, packing.base_size), keep_scalars_exact(model)
    for attention in attentions:
        attention.module.set_processor(attention.packed)
    setattr(model, ATTRIBUTE, Attachment(packing=packing, handles=handles, attentions=attentions))


def attachment_of(transformer: torch.nn.Module) -> Attachment:
    """Return the attachment of a transformer, wrapped or not.

    Raises:
        PackingError: If packing is not enabled.
    """
    attachment: Attachment | None = getattr(unwrap(transformer), ATTRIBUTE, None)
    if attachment is None:
        raise PackingError("Packing is not enabled on this transformer; call enable_packing(transformer) first.")
    return attachment


def unwrap(transformer: torch.nn.Module) -> torch.nn.Module:
    """Return the transformer inside the wrappers of accelerate, torch.compile and peft."""
    model = extract_model_from_parallel(transformer, keep_torch_compile=False)
    # A PeftModel is recognised by its method, because peft need not be installed.
    base: torch.nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base
