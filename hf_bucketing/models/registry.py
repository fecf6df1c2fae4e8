"""Find the model family of a transformer and the training recipe of a pipeline.

Every folder beside this one is a model family: its `packing.py` has the `FAMILY`. If its pipelines can be trained, its
`recipe.py` has `RECIPES`; where a pipeline cannot be trained, it has `REFUSED`, the reason by its class. Nothing else
lists them, and nothing is imported before the first look-up.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BucketingError, HubError, PackingError
from ..packing.family import Family
from ..packing.unchanged import replaced_forward
from .index import read_index
from .unpackable import OTHER_KINDS, UNPACKABLE, UNTRAINED

if TYPE_CHECKING:
    from .recipe import Recipe


@functools.cache
def families() -> dict[str, Family]:
    """Return the model families by the name of their transformer class in diffusers."""
    return {module.FAMILY.transformer_class: module.FAMILY for module in _modules("packing")}


@functools.cache
def recipes() -> dict[str, type[Recipe]]:
    """Return the training recipes by the name of their pipeline class in diffusers."""
    return {recipe.pipeline_class: recipe for module in _modules("recipe") for recipe in module.RECIPES}


@functools.cache
def refused_pipelines() -> dict[str, str]:
    """Return why pipelines of known transformers cannot be trained, by the name of their class in diffusers."""
    refused = {name: why for module in _modules("recipe") for name, why in getattr(module, "REFUSED", {}).items()}
    return {**refused, **UNTRAINED}


def _modules(name: str) -> Iterator[ModuleType]:
    """Import a module of that name from every folder of a model family that has one."""
    package = importlib.import_module(__package__)
    for folder in pkgutil.iter_modules(package.__path__):
        module = f"{__package__}.{folder.name}.{name}"
        if folder.ispkg and importlib.util.find_spec(module) is not None:
            yield importlib.import_module(module)


def family_of(transformer: torch.nn.Module) -> Family:
    """Return the model family of a diffusers transformer, or of a subclass that keeps the stock `forward`.

    Raises:
        PackingError: If no family claims the class (with the reason, where there is one), or a subclass or the model
            has a `forward` of its own, which may do across tokens what packing does not see.
    """
    cls = type(transformer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    stock: Any = next((base for base in cls.__mro__ if base.__name__ in families() and _is_stock(base)), None)
    if stock is None:
        for base in cls.__mro__:
            if base.__name__ in UNPACKABLE and _is_stock(base):
                raise PackingError(
                    f"{name} cannot be packed: {UNPACKABLE[base.__name__]}. Train this model with bucketed batches."
                )
            if base.__name__ in OTHER_KINDS and _is_stock(base):
                raise PackingError(
                    f"{name} does not make images or videos from text, for which packing is: it "
                    f"{OTHER_KINDS[base.__name__]}."
                )
        known = ", ".join(sorted(families()))
        disguised = (
            f" (diffusers has a {cls.__name__}, but this is another class)" if cls.__name__ in families() else ""
        )
        raise PackingError(
            f"Packing does not know {name}{disguised}; it knows the diffusers classes {known}. Train this model with "
            "bucketed batches, which work with any model, or write a family for it (docs/models/adding-a-model.md)."
        )
    if cls.forward is not stock.forward:
        raise PackingError(
            f"{name} overrides the forward of diffusers' {stock.__name__}, so packing cannot know how it treats the "
            "tokens of several samples. Use the stock class, or train this model with bucketed batches."
        )
    if (code := replaced_forward(transformer)) is not None:
        raise PackingError(
            f"The forward of this {name} was replaced by {code}, so packing cannot know how it treats the tokens of "
            "several samples. Delete transformer.forward, or train this model with bucketed batches."
        )
    return families()[stock.__name__].variant(transformer)


def _is_stock(cls: type[Any]) -> bool:
    """Return whether a class is the one of that name in diffusers."""
    return cls is getattr(importlib.import_module("diffusers"), cls.__name__, None)


def recipe_of(name_or_path: str) -> type[Recipe]:
    """Return the recipe of a pipeline on the hub or in a folder, by the class that its index names.

    Raises:
        BucketingError: If there is no pipeline, or no recipe for it.
    """
    try:
        index = read_index(name_or_path)
    except HubError:
        raise
    except BucketingError as error:
        raise BucketingError(f"{name_or_path} is no diffusers pipeline: {error}") from error
    name = index.class_name
    if name in refused_pipelines():
        raise BucketingError(f"{name_or_path} is a {name}, which cannot be trained: {refused_pipelines()[name]}.")
    if name not in recipes():
        kinds = {entry.class_name for entry in index.components.values()} & UNPACKABLE.keys()
        why = "".join(f" Its {kind} cannot be packed: {UNPACKABLE[kind]}." for kind in sorted(kinds))
        raise BucketingError(
            f"{name_or_path} is a {name}; there are training recipes for {', '.join(sorted(recipes()))}.{why}"
        )
    return recipes()[name]
