"""Pipelines with small random weights."""

from __future__ import annotations

import os

import torch

from ..errors import BucketingError
from ..files import complete_folder
from ..models.registry import tiny_pipelines


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
    with complete_folder(folder, marker="model_index.json") as partial:
        pipeline.save_pretrained(str(partial))
