"""Find the model family of a transformer and the training recipe of a pipeline.

Every folder beside this one is a model family: its `packing.py` has the `FAMILY`. If its pipelines can be trained, its
`recipe.py` has `RECIPES`; where a pipeline cannot be trained, it has `REFUSED`, the reason by its class. Nothing else
lists them. A look-up by the name of a class imports the modules that name it, and no others.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
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


@functools.cache
def find_family(transformer_class: str) -> Family | None:
    """Return the model family of a transformer class in diffusers by its name; None if there is none."""
    named = (module.FAMILY for module in _modules("packing", naming=transformer_class))
    return next((family for family in named if family.transformer_class == transformer_class), None)


@functools.cache
def find_recipe(pipeline_class: str) -> type[Recipe] | None:
    """Return the training recipe of a pipeline class in diffusers by its name; None if there is none."""
    named = (recipe for module in _modules("recipe", naming=pipeline_class) for recipe in module.RECIPES)
    return next((recipe for recipe in named if recipe.pipeline_class == pipeline_class), None)


def _modules(name: str, *, naming: str = "") -> Iterator[ModuleType]:
    """Import a module of that name from every folder of a model family that has one, and whose text names a class."""
    package = importlib.import_module(__package__)
    for folder in pkgutil.iter_modules(package.__path__):
        file = Path(*package.__path__, folder.name, f"{name}.py")
        if file.is_file() and naming in file.read_text(encoding="utf-8"):
            yield importlib.import_module(f"{__package__}.{folder.name}.{name}")


def family_of(transformer: torch.nn.Module) -> Family:
    """Return the model family of a diffusers transformer, or of a subclass that keeps the stock `forward`.

    Raises:
        PackingError: If no family claims the class (with the reason, where there is one), or a subclass or the model
            has a `forward` of its own, which may do across tokens what packing does not see.
    """
    cls = type(transformer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    stock: Any = None
    family = None
    for base in cls.__mro__:
        if _is_stock(base) and (family := find_family(base.__name__)) is not None:
            stock = base
            break
    if family is None:
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
    return family.variant(transformer)


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
    recipe = find_recipe(name)
    if recipe is not None:
        return recipe
    if name in refused_pipelines():
        raise BucketingError(f"{name_or_path} is a {name}, which cannot be trained: {refused_pipelines()[name]}.")
    kinds = {entry.class_name for entry in index.components.values()} & UNPACKABLE.keys()
    why = "".join(f" Its {kind} cannot be packed: {UNPACKABLE[kind]}." for kind in sorted(kinds))
    raise BucketingError(
        f"{name_or_path} is a {name}; there are training recipes for {', '.join(sorted(recipes()))}.{why}"
    )
