"""Frozen weights in eight or four bits under LoRA, by diffusers' own configurations of torchao and bitsandbytes."""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import BucketingError
from .blocks import members_of_lists
from .settings import Quantization


def check_package(kind: Quantization | None) -> None:
    """Raise BucketingError if the package is missing that quantises the weights, if any does."""
    if kind is not None:
        _import_package(kind)


def quantization_of(kind: Quantization | None, transformer: torch.nn.Module, *, dtype: torch.dtype) -> Any:
    """Return diffusers' configuration for the frozen weights of a transformer; None where they are not quantised.

    int8 has a scale per output channel, as has float8 (e4m3); nf4 is QLoRA's (Dettmers et al., 2023), with quantised
    scales.

    Args:
        kind (`"int8"`, `"float8"` or `"nf4"`, *optional*): Format of the weights.
        transformer (`torch.nn.Module`): The transformer, whose weights may be missing.
        dtype (`torch.dtype`): Precision in which layers compute.
    """
    if kind is None:
        return None
    from diffusers import BitsAndBytesConfig, TorchAoConfig

    kept = kept_linears(transformer)
    if kind == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=kept,  # of four bits too, in spite of its name
        )
    torchao = _import_package(kind)
    # What it says is about merging adapters into the weights, which training never does.
    warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")
    kinds = {"int8": torchao.Int8WeightOnlyConfig, "float8": torchao.Float8WeightOnlyConfig}
    return TorchAoConfig(_forgetful(kinds[kind])(), modules_to_not_convert=kept)


@functools.cache
def _forgetful(kind: type) -> type:
    """Return a configuration of torchao that also lets the memory of the weights go that it has quantised.

    They lie in mapped files, of which every page that was read counts as memory of the process until its end.
    """
    from torchao.quantization import quantize_
    from torchao.quantization.transform_module import register_quantize_module_handler

    forgetful = type(kind.__name__, (kind,), {})  # diffusers asks for the name

    @register_quantize_module_handler(forgetful)  # type: ignore[untyped-decorator, unused-ignore]
    def quantize(module: torch.nn.Module, _config: Any) -> torch.nn.Module:
        weight: Any = module.weight
        quantize_(module, kind())
        _forget(weight.detach())
        return module

    return forgetful


def _forget(tensor: torch.Tensor) -> None:
    """Give back the whole pages of a tensor on the CPU, which nobody reads again, and what was freed around it."""
    libc = ctypes.CDLL(None)
    if tensor.device.type != "cpu" or not hasattr(libc, "malloc_trim"):  # only glibc keeps what is freed
        return
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    length = (tensor.data_ptr() + tensor.nbytes) // page * page - start
    if length > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
    libc.malloc_trim(0)


def _import_package(kind: str) -> Any:
    try:
        if kind == "nf4":
            import bitsandbytes

            return bitsandbytes
        from torchao import quantization

        return quantization
    except ImportError as error:
        package = "bitsandbytes" if kind == "nf4" else "torchao"
        raise BucketingError(
            f'`quantize_base="{kind}"` needs {package}: pip install "hf_bucketing[quantization]", or omit it.'
        ) from error


def quantized_linears(transformer: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the layers whose weights `quantize_base` quantises, by name; call it before adapters are added.

    These are the linear layers of the blocks and of what runs between them, which hold nearly all weights. Embeddings,
    the last projection and what else lies outside stay as they are, and so do modulations and others that diffusers
    names for a model as too sensitive for eight bits (`_skip_layerwise_casting_patterns`) or keeps in float32.
    musubi-tuner's eight-bit weights are those of the blocks too; it leaves out the modulations of FLUX.2 and Z-Image,
    not those of Qwen-Image.
    """
    kept = set(kept_linears(transformer))
    return {name: layer for name, layer in _linears(transformer).items() if name not in kept}


def kept_linears(transformer: torch.nn.Module) -> list[str]:
    """Return the names of the linear layers that are not quantised, see [`quantized_linears`]."""
    within = {id(module) for member in members_of_lists(transformer) for module in member.modules()}
    patterns = [
        *(getattr(transformer, "_skip_layerwise_casting_patterns", None) or ()),
        *(getattr(transformer, "_keep_in_fp32_modules", None) or ()),
    ]
    names = {
        name: id(layer) in within and not any(re.search(pattern, name) for pattern in patterns)
        for name, layer in _linears(transformer).items()
    }
    quantized = [f"{name}." for name, is_quantized in names.items() if is_quantized]
    kept = [name for name, is_quantized in names.items() if not is_quantized]
    # The quantisers also keep each layer whose name ends with that of a kept one: the last projection of Flux shares
    # its name, `proj_out`, with layers of the blocks. Such a layer is quantised as well.
    return [name for name in kept if not any(f"{name}." in other for other in quantized)]


def _linears(transformer: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: layer for name, layer in transformer.named_modules() if isinstance(layer, torch.nn.Linear)}


def leave_frozen_weights_to_each_process(transformer: torch.nn.Module) -> None:
    """Make DDP send no frozen weights when it starts: each process has loaded them, and quantised ones do not go."""
    frozen = [name for name, parameter in transformer.named_parameters() if not parameter.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen)
