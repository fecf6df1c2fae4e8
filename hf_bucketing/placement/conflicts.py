"""What cannot be combined: one function for the planner, which has no accelerator, and for the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import BucketingError, quoted
from .settings import MemoryConfig

Sharding: TypeAlias = Literal["ddp", "FSDP", "FSDP2", "DEEPSPEED", "DEEPSPEED stage 3"]
"""How processes share the weights, as accelerate names it: `"ddp"` stands for none, or one process."""

_ADVICE = "use version 2 of FSDP (`fsdp_version: 2`, as in scripts/accelerate_configs/fsdp2.yaml)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Settings of a run that exclude each other.

    Args:
        memory ([`MemoryConfig`]): How the model is kept in memory.
        adapters (`bool`): Whether adapters are trained, and the weights of the model frozen.
        kind (`"lora"`, `"dora"`, `"loha"` or `"lokr"`): Kind of the adapters.
        lora_format (`"diffusers"`, `"comfyui"` or `"both"`): Programs that the saved adapters are for.
        optimizer (`str`): Name of the optimizer, or its class as `"module:Class"`.
        lora_plus (`bool`): Whether the matrices of adapters have different learning rates.
        mixed_precision (`"no"`, `"fp16"` or `"bf16"`): Precision of activations.
        sharding ([`Sharding`]): How processes share the weights.
        num_processes (`int`): Processes of the run.
        on_cpu (`bool`): Whether the run computes on a CPU; a plan for one is made for GPUs all the same.
        joined (tuple of `str`): Settings that are given and that read whole weights: of adapters, averages, rendering.
        searches (`bool`): Whether the run searches the largest `max_tokens`.
        loads_once (`bool`): Whether one process loads the weights and sends the others their shares.
        grouped (`bool`): Whether accelerate's parallelism_config groups the processes.
        replaces (`bool`): Whether unreadable samples are replaced.
        strip_length (`int`, *optional*): Tokens of a strip, in packs.
    """

    memory: MemoryConfig
    adapters: bool
    kind: str = "lora"
    lora_format: str = "both"
    optimizer: str = "adamw"
    lora_plus: bool = False
    mixed_precision: str
    sharding: Sharding = "ddp"
    num_processes: int = 1
    on_cpu: bool = False
    joined: tuple[str, ...] = ()
    searches: bool = False
    loads_once: bool = False
    grouped: bool = False
    replaces: bool = False
    strip_length: int | None = None


def check_combination(combination: Combination) -> None:
    """Raise BucketingError for the first conflict, see [`conflicts`]."""
    for reason in conflicts(combination):
        raise BucketingError(reason)


def conflicts(combination: Combination) -> Iterator[str]:
    """Yield why settings cannot be combined, each time with the nearest ones that can."""
    if combination.sharding != "ddp":
        yield from _of_sharding(combination)
    if combination.memory.trained_dtype == "bf16" and combination.mixed_precision != "bf16":
        yield f'`trained_dtype="bf16"` needs `mixed_precision="bf16"`, not "{combination.mixed_precision}".'
    yield from _of_frozen_weights(combination)
    yield from _of_adapters(combination)
    if combination.memory.context_parallel_degree > 1:
        yield from _of_context_parallelism(combination)


def _of_sharding(combination: Combination) -> Iterator[str]:
    memory, sharding, joined = combination.memory, combination.sharding, combination.joined
    kind = sharding.partition(" ")[0].rstrip("2")
    if memory.quantize_base is not None:
        yield (
            f"Omit `quantize_base`, or use DDP: {kind} cannot split or cast quantised weights. Under DDP each process "
            f"holds all of them in {memory.quantize_base}; under FSDP each holds its share in bf16."
        )
    if memory.offload_blocks:
        yield (
            f"Omit `offload_blocks`, or use DDP: {kind} moves the weights itself. Under FSDP, shares wait on the CPU "
            "with `fsdp_offload_params: true` in accelerate's configuration."
        )
    if memory.trained_dtype == "bf16":
        yield (
            f'Omit `trained_dtype="bf16"`, or use DDP: under {kind} what is trained stays in float32, and each '
            "process holds or updates a share of it."
        )
    if not combination.optimizer.startswith(("adamw", "torch.")):
        yield (
            f"Omit `optimizer={combination.optimizer}`, or use DDP: it computes with whole weights, and under {kind} "
            "each process holds a share of them. torch's own optimizers know shares."
        )
    if joined and sharding == "FSDP":
        yield (f"Omit {quoted(joined)}, or {_ADVICE}: version 1 joins the weights of a block into one flat tensor.")
    if joined and sharding == "DEEPSPEED stage 3":
        yield (
            f"Omit {quoted(joined)}, or {_ADVICE}, or `zero_stage: 2`: under stage 3 weights are kept in a form that "
            "DeepSpeed alone reads."
        )
    if combination.searches and combination.loads_once:
        yield (
            'Give a number as `max_tokens`: "auto" runs the whole transformer in each process, and with '
            "`fsdp_cpu_ram_efficient_loading: true` only one process has its weights."
        )


def _of_frozen_weights(combination: Combination) -> Iterator[str]:
    memory = combination.memory
    options = [] if memory.quantize_base is None else [f'`quantize_base="{memory.quantize_base}"`']
    options += [f"`offload_blocks={memory.offload_blocks}`"] if memory.offload_blocks else []
    if options and not combination.adapters:
        yield f"{options[0]} needs frozen weights; train adapters (`lora_rank=16`), or omit it."
    if memory.quantize_base == "nf4" and combination.on_cpu:
        yield f'{options[0]} needs a GPU; on the CPU use `quantize_base="int8"` or `"float8"`.'
    if memory.quantize_base == "nf4" and memory.offload_blocks:
        yield (
            f'{options[1]} cannot move weights of bitsandbytes (`quantize_base="nf4"`), whose scales stay on one '
            'device; use `quantize_base="int8"` or `"float8"`, or omit one of the two.'
        )
    if memory.gradient_checkpointing:
        return
    if memory.quantize_base not in (None, "nf4"):
        yield (
            f"{options[0]} saves nothing without `gradient_checkpointing=True`: torchao keeps each weight unpacked "
            'for the backward pass. Add it, or use `quantize_base="nf4"` (on a GPU).'
        )
    if memory.offload_blocks:
        yield (
            f"{options[-1]} saves nothing without `gradient_checkpointing=True`: the backward pass would keep the "
            "weights of each block on the device. Add it, or omit `offload_blocks`."
        )


def _of_adapters(combination: Combination) -> Iterator[str]:
    memory, kind = combination.memory, f'`adapter="{combination.kind}"`'
    products = combination.kind in ("loha", "lokr")
    if combination.lora_plus and (products or not combination.adapters):
        yield (
            "Omit `lora_plus_ratio`: it is a ratio between the two matrices of LoRA or DoRA"
            + (f", and {kind} has others." if products else "; train adapters (`lora_rank=16`).")
        )
    if combination.kind == "lora":
        return
    if combination.lora_format == "comfyui":
        yield (
            f"{kind} is not written for ComfyUI: diffusers could not read the file back, which proves its names and "
            "scales. Omit `lora_format`; scripts/merge_lora.py makes a model of the adapters."
        )
    if products and memory.quantize_base == "nf4":
        yield (
            f'{kind} needs weights of the shape of their layer, and those of bitsandbytes (`quantize_base="nf4"`) '
            'are flat; use `quantize_base="int8"` or `"float8"`.'
        )


def _of_context_parallelism(combination: Combination) -> Iterator[str]:
    degree, processes = combination.memory.context_parallel_degree, combination.num_processes
    option = f"`context_parallel_degree={degree}`"
    if processes % degree:
        yield (
            f"{option} needs a number of processes that it divides, got {processes}; launch {degree} or a multiple of "
            "it, or choose another degree."
        )
    if combination.sharding not in ("ddp", "FSDP2"):
        yield (
            f"Omit {option}, or use DDP or version 2 of FSDP (`fsdp_version: 2`, as in "
            f"scripts/accelerate_configs/fsdp2.yaml): it is not supported under {combination.sharding}."
        )
    if combination.grouped:
        yield (
            f"{option} groups the processes itself; omit accelerate's parallelism_config, which groups them too. "
            "FSDP2 without it shards the weights over all processes."
        )
    if combination.searches:
        yield (
            f'{option} needs `max_tokens` as a number: the search of `max_tokens="auto"` lets each process fail '
            "on its own, and the others of its group would wait for it forever."
        )
    if combination.replaces:
        yield (
            f'{option} needs `on_error="raise"`: each process of a group reads its samples, and one that only some of '
            "them can read would be replaced in these alone. scripts/prepare_dataset.py rejects unreadable files."
        )
    if combination.strip_length is not None and combination.strip_length % degree:
        yield (
            f"{option} splits strips of `strip_length={combination.strip_length}` tokens into unequal parts; use "
            f"`strip_length={-(-combination.strip_length // degree) * degree}`."
        )
