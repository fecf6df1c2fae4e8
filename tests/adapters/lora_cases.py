"""LoRA weights for the transformer of every family, at exact values, as trainers would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from safetensors import safe_open

from hf_bucketing.adapters.files import DOWN, UP, Adapters, Pair
from hf_bucketing.adapters.original_names import original_layers
from tests.models.families import CASES

RANK, ALPHA = 4, 16
_FAMILIES = {
    "wan": ("WanPipeline", "wan"),
    "wan-i2v": ("WanImageToVideoPipeline", "wan image"),
    "skyreels-v2": ("SkyReelsV2Pipeline", "skyreels-v2"),
    "chronoedit": ("ChronoEditPipeline", "chronoedit"),
    "ltx": ("LTXPipeline", "ltx"),
    "ltx2": ("LTX2Pipeline", "ltx2"),
    "qwen-image": ("QwenImagePipeline", "qwen-image"),
    "qwen-image-2.1": ("QwenImage21Pipeline", "qwen-image-2.1"),
    "z-image": ("ZImagePipeline", "z-image"),
    "flux": ("FluxPipeline", "flux"),
    "chroma": ("ChromaPipeline", "chroma"),
    "sd3": ("StableDiffusion3Pipeline", "sd3"),
    "ernie-image": ("ErnieImagePipeline", "ernie-image"),
    "ideogram4": ("Ideogram4Pipeline", "ideogram4"),
    "kandinsky5": ("Kandinsky5T2VPipeline", "kandinsky5"),
    "krea2": ("Krea2Pipeline", "krea2"),
    "flux2": ("Flux2Pipeline", "flux.2"),
    "hunyuan-video": ("HunyuanVideoPipeline", None),
}
FAMILIES = {
    name: (pipeline, case)
    for name, (pipeline, case) in _FAMILIES.items()
    if hasattr(diffusers, pipeline) and (case is None or case in CASES)
}
"""Pipeline class and case of the families whose names in ComfyUI are proven, of those that this diffusers has."""
REFUSED = {
    "wan-vace": ("WanVACEPipeline", "wan-vace"),
    "mochi": ("MochiPipeline", "mochi"),
    "cogvideox": ("CogVideoXPipeline", "cogvideox"),
    "cogview4": ("CogView4Pipeline", "cogview4"),
    "lumina2": ("Lumina2Pipeline", "lumina2"),
}
"""The same of families that load LoRA, but not from other names."""


def make_model(name: str) -> tuple[type[Any], Any]:
    """Return a pipeline class and a small transformer; that of HunyuanVideo has the width diffusers expects."""
    pipeline, case = (FAMILIES | REFUSED)[name]
    if case is not None:
        return getattr(diffusers, pipeline), CASES[case].make()
    with init_empty_weights():
        wide = diffusers.HunyuanVideoTransformer3DModel(num_layers=1, num_single_layers=1, mlp_ratio=0.1)
    return getattr(diffusers, pipeline), wide


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


def peer_file(transformer: torch.nn.Module, *, writer: str, alpha: float | None) -> tuple[dict, dict]:
    """Return a file as a trainer writes it, and the change of each module by hand.

    kohya and musubi-tuner flatten names and write alphas, ai-toolkit and the LTX-2 trainer write none, SimpleTuner
    writes them beside peft's names, DiffSynth writes bare names. All train fused layers as one.
    """
    down_end, up_end = (".lora_down.weight", ".lora_up.weight") if writer == "kohya" else (DOWN, UP)
    if writer == "bare":
        down_end, up_end = ".lora_A.default.weight", ".lora_B.default.weight"
    file, changes = {}, {}
    for layer, parts in original_layers(transformer).items():
        inputs = transformer.get_submodule(next(iter(parts))).in_features
        down, up = drawn(RANK, inputs), drawn(sum(parts.values()), RANK)
        stem = {"kohya": f"lora_unet_{layer.replace('.', '_')}", "bare": layer}.get(writer, f"diffusion_model.{layer}")
        file |= {stem + down_end: down, stem + up_end: up}
        if alpha is not None:
            file[f"{stem}.alpha"] = torch.tensor(alpha)
        whole = (1 if alpha is None else alpha / RANK) * (up.double() @ down.double())
        changes |= dict(zip(parts, whole.split(list(parts.values())), strict=True))
    return file, changes


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as opened:
        return opened.metadata() or {}
