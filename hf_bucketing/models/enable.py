"""Switch packing on and off on a stock transformer, and warn where diffusers calls it otherwise than was tested."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..errors import PackingError
from ..packing.attachment import ATTRIBUTE, attach, attachment_of, unwrap
from ..packing.attention.dispatch import announce_anew, resolve_backend
from ..packing.family import Family
from ..packing.names import Grid
from ..packing.pack import Packing
from ..plans.packs import PackPlanConfig
from .registry import family_of


def enable_packing(
    transformer: torch.nn.Module,
    *,
    backend: str = "auto",
    strip_length: int = PackPlanConfig.strip_length,
    positions: Literal["native", "interpolate"] = "native",
    base_size: Grid | None = None,
) -> Packing:
    """Swap the attention processors of a diffusers transformer and hook its positions, so that it runs packs.

    The module stays the stock one: LoRA, gradient checkpointing, DDP and `save_pretrained` keep working. A deep copy
    of it, such as an EMA model, or one that `torch.save` wrote, is packed by itself. The idea of packing comes from
    NaViT (Dehghani et al., 2023), its use for video from Open-Sora-Plan.

    Args:
        transformer (`torch.nn.Module`): A transformer of a known model family, bare or wrapped: the diffusers class
            itself, or a subclass that keeps its `forward`.
        backend (`"auto"`, `"segments"`, `"varlen"`, `"flex"` or `"dense"`): Backend of attention, see
            [`packed_attention`][hf_bucketing.packing.packed_attention]. `"auto"` chooses at the first forward, because
            the model may be moved until then, and logs its choice. diffusers' `set_attention_backend` does not apply.
        strip_length (`int`): Tokens per strip. Each sample is padded to whole strips; the memory of per-row modulation
            is proportional to the number of strips.
        positions (`"native"` or `"interpolate"`): Whether each token has the position that the model gives it in its
            sample alone, or every sample is stretched over the positions of one base size, so that no sample exceeds
            those that the model was trained with (NaViT's fractional positions, as in Open-Sora-Plan).
        base_size (`(t, h, w)`, *optional*): Token grid of the base size, for `"interpolate"`. Token `i` of an axis of
            `n` tokens gets the native position `i·base/n`.

    Returns:
        [`Packing`]: Its `pack` makes packs for [`packed_forward`][hf_bucketing.packing.packed_forward].

    Raises:
        PackingError: If no model family claims the class, it runs a `forward` or an attention processor that is not
            diffusers' own or a hook that may mix tokens, the model cannot run such strips, the backend is unknown or
            not available on this machine, or packing is enabled already.
    """
    if not isinstance(transformer, torch.nn.Module):
        kind = type(transformer).__name__
        raise PackingError(f"Expected a transformer, got {kind}; of a pipeline, pass pipeline.transformer.")
    model = unwrap(transformer)
    family = family_of(model)
    if hasattr(model, ATTRIBUTE):
        raise PackingError("Packing is already enabled on this transformer; call disable_packing(transformer) first.")
    if strip_length < 1:
        raise PackingError(f"strip_length must be at least 1, got {strip_length}.")
    warn_of_changes(family)
    family.check(model, strip_length=strip_length)
    _check_positions(model, family, positions, base_size)
    packing = Packing(
        transformer=model,
        family=family,
        strip_length=strip_length,
        backend=resolve_backend(backend),
        base_size=base_size,
    )
    attach(packing)
    announce_anew()
    return packing


def _check_positions(model: torch.nn.Module, family: Family, positions: str, base_size: Grid | None) -> None:
    if positions not in ("native", "interpolate") or (positions == "interpolate") != (base_size is not None):
        raise PackingError(
            "Use positions='native', or positions='interpolate' with base_size=(frames, rows, columns) in tokens; got "
            f"{positions!r} and {base_size}."
        )
    if base_size is None:
        return
    if not family.interpolates:
        raise PackingError(f"{type(model).__name__} has no positions to stretch to a base size; use 'native'.")
    if len(base_size) != 3 or min(base_size) < 1:
        raise PackingError(f"base_size must be three positive counts (frames, rows, columns), got {base_size}.")
    family.check_grid(model, base_size)


def disable_packing(transformer: torch.nn.Module) -> None:
    """Restore the original attention processors and positions of this transformer; its copies stay as they are.

    Raises:
        PackingError: If packing is not enabled.
    """
    attachment_of(transformer).remove()


@contextmanager
def packing_disabled(transformer: torch.nn.Module) -> Iterator[None]:
    """Disable packing inside a `with` block and enable the same packing after it.

    Raises:
        PackingError: If packing is not enabled.
    """
    attachment = attachment_of(transformer)
    attachment.remove()
    try:
        yield
    finally:
        attach(attachment.packing)


logger = logging.getLogger(__name__)


def warn_of_changes(family: Family) -> None:
    """Log a warning if the installed diffusers has changed the code that packing runs in another way or replaces."""
    import diffusers

    if stock_digest(family) not in family.tested_forwards:
        logger.warning(
            "diffusers %s runs %s in another way than the versions that packing was tested with. Compare packs with "
            "single samples by verify_packing(transformer), or install a version that constraints.txt names.",
            diffusers.__version__,
            family.transformer_class,
        )


@functools.cache
def stock_digest(family: Family) -> str:
    """Return a digest of every `forward` and `__call__` in the module of diffusers that defines the family's class.

    Docstrings do not enter it. The blocks and the stock processors are in that module too.
    """
    import diffusers

    module: Any = inspect.getmodule(getattr(diffusers, family.transformer_class))
    source = inspect.getsource(module)
    lines, parts = source.split("\n"), []
    for cls in ast.parse(source).body:
        for node in cls.body if isinstance(cls, ast.ClassDef) else []:
            if isinstance(node, ast.FunctionDef) and node.name in ("forward", "__call__"):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                parts += [cls.name, node.name, ast.unparse(node.args)]  # type: ignore[attr-defined]
                parts += [_segment(lines, statement) for statement in body]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _segment(lines: list[str], node: ast.stmt) -> str:
    """Return what `ast.get_source_segment` does, which splits the whole module into lines for each statement."""
    assert node.end_lineno is not None
    text = "\n".join(lines[node.lineno - 1 : node.end_lineno]).encode()  # offsets count bytes
    behind = len(lines[node.end_lineno - 1].encode()) - (node.end_col_offset or 0)
    return text[node.col_offset : len(text) - behind].decode()
