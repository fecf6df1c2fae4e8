"""Pipelines with small random weights: a module for each of `models/families/`, whose `TINY` makes them by name."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import diffusers
import torch
from packaging.version import Version

from ...errors import BucketingError
from ...files import complete_folder
from ...models.index import MODULAR_INDEX

NEWEST = Version("0.42.1")
"""Version of diffusers that has all models with a pipeline here."""


@functools.cache
def tiny_pipelines() -> dict[str, Callable[[], Any]]:
    """Return functions that make pipelines of small random weights, by name."""
    modules = importable_modules(__name__, __path__)
    return {name: make for module in modules for name, make in getattr(module, "TINY", {}).items()}


def importable_modules(package: str, path: Iterable[str]) -> list[ModuleType]:
    """Return the modules of a package, without those about models that an older diffusers does not have."""
    modules = []
    for module in pkgutil.iter_modules(path):
        try:
            modules.append(importlib.import_module(f"{package}.{module.name}"))
        except (ImportError, AttributeError, RuntimeError) as error:  # diffusers raises the last for its own modules
            if Version(diffusers.__version__) >= NEWEST or not re.search("diffusers|transformers", str(error)):
                raise
    return modules


def make_tiny_pipeline(folder: str | os.PathLike[str], *, family: str = "wan", seed: int = 0) -> None:
    """Save a pipeline with the components of a model family's own, of a few thousand weights each.

    Its tokenizer works on bytes and needs no vocabulary file. The VAE's latents have mean 0 and deviation 1, as those
    of the trained VAE. The folder appears under its name only when it is complete, and replaces an earlier one.

    Args:
        folder (path): Folder to write.
        family (`str`): Name of the pipeline, such as `"wan"`, `"ltx"` or `"latte"`; every model family that can be
            trained has one or more.
        seed (`int`): Seed of the weights.

    Raises:
        BucketingError: If the folder exists and is not a pipeline, or there is none of that name.
    """
    makers = tiny_pipelines()
    if family not in makers:
        raise BucketingError(f"There is no tiny {family!r} pipeline; choose one of {', '.join(sorted(makers))}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = makers[family]()
    with complete_folder(folder, marker=pipeline.config_name) as partial:
        modular = {"overwrite_modular_index": True} if pipeline.config_name == MODULAR_INDEX else {}
        pipeline.save_pretrained(str(partial), **modular)
