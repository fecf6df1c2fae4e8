"""LoRA weights for the transformer of every family, at exact values, as trainers would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights

from hf_bucketing.adapters.files import DOWN, UP, Adapters, Pair
from hf_bucketing.adapters.original_names import original_layers
from hf_bucketing.models.loading import empty_transformer
from tests.models.families import RECIPES

RANK, ALPHA = 4, 16
FAMILIES = (
    "wan", "wan-i2v", "skyreels-v2", "chronoedit", "ltx", "ltx2", "qwen-image", "z-image", "flux", "chroma", "sd3",
    "kandinsky5", "flux2", "hunyuan-video",
)  # fmt: skip
"""Tiny pipelines of the families whose names in ComfyUI are proven."""
REFUSED = ("wan-vace", "mochi", "cogvideox", "cogview4", "lumina2")
"""Tiny pipelines of families that load LoRA, but not from other names."""


def empty(name: str, tiny_folder: Callable[[str], Path]) -> tuple[type[Any], Any]:
    """Return the pipeline class and the transformer without values; diffusers expects one width of HunyuanVideo."""
    if name == "hunyuan-video":
        with init_empty_weights():
            wide = diffusers.HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=2, mlp_ratio=0.1)
        return diffusers.HunyuanVideoPipeline, wide
    folder = tiny_folder(RECIPES[name].tiny)
    pipeline_class = getattr(diffusers, diffusers.DiffusionPipeline.load_config(folder)["_class_name"])
    return pipeline_class, empty_transformer(str(folder), "transformer")


def drawn(*shape: int) -> torch.Tensor:
    """Return sixteenths, whose sums and products are exact."""
    return torch.randint(-8, 9, shape) / 16


def draw_adapters(transformer: Any, path: Path, *, alpha: int | None = ALPHA) -> Adapters:
    """Return adapters of all modules with a known name: every third without, the others of two ranks."""
    modules = [module for parts in original_layers(transformer).values() for module in parts]
    modules = modules or [name for name, _ in transformer.named_modules() if name.endswith("to_q")]
    weights = {}
    for number, module in enumerate(modules):
        if number % 3 < 2:
            layer, rank = transformer.get_submodule(module), RANK // (1 + number % 2)
            weights |= {
                module + DOWN: drawn(rank, layer.in_features),
                module + UP: drawn(layer.out_features, rank),
            }
    return Adapters(path=path, weights=weights, alpha=alpha)


def change(pair: Pair) -> torch.Tensor:
    """Return the change that a pair makes, exact in float64."""
    down, up = (value.double() for value in pair)
    return up @ down
