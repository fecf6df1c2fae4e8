"""Training where each process holds a part of the weights (FSDP2, DeepSpeed), and tensors whole and in parts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    broadcast,
    broadcast_object_list,
    convert_outputs_to_fp32,
    load,
)
from diffusers.training_utils import EMAModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as parts
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from ..caching.fingerprints import weights_fingerprints
from ..loaders.trust import only_values
from ..models.recipe import Recipe
from ..packing.context import exact_inputs, keep_inputs_exact
from .blocks import block_names
from .conflicts import Sharding

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Distributed types in which no process holds all weights."""


AVERAGES = "averaged_weights.safetensors"
"""File of a checkpoint with the averages of sharded weights, by their number."""


HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Type of numbers in each mixed precision."""


def sharding_of(accelerator: Accelerator) -> Sharding:
    """Return how the processes of an accelerator share the weights."""
    kind = accelerator.distributed_type
    if kind not in SHARDED:
        return "ddp"
    if kind == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp"
    return "deepspeed stage 3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "deepspeed"


def configure_deepspeed(accelerator: Accelerator, *, accumulation_steps: int, max_grad_norm: float) -> None:
    """Give DeepSpeed the settings that it applies itself, in place of those of accelerate's configuration."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": 1,  # which it demands and only prints: batches have different sizes
            "gradient_accumulation_steps": accumulation_steps,
            "gradient_clipping": max_grad_norm,
        }


def loads_once(accelerator: Accelerator) -> bool:
    """Return whether the main process alone loads the transformer to train, and the others get their shares of it."""
    return bool(accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading)


def wraps_blocks(accelerator: Accelerator) -> bool:
    """Return whether FSDP checkpoints all blocks itself."""
    fsdp = accelerator.distributed_type == DistributedType.FSDP
    return fsdp and bool(accelerator.state.fsdp_plugin.activation_checkpointing)


def loads_empty(accelerator: Accelerator) -> bool:
    """Return whether this process builds the transformer to train without weights, see [`loads_once`]."""
    return loads_once(accelerator) and not accelerator.is_main_process


def fingerprints_of(recipe: Recipe, accelerator: Accelerator) -> dict[str, str]:
    """Return the fingerprints of the weights that a run begins with.

    Where the main process alone has loaded the transformer, it sends them, and the others reserve memory for weights:
    addresses, by which accelerate knows parameters, and no pages as long as nothing is written there.
    """
    if not loads_once(accelerator):
        return weights_fingerprints(recipe.pipeline)
    transformer = recipe.transformer
    shared: list[Any] = [None]
    if accelerator.is_main_process:
        dtypes = {name: value.dtype for name, value in transformer.named_parameters()}
        shared = [(weights_fingerprints(recipe.pipeline), dtypes)]
    fingerprints, dtypes = broadcast_object_list(shared)[0]
    if not accelerator.is_main_process:
        for name, empty in list(transformer.named_parameters()):
            module, _, own_name = name.rpartition(".")
            value = torch.empty(empty.shape, dtype=dtypes[name])
            setattr(transformer.get_submodule(module), own_name, torch.nn.Parameter(value, empty.requires_grad))
    return dict(fingerprints)


@contextmanager
def sending_weights(transformer: torch.nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Send each process its share of the weights if [`loads_once`]; prepare the transformer in the `with` block.

    accelerate's own way of sending them needs methods that only models of transformers have.
    """
    if not loads_once(accelerator):
        yield
        return
    weights = transformer.state_dict() if accelerator.is_main_process else {}
    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = True
    set_model_state_dict(
        transformer, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )


@contextmanager
def block_by_block(transformer: torch.nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Make FSDP gather one block at a time; prepare the transformer inside the `with` block.

    Of a model that does not name its blocks for it (`_no_split_modules`), accelerate would gather all weights at once,
    and checkpoint no activations. Names in accelerate's own configuration count first.
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None
    if plugin is None or plugin.transformer_cls_names_to_wrap is not None:
        yield
        return
    plugin.transformer_cls_names_to_wrap = block_names(transformer)
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap = None


@contextmanager
def sharded_adapters(transformer: torch.nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Make FSDP2 compute with adapters as DDP does; prepare the transformer inside the `with` block.

    Weights are gathered in the precision in which they are kept, and autocast computes in the accelerator's; by
    default FSDP2 would cast the adapters and their gradients. Checkpoints of accelerate hold the adapters only.
    """
    if not accelerator.is_fsdp2:
        yield
        return
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if not loads_once(accelerator):
        for parameter in transformer.parameters():
            if parameter.requires_grad:  # drawn in each process
                parameter.data.copy_(broadcast(parameter.data.to(accelerator.device)))
    yield
    _autocast(transformer, accelerator)
    transformer.register_state_dict_post_hook(_without_frozen)
    transformer.register_load_state_dict_post_hook(_frozen_may_miss)


def _autocast(transformer: Any, accelerator: Accelerator) -> None:
    """Make a transformer compute in the accelerator's precision and return float32, as accelerate does under DDP."""
    half = HALF.get(accelerator.mixed_precision)
    if half is not None:
        autocast = torch.autocast(accelerator.device.type, dtype=half)
        transformer.forward = convert_outputs_to_fp32(autocast(transformer.forward))


def _without_frozen(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Remove frozen weights from a state."""
    for name in _frozen(module):
        del state[prefix + name]


def _frozen_may_miss(module: torch.nn.Module, keys: Any) -> None:
    """Let a state be loaded that has no frozen weights."""
    frozen = _frozen(module)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name_in_files(name) not in frozen]


def _frozen(module: torch.nn.Module) -> set[str]:
    """Return the names of frozen weights in the state of a module."""
    trained = {name for name, parameter in named_weights(module) if parameter.requires_grad}
    return {name for name, _ in named_weights(module)} - trained


@contextmanager
def rendering_in_lockstep(recipe: Recipe) -> Iterator[None]:
    """Let a pipeline call a sharded transformer inside a `with` block, which every process enters.

    Timesteps and positions stay exact where FSDP casts inputs, and see [`resharded`].
    """
    transformer: torch.nn.Module = recipe.transformer
    if not isinstance(transformer, FSDPModule):
        yield
        return
    calls = ExitStack()

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        calls.enter_context(exact_inputs(kwargs, cast=recipe.family.cast_inputs))

    def after(*_: object) -> None:
        calls.close()

    # FSDP's own hook, which casts, runs between the first and the second.
    hooks = [
        transformer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        keep_inputs_exact(transformer),
        transformer.register_forward_hook(after, always_call=True),
    ]
    try:
        with resharded(transformer):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def resharded(transformer: torch.nn.Module) -> Iterator[None]:
    """Free what FSDP gathers for forwards without backward inside a `with` block.

    FSDP keeps the weights of its outermost module after such a forward, and the next one would take them for the
    present ones.
    """
    try:
        yield
    finally:
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def name_in_files(name: str) -> str:
    """Return the name of a weight or a module in files, which does not show FSDP's activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a module by their names in files."""
    for name, parameter in module.named_parameters():
        yield name_in_files(name), parameter


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor whole and on the CPU in the main process, empty in others; call it on every process.

    Tensors that are whole already are returned as they are.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor.detach().to(tensor.device_mesh.device_type)
    full: torch.Tensor = sharded.full_tensor()
    return full.cpu() if PartialState().is_main_process else full.new_empty(0, device="cpu")


@torch.no_grad()
def copy_full(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor, which every process has, to `target`, of which each may hold a part."""
    if isinstance(target, DTensor):
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(full)


def averaged(weights: Sequence[torch.nn.Parameter], *, decay: float, accelerator: Accelerator) -> EMAModel:
    """Return the moving average of weights, in float32, and make accelerate's checkpoints hold it."""
    kind = _ShardedEMAModel if accelerator.distributed_type in SHARDED else EMAModel
    average = kind(weights, decay=decay)
    average.to(dtype=torch.float32)  # in bf16, small changes of an average are lost
    accelerator.register_for_checkpointing(average)
    if isinstance(average, _ShardedEMAModel):
        accelerator.register_save_state_pre_hook(average.save)
        accelerator.register_load_state_pre_hook(average.load)
    return average


class _ShardedEMAModel(EMAModel):
    """Averaged weights of which each process holds its part, and a file of a checkpoint the whole.

    Averaging goes part by part, without communication. Of the file, a process reads one tensor at a time.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the averages."""
        return {**super().state_dict(), "shadow_params": None}

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write the averages; called on every process."""
        tensors = {str(index): gather(average) for index, average in enumerate(self.shadow_params)}
        if PartialState().is_main_process:
            save_file(tensors, Path(folder) / AVERAGES)

    def load(self, models: list[Any], folder: str) -> None:
        """Read the averages; called on every process."""
        with safe_open(Path(folder) / AVERAGES, framework="pt") as tensors:
            for index, average in enumerate(self.shadow_params):
                copy_full(average, tensors.get_tensor(str(index)))


_CLASSES: tuple[Any, ...] = (
    parts.Metadata,
    parts.MetadataIndex,
    parts.StorageMeta,
    parts.BytesStorageMetadata,
    parts.TensorStorageMetadata,
    parts.TensorProperties,
    parts.ChunkStorageMetadata,
    parts._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
    type(Path()),
)
_ALLOWED = {(kind.__module__, kind.__qualname__): kind for kind in _CLASSES}


def refuse_code_in_shards(folder: Path) -> None:
    """Check the states of a checkpoint that FSDP saved in parts (`fsdp_state_dict_type: SHARDED_STATE_DICT`).

    torch unpickles whatever their indices hold, and their values that are not tensors. Call it before
    `accelerator.load_state`.

    Raises:
        BucketingError: If an index or a value holds more than plain values, tensors and numpy arrays.
    """
    for index in sorted(folder.glob("*/.metadata")):
        with only_values(index), index.open("rb") as file:
            state = _IndexUnpickler(file).load()
        for key, place in (state.storage_data or {}).items():
            if isinstance(state.state_dict_metadata[key.fqn], parts.BytesStorageMetadata):
                path = index.parent / place.relative_path
                with only_values(path), path.open("rb") as file:
                    file.seek(place.offset)
                    load(io.BytesIO(file.read(place.length)), map_location="cpu")


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index: the names, dtypes and shapes of tensors, and their places in files."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"An index of parts has no {module}.{name}.")
        return _ALLOWED[module, name]
