"""Fingerprints of parts of a pipeline: of its encoders, for caches, and of the weights that a run begins with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ..models.recipe import Recipe

RULE_VERSION = 1
"""Raised when a recipe encodes otherwise than before."""


def latents_fingerprint(recipe: Recipe) -> str:
    """Return sixteen hex digits that change with the VAE's class, configuration or weights, or with the recipe."""
    return _digest(type(recipe).__name__, recipe.pipeline.vae)


def text_fingerprint(recipe: Recipe) -> str:
    """Return sixteen hex digits that change with all that encodes captions.

    That is the text encoder's class, configuration, weights and their dtype, the tokenizer, the recipe and the number
    of text tokens.
    """
    tokenizer = recipe.pipeline.tokenizer
    rules = {
        "class": type(tokenizer).__name__,
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "max_sequence_length": recipe.max_sequence_length,
    }
    return _digest(type(recipe).__name__, recipe.pipeline.text_encoder, rules)


def _digest(recipe: str, module: torch.nn.Module, *more: Any) -> str:
    digest = hashlib.sha256()
    config: Any = module.config
    config = config if isinstance(config, dict) else config.to_dict()
    # What was loaded from where, by which release, in which dtype, is not what is computed; weights tell their dtype.
    incidental = {"transformers_version", "torch_dtype", "dtype"}
    settings = {name: value for name, value in config.items() if name[0] != "_" and name not in incidental}
    about = [RULE_VERSION, recipe, type(module).__name__, settings, *more]
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


_BLOCKS, _BLOCK = 16, 64
"""Parts of a tensor that a fingerprint of weights reads, and numbers in each."""


def weights_fingerprints(pipeline: Any) -> dict[str, str]:
    """Return sixteen hex digits for each model of a pipeline that change with its weights, by component.

    Read are names, dtypes, shapes and about a thousand numbers of each tensor, spread over it: other weights change
    all tensors, and a model of 14 billion weights takes a second instead of minutes. A change of a few numbers
    elsewhere is not seen.

    Args:
        pipeline (`DiffusionPipeline`): As loaded, before adapters are added or dtypes changed.
    """
    return {
        name: _sampled_digest(component)
        for name, component in sorted(pipeline.components.items())
        if isinstance(component, torch.nn.Module)
    }


def _sampled_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        if len(flat) > _BLOCKS * _BLOCK:
            last = len(flat) - _BLOCK
            flat = torch.cat([flat[start : start + _BLOCK] for start in range(0, last + 1, last // (_BLOCKS - 1))])
        digest.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
