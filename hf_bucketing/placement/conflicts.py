"""What cannot be combined: one function for the planner, which has no accelerator, and for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..errors import BucketingError, quoted
from ..formats import is_gguf
from .settings import MemoryConfig

Sharding: TypeAlias = Literal["ddp", "fsdp", "fsdp2", "deepspeed", "deepspeed stage 3"]
"""How processes share the weights: `"ddp"` stands for none, or one process; `"fsdp"` is version 1."""

READ_FULL_WEIGHTS = ("lora_rank", "ema_decay", "validation_prompts")
"""Settings that read whole weights."""

_VERSION_2 = "version 2 of FSDP (`fsdp_version: 2` in the configuration of accelerate)"

_PRODUCTS = ("loha", "lokr")
"""Kinds of adapters that are products of several matrices."""


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
        experts (`bool`): Whether both transformers of a pipeline are trained.
        file (`str`, *optional*): File with the weights of the transformer.
        joined (tuple of `str`): Settings that are given and that read whole weights: of adapters, averages, rendering.
        searches (`bool`): Whether the run searches the largest `max_tokens`.
        loads_once (`bool`): Whether one process loads the weights and sends the others their shares.
        grouped (`bool`): Whether accelerate's parallelism_config groups the processes.
        dynamo (`bool`): Whether accelerate compiles what it prepares.
        replaces (`bool`): Whether unreadable samples are replaced.
        strip_length (`int`, *optional*): Tokens of a strip, in packs.
        weighs_late (`bool`): Whether the weights of the samples of accumulated batches are known when the last one
            comes, as those of conditions.
        wraps_blocks (`bool`): Whether FSDP checkpoints all blocks (`fsdp_activation_checkpointing`).
        planned (`bool`): Whether only memory is planned: one process of FSDP can train, but shares nothing.
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
    experts: bool = False
    file: str | None = None
    joined: tuple[str, ...] = ()
    searches: bool = False
    loads_once: bool = False
    grouped: bool = False
    dynamo: bool = False
    replaces: bool = False
    strip_length: int | None = None
    weighs_late: bool = False
    wraps_blocks: bool = False
    planned: bool = False

    @property
    def packed(self) -> bool:
        """Whether the weights of the transformer stay quantised as its file has them."""
        return is_gguf(self.file)

    @property
    def texts(self) -> dict[str, object]:
        """What the reasons of conflicts name, as a person would give it."""
        memory, degree = self.memory, self.memory.context_parallel_degree
        quantized, offloaded = f'`quantize_base="{memory.quantize_base}"`', f"`offload_blocks={memory.offload_blocks}`"
        return {
            "version_2": _VERSION_2,
            "kind": self.sharding.partition(" ")[0].rstrip("2").upper(),
            "joined": quoted(self.joined),
            "adapter": f'`adapter="{self.kind}"`',
            "quantized": quantized,
            "offloaded": offloaded,
            "frozen": offloaded if memory.quantize_base is None else quantized,
            "degree": degree,
            "fitting_strip": -(-(self.strip_length or 1) // degree) * degree,
        }


class Conflict(NamedTuple):
    """A rule about settings that exclude each other.

    Attributes:
        settings (`tuple` of `str`): Names of settings, of which the last excludes values of each of the others.
        occurs (callable): Function that returns whether a [`Combination`] breaks the rule.
        reason (`str`): Message with the nearest settings that can be combined, to be formatted with the combination
            as `run` and its `texts`.
    """

    settings: tuple[str, ...]
    occurs: Callable[[Combination], bool]
    reason: str


CONFLICTS = (
    Conflict(
        ("sharding", "num_processes"),
        lambda run: run.planned and run.sharding != "ddp" and run.num_processes == 1,
        '`sharding="fsdp2"` needs several processes (`num_processes=8`); omit it for one.',
    ),
    Conflict(
        ("quantize_base", "sharding"),
        lambda run: run.sharding != "ddp" and run.memory.quantize_base is not None,
        "Omit `quantize_base`, or use DDP: {kind} cannot split or cast quantised weights. Under DDP each process "
        "holds all of them in {run.memory.quantize_base}; under FSDP each holds its share in bf16.",
    ),
    Conflict(
        ("offload_blocks", "sharding"),
        lambda run: run.sharding != "ddp" and run.memory.offload_blocks > 0,
        "Omit `offload_blocks`, or use DDP: {kind} moves the weights itself. Under FSDP, shares wait on the CPU with "
        "`fsdp_offload_params: true` in accelerate's configuration.",
    ),
    Conflict(
        ("trained_dtype", "sharding"),
        lambda run: run.sharding != "ddp" and run.memory.trained_dtype == "bf16",
        'Omit `trained_dtype="bf16"`, or use DDP: under {kind} what is trained stays in float32, and each process '
        "holds or updates a share of it.",
    ),
    Conflict(
        ("optimizer", "sharding"),
        lambda run: (
            run.sharding != "ddp"
            and not run.optimizer.startswith(("adamw", "torch.") if run.sharding == "fsdp2" else "adamw")
        ),
        "Omit `optimizer={run.optimizer}`, or use DDP: it computes with whole weights, and under {kind} each process "
        "holds a share of them. Version 2 of FSDP takes torch's own optimizers.",
    ),
    Conflict(
        (*READ_FULL_WEIGHTS, "fsdp_version"),
        lambda run: run.sharding == "fsdp" and bool(run.joined),
        "Omit {joined}, or use {version_2}: version 1 joins the weights of a block into one flat tensor.",
    ),
    Conflict(
        (*READ_FULL_WEIGHTS, "zero_stage"),
        lambda run: run.sharding == "deepspeed stage 3" and bool(run.joined),
        "Omit {joined}, or use {version_2}, or `zero_stage: 2`: under stage 3 weights are kept in a form that "
        "DeepSpeed alone reads.",
    ),
    Conflict(
        ("max_tokens", "fsdp_cpu_ram_efficient_loading"),
        lambda run: run.sharding != "ddp" and run.searches and run.loads_once,
        'Give a number as `max_tokens`: "auto" runs the whole transformer in each process, and with '
        "`fsdp_cpu_ram_efficient_loading: true` only one process has its weights.",
    ),
    Conflict(
        ("gradient_accumulation_steps", "sharding"),
        lambda run: run.weighs_late and run.sharding.startswith("deepspeed"),
        "Omit the weights in `condition`, or `gradient_accumulation_steps`, or use DDP or FSDP: the weights of a "
        "window's samples are known when it ends, but DeepSpeed then has applied its gradients.",
    ),
    Conflict(
        ("trained_dtype", "mixed_precision"),
        lambda run: run.memory.trained_dtype == "bf16" and run.mixed_precision != "bf16",
        '`trained_dtype="bf16"` needs `mixed_precision="bf16"`, not "{run.mixed_precision}".',
    ),
    Conflict(
        ("quantize_base", "offload_blocks", "lora_rank"),
        lambda run: bool(run.memory.quantize_base or run.memory.offload_blocks) and not run.adapters,
        "{frozen} needs frozen weights; train adapters (`lora_rank=16`), or omit it.",
    ),
    Conflict(
        ("quantize_base",),
        lambda run: run.memory.quantize_base == "nf4" and run.on_cpu,
        '{quantized} needs a GPU; on the CPU use `quantize_base="int8"` or `"float8"`.',
    ),
    Conflict(
        ("quantize_base", "offload_blocks"),
        lambda run: run.memory.quantize_base == "nf4" and run.memory.offload_blocks > 0,
        '{offloaded} cannot move weights of bitsandbytes (`quantize_base="nf4"`), whose scales stay on one '
        'device; use `quantize_base="int8"` or `"float8"`, or omit one of the two.',
    ),
    Conflict(
        ("quantize_base", "gradient_checkpointing"),
        lambda run: run.memory.quantize_base in ("int8", "float8") and run.memory.gradient_checkpointing is not True,
        "{quantized} saves nothing without `gradient_checkpointing=True`: torchao keeps each weight unpacked for the "
        'backward pass. Add it, or use `quantize_base="nf4"` (on a GPU).',
    ),
    Conflict(
        ("offload_blocks", "gradient_checkpointing"),
        lambda run: run.memory.offload_blocks > 0 and run.memory.gradient_checkpointing is not True,
        "{offloaded} saves nothing without `gradient_checkpointing=True`: the backward pass would keep the weights of "
        "each block on the device. Add it, or omit `offload_blocks`.",
    ),
    Conflict(
        ("gradient_checkpointing", "max_tokens"),
        lambda run: run.memory.gradient_checkpointing == "auto" and run.searches,
        'Give `max_tokens` or `gradient_checkpointing` a value: with "auto" for both, nothing says what a step takes.',
    ),
    Conflict(
        ("gradient_checkpointing", "sharding"),
        lambda run: run.memory.gradient_checkpointing == "auto" and run.sharding not in ("ddp", "fsdp2"),
        '`gradient_checkpointing="auto"` plans memory, which {kind} is not planned for, only DDP and FSDP2; give a '
        "number of blocks, or `gradient_checkpointing=True`.",
    ),
    Conflict(
        ("gradient_checkpointing", "fsdp_activation_checkpointing"),
        lambda run: run.wraps_blocks and run.memory.gradient_checkpointing not in (True, False),
        "Omit `fsdp_activation_checkpointing` of accelerate's configuration, which computes all blocks again, or "
        "`gradient_checkpointing`, which chooses some.",
    ),
    Conflict(
        ("gradient_checkpointing",),
        lambda run: run.planned and run.memory.gradient_checkpointing == "auto",
        '`gradient_checkpointing="auto"` is chosen by a run, for its data and its device; give a number of blocks, '
        "true or false. hf_bucketing plan tries how few are enough.",
    ),
    Conflict(
        ("lora_plus_ratio", "lora_rank"),
        lambda run: run.lora_plus and not run.adapters,
        "Omit `lora_plus_ratio`: it is a ratio between the two matrices of LoRA or DoRA; train adapters "
        "(`lora_rank=16`).",
    ),
    Conflict(
        ("lora_plus_ratio", "adapter"),
        lambda run: run.lora_plus and run.kind in _PRODUCTS,
        "Omit `lora_plus_ratio`: it is a ratio between the two matrices of LoRA or DoRA, and {adapter} has others.",
    ),
    Conflict(
        ("lora_format", "adapter"),
        lambda run: run.lora_format == "comfyui" and run.kind != "lora",
        "{adapter} is not written for ComfyUI: diffusers could not read the file back, which proves its names and "
        "scales. Omit `lora_format`; hf_bucketing merge makes a model of the adapters.",
    ),
    Conflict(
        ("quantize_base", "adapter"),
        lambda run: run.memory.quantize_base == "nf4" and run.kind in _PRODUCTS,
        '{adapter} needs weights of the shape of their layer, and those of bitsandbytes (`quantize_base="nf4"`) are '
        'flat; use `quantize_base="int8"` or `"float8"`.',
    ),
    Conflict(
        ("context_parallel_degree", "num_processes"),
        lambda run: run.num_processes % run.memory.context_parallel_degree != 0,
        "`context_parallel_degree={degree}` needs a number of processes that it divides, got {run.num_processes}; "
        "launch {degree} or a multiple of it, or choose another degree.",
    ),
    Conflict(
        ("context_parallel_degree", "sharding"),
        lambda run: run.memory.context_parallel_degree > 1 and run.sharding not in ("ddp", "fsdp2"),
        "Omit `context_parallel_degree={degree}`, or use DDP or {version_2}: it is not supported under {kind}.",
    ),
    Conflict(
        ("context_parallel_degree", "parallelism_config"),
        lambda run: run.memory.context_parallel_degree > 1 and run.grouped,
        "`context_parallel_degree={degree}` groups the processes itself; omit accelerate's parallelism_config, which "
        "groups them too. FSDP2 without it shards the weights over all processes.",
    ),
    Conflict(
        ("context_parallel_degree", "max_tokens"),
        lambda run: run.memory.context_parallel_degree > 1 and run.searches,
        '`context_parallel_degree={degree}` needs `max_tokens` as a number: the search of `max_tokens="auto"` lets '
        "each process fail on its own, and the others of its group would wait for it forever.",
    ),
    Conflict(
        ("context_parallel_degree", "on_error"),
        lambda run: run.memory.context_parallel_degree > 1 and run.replaces,
        '`context_parallel_degree={degree}` needs `on_error="raise"`: each process of a group reads its samples, and '
        "one that only some of them can read would be replaced in these alone. hf_bucketing prepare rejects "
        "unreadable files.",
    ),
    Conflict(
        ("context_parallel_degree", "strip_length"),
        lambda run: (run.strip_length or 0) % run.memory.context_parallel_degree != 0,
        "`context_parallel_degree={degree}` splits strips of `strip_length={run.strip_length}` tokens into unequal "
        "parts; use `strip_length={fitting_strip}`.",
    ),
    Conflict(
        ("offload_idle_expert", "trained_component"),
        lambda run: run.memory.offload_idle_expert and not run.experts,
        'Omit `offload_idle_expert`: it needs `trained_component="both"`, as a single transformer is never idle.',
    ),
    Conflict(
        ("offload_idle_expert", "lora_rank"),
        lambda run: run.memory.offload_idle_expert and not run.adapters,
        "`offload_idle_expert` needs frozen weights, as trained ones stay with their optimizer; train adapters "
        "(`lora_rank=16`), or omit it.",
    ),
    Conflict(
        ("offload_idle_expert", "quantize_base"),
        lambda run: run.memory.offload_idle_expert and run.memory.quantize_base == "nf4",
        'Omit `offload_idle_expert`, or use `quantize_base="int8"` or `"float8"`: weights of bitsandbytes '
        '(`quantize_base="nf4"`) cannot be moved, as their scales stay on one device.',
    ),
    Conflict(
        ("trained_component", "sharding"),
        lambda run: run.experts and run.sharding != "ddp",
        'Use DDP, or train one transformer (`trained_component="transformer_2"`): under {kind} accelerate prepares '
        "one model together with its optimizer, and two transformers have one.",
    ),
    Conflict(
        ("trained_component", "context_parallel_degree"),
        lambda run: run.experts and run.memory.context_parallel_degree > 1,
        "Omit `context_parallel_degree={degree}`, or train one transformer "
        '(`trained_component="transformer_2"`): groups of processes share the samples of one model.',
    ),
    Conflict(
        ("compile", "dynamo_backend"),
        lambda run: run.memory.compile and run.dynamo,
        "Omit `compile`, or accelerate's `dynamo_backend` (ACCELERATE_DYNAMO_BACKEND, or `dynamo_config` in its "
        "configuration): both compile the transformer.",
    ),
    Conflict(
        ("compile", "sharding"),
        lambda run: run.memory.compile and run.sharding not in ("ddp", "fsdp2"),
        "Omit `compile`, or use DDP or {version_2}: it is not supported under {kind}.",
    ),
    Conflict(
        ("context_parallel_degree", "compile"),
        lambda run: run.memory.compile and run.memory.context_parallel_degree > 1,
        "Omit `compile`: blocks in which processes exchange tokens (`context_parallel_degree={degree}`) are not "
        "compiled.",
    ),
    Conflict(
        ("quantize_base", "compile"),
        lambda run: run.memory.compile and run.memory.quantize_base == "nf4",
        'Omit `compile`, or use `quantize_base="int8"` or `"float8"`: blocks of weights of bitsandbytes '
        '(`quantize_base="nf4"`) are not compiled.',
    ),
    Conflict(
        ("transformer_file", "trained_component"),
        lambda run: run.file is not None and run.experts,
        "`transformer_file` holds the weights of one transformer ({run.file}); train that one "
        '(`trained_component="transformer"` or `"transformer_2"`), or omit it.',
    ),
    Conflict(
        ("transformer_file", "lora_rank"),
        lambda run: run.packed and not run.adapters,
        "{run.file} holds quantised weights, which cannot be trained; train adapters (`lora_rank=16`), or give a "
        "`transformer_file` of bfloat16 or float32.",
    ),
    Conflict(
        ("transformer_file", "quantize_base"),
        lambda run: run.packed and run.memory.quantize_base is not None,
        "Omit {quantized}: the weights of {run.file} are quantised already.",
    ),
    Conflict(
        ("transformer_file", "adapter"),
        lambda run: run.packed and run.kind != "lora",
        "{adapter} computes with the weights of its layers, and those of {run.file} are packed; use "
        '`adapter="lora"`, or a `transformer_file` of safetensors.',
    ),
    Conflict(
        ("transformer_file", "offload_blocks"),
        lambda run: run.packed and run.memory.offload_blocks > 0,
        "Omit {offloaded}: the packed weights of {run.file} cannot wait on the CPU. With a `transformer_file` of "
        'safetensors, `quantize_base="int8"` and it go together.',
    ),
    Conflict(
        ("transformer_file", "sharding"),
        lambda run: run.packed and run.sharding != "ddp",
        "Use DDP, or a `transformer_file` of safetensors: {kind} cannot split the packed weights of {run.file}.",
    ),
    Conflict(
        ("transformer_file", "compile"),
        lambda run: run.packed and run.memory.compile,
        "Omit `compile`, or use a `transformer_file` of safetensors: blocks with the packed weights of {run.file} are "
        "not compiled.",
    ),
)
"""What cannot be combined, in the order in which it is reported."""

OF_THE_LAUNCH = (
    "sharding", "num_processes", "fsdp_version", "zero_stage", "fsdp_cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing", "parallelism_config", "dynamo_backend",
)  # fmt: skip
"""What a run that is launched takes from accelerate."""


def check_combination(combination: Combination) -> None:
    """Raise BucketingError for the first conflict, see [`conflicts`]."""
    for reason in conflicts(combination):
        raise BucketingError(reason)


def conflicts(combination: Combination) -> Iterator[str]:
    """Yield why settings cannot be combined, each time with the nearest ones that can."""
    for conflict in CONFLICTS:
        if conflict.occurs(combination):
            yield conflict.reason.format(run=combination, **combination.texts)


def conflicting_settings(names: Collection[str]) -> dict[str, list[str]]:
    """Return, for each of some settings, those of the others whose values may exclude its own."""
    conflicting: dict[str, list[str]] = {}
    for conflict in CONFLICTS:
        *excluded, last = conflict.settings
        for name in excluded:
            if name in names and last in names:
                conflicting.setdefault(name, []).append(last)
                conflicting.setdefault(last, []).append(name)
    return conflicting
