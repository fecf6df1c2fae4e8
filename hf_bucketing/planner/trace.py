"""Peak memory and operations of a training step, under FakeTensorMode: shapes and dtypes run, no weight exists.

torch's MemTracker and the formulas of its FlopCounterMode watch the same run. A few blocks are traced, and the others
extrapolated: each adds the same bytes and operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from multiprocessing import get_context
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from ..adapters.loading import base_model
from ..adapters.lora import add_adapters
from ..adapters.settings import AdapterConfig
from ..errors import BucketingError
from ..models.registry import find_family
from ..models.weight_files import FileWeights
from ..packing.audio import Audio
from ..packing.batch import Rows, has_latent_size
from ..packing.context import bind_checkpoints
from ..packing.family import Family, freeze_unused, output_of
from ..packing.names import Grid
from ..placement.blocks import block_names, blocks_of, check_checkpoints, checkpoint_blocks
from ..placement.quantization import quantized_linears
from ..placement.settings import Precision, Quantization
from ..placement.sharding import HALF
from .components import Component
from .trackers import FlopCounter, Flops, Kinds, KnownValues, Peaks, PeakTracker, ShardedPeakTracker

LAYERS = ("num_layers", "num_single_layers", "n_layers", "num_visual_blocks")
"""Settings of a transformer's configuration that count its blocks."""
PLACED_LAYERS = ("vace_layers",)
"""Settings that list the blocks which have a further block beside them."""
SPACED_LAYERS = ("inject_face_latents_blocks",)
"""Settings that say after how many blocks a further one follows, the first after the first of them."""

_FIRST, _FIRST_SHARDED = 2, 4
"""Blocks from which on each further one adds the same; FSDP gathers blocks early and frees them late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A forward and a backward pass of a transformer.

    Attributes:
        transformer ([`Component`]): Transformer to train.
        latent_sizes (`tuple` of `(f, h, w)`): Latent frames, rows and columns of each sample, the same for all.
        reference_sizes (`tuple` of `(f, h, w)`): Those of the references of each sample.
        text_length (`int`): Text tokens of each.
        audio_length (`int`): Audio tokens of each; 0 where no audio is trained.
        mixed_precision (`"no"`, `"fp16"` or `"bf16"`): Precision of activations and of frozen weights.
        trained_dtype (`"float32"` or `"bf16"`): Precision of what is trained.
        adapters ([`AdapterConfig`]): LoRA, if there is a rank.
        quantize_base (`"int8"`, `"float8"` or `"nf4"`, *optional*): Format of the frozen weights.
        gradient_checkpointing (`bool` or `int`): Whether the backward pass computes activations of blocks again: of
            all, or of a number of them.
        offload_activations (`bool`): Whether activations wait on the CPU.
        shards (`int`): Processes over which FSDP2 shards weights, gradients and moments.
        base_predictions (`int`): Forward passes of the transformer without adapters and gradients before it.
        references (`bool`): Whether what serves references alone is trained too.
        token_timesteps (`bool`): Whether each token has a timestep, or each frame where the model takes those.
    """

    transformer: Component
    latent_sizes: tuple[Grid, ...]
    text_length: int
    mixed_precision: Precision = "no"
    trained_dtype: Literal["float32", "bf16"] = "float32"
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    quantize_base: Quantization | None = None
    gradient_checkpointing: bool | int = False
    offload_activations: bool = False
    shards: int = 1
    base_predictions: int = 0
    reference_sizes: tuple[Grid, ...] = ()
    references: bool = False
    token_timesteps: bool = False
    audio_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a step needs, on each process.

    Attributes:
        peaks (mapping of `"forward"` and `"backward"` to [`Kinds`]): Bytes at the highest moment of each phase.
        weights (`float`): Bytes of all weights and buffers, before they are sharded.
        trained (`float`): Numbers that are trained.
        trained_bytes (`float`): Bytes of these numbers, and of their gradients.
        largest (`float`): Bytes of the largest trained tensor.
        block_bytes (`float`): Bytes of the frozen weights of the largest block.
        frozen_bytes (`float`): Bytes of the frozen weights of all blocks.
        blocks (`float`): Number of blocks.
        flops ([`Flops`][hf_bucketing.planner.trackers.Flops]): Operations of all passes.
        waiting (`float`): Bytes of activations that wait on the CPU, in page-locked memory.
        pinned (`float`): Bytes of the frozen weights in page-locked memory, if all of them waited on the CPU.
    """

    peaks: Peaks
    weights: float
    trained: float
    trained_bytes: float
    largest: float
    block_bytes: float
    frozen_bytes: float
    blocks: float
    flops: Flops
    waiting: float
    pinned: float

    def plus(self, other: Traced, times: float) -> Traced:
        """Return this and some times the other; the largest block and tensor remain what they are."""
        return Traced(
            peaks={phase: kinds.plus(other.peaks[phase], times) for phase, kinds in self.peaks.items()},
            weights=self.weights + times * other.weights,
            trained=self.trained + times * other.trained,
            trained_bytes=self.trained_bytes + times * other.trained_bytes,
            largest=self.largest,
            block_bytes=self.block_bytes,
            frozen_bytes=self.frozen_bytes + times * other.frozen_bytes,
            blocks=self.blocks + times * other.blocks,
            flops=self.flops.plus(other.flops, times),
            waiting=self.waiting + times * other.waiting,
            pinned=self.pinned + times * other.pinned,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """What a call of a frozen model needs.

    Attributes:
        peak ([`Kinds`]): Bytes at the highest moment.
        flops (`float`): Floating-point operations, a multiply-add as two.
    """

    peak: Kinds = field(default_factory=Kinds)
    flops: float = 0

    def plus(self, other: TracedCall, times: float = 1) -> TracedCall:
        """Return this and some times the other."""
        return TracedCall(peak=self.peak.plus(other.peak, times), flops=self.flops + times * other.flops)


def trace(step: TracedStep) -> Traced:
    """Return what a step of the whole transformer needs.

    Raises:
        BucketingError: If the transformer cannot take such samples, or cannot be run on shapes alone.
    """
    if step.shards > 1 and dist.is_initialized():  # the run's own process group must not see pretended processes
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(trace, step).result()
    if isinstance(step.gradient_checkpointing, bool):
        return _extrapolated(step).total
    kept, again = (_extrapolated(replace(step, gradient_checkpointing=on)) for on in (False, True))
    check_checkpoints(step.gradient_checkpointing, blocks=round(kept.total.blocks))
    if step.gradient_checkpointing == round(kept.total.blocks):
        return again.total
    # Of fewer blocks the last is none, so that the backward pass begins as without checkpoints: with what is kept.
    total, share = kept.total, step.gradient_checkpointing / kept.total.blocks
    for (
        name,
        count,
    ) in kept.counts.items():
        total = total.plus(again.further(name).plus(kept.further(name), -1), share * count)
    least = again.total.peaks
    peaks = {phase: max(peak, least[phase], key=lambda kinds: kinds.total) for phase, peak in total.peaks.items()}
    return replace(total, peaks=peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extrapolated:
    """What a step needs of a whole transformer, and of each further block.

    Args:
        step ([`TracedStep`]): The step.
        total ([`Traced`]): What it needs.
        counts (mapping of `str` to `int`): Blocks by the settings that count them.
        few (mapping of `str` to `int`): Those that were traced.
    """

    step: TracedStep
    total: Traced
    counts: Mapping[str, int]
    few: Mapping[str, int]

    def further(self, name: str) -> Traced:
        """Return what a further block needs."""
        more = _traced(self.step, tuple({**self.few, name: self.few[name] + 1}.items()))
        return more.plus(_traced(self.step, tuple(self.few.items())), -1)


def _extrapolated(step: TracedStep) -> _Extrapolated:
    """Trace a step of a few blocks, and add the others; raises as [`trace`]."""
    config = step.transformer.config
    counts = {name: config[name] for name in LAYERS if name in config}
    first = _FIRST if step.shards == 1 else _FIRST_SHARDED
    placed = {name: len(config[name]) for name in PLACED_LAYERS if name in config}
    few = {name: min(count, first + bool(placed)) for name, count in counts.items()}  # room for one more beside them
    few |= {name: min(count, first) for name, count in placed.items()}
    spaced = {name: config["num_layers"] // config[name] for name in SPACED_LAYERS if name in config}
    few |= dict.fromkeys(spaced, 1)
    base = total = _traced(step, tuple(few.items()))
    for name, count in {**counts, **placed, **spaced}.items():
        if count > few[name]:
            more = _traced(step, tuple({**few, name: few[name] + 1}.items()))
            total = total.plus(more.plus(base, -1), count - few[name])
    if step.shards > 1 and any(min(astuple(kinds)) < -0.01 * kinds.total for kinds in total.peaks.values()):
        raise BucketingError(
            f"The memory of a {step.transformer.class_name} cannot be extrapolated from {few}: blocks do not add up."
        )
    return _Extrapolated(step=step, total=total, counts={**counts, **placed, **spaced}, few=few)


def _family_of(model: torch.nn.Module) -> Family:
    family = find_family(type(model).__name__)
    assert family is not None, "only transformers of families are traced"
    return family


@functools.lru_cache(maxsize=256)
def _traced(step: TracedStep, layers: tuple[tuple[str, int], ...]) -> Traced:
    """Trace a step of a transformer with these numbers of blocks; raises as [`trace`]."""
    model = step.transformer.build(**_settings_of(dict(layers)))
    family = _family_of(model)
    audio = step.audio_length > 0
    freeze_unused(family, model, audio=audio, references=step.references)
    if step.quantize_base is not None:
        _quantize(model, step.quantize_base)
    if (weights := step.transformer.weights) is not None:
        _pack(model, weights)
    if step.adapters.lora_rank is not None:
        with torch.device("meta"):
            add_adapters(model, step.adapters, audio=audio)
        for layer in model.modules():
            if hasattr(layer, "module_dropout"):  # of LoHa and LoKr, which read a number that they draw in training
                layer.eval()
    checkpoint_blocks(model, step.gradient_checkpointing)
    bind_checkpoints(model)
    inputs = _inputs(model, step)
    with ExitStack() as stack:
        mesh = None if step.shards == 1 else stack.enter_context(_mesh(step.shards))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _materialise(model, step)
        counted = _count(model)
        inputs = tree_map_only(torch.Tensor, _without_storage, inputs)
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)]
        if mesh is None:
            tracker: PeakTracker | ShardedPeakTracker = PeakTracker.of(model, tensors)
        else:
            _shard(model, mesh, step)
            tracker = ShardedPeakTracker.of(model, tensors)
        try:
            with FlopCounter() as counter, KnownValues(), tracker:
                loss, waiting = _forward(model, inputs, step)
                tracker.phase = "backward"
                loss.backward()
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise BucketingError(
                f"The memory of a {type(model).__name__} cannot be planned: its forward reads values ({error})."
            ) from error
    return counted(peaks=tracker.peaks, flops=counter.flops, waiting=waiting)


def _settings_of(layers: Mapping[str, int]) -> dict[str, Any]:
    """Return settings of a transformer's configuration that give it these numbers of blocks."""

    def value(name: str, count: int) -> Any:
        if name in PLACED_LAYERS:
            return list(range(count))
        return layers["num_layers"] // count if name in SPACED_LAYERS else count

    return {name: value(name, count) for name, count in layers.items()}


def _without_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of that shape for one on the meta device; one with values, such as a mask, keeps them."""
    return torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _count(model: torch.nn.Module) -> Callable[..., Traced]:
    """Return a function that adds to peaks what a model holds before it is sharded."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
    blocks = blocks_of(model)
    frozen = [
        sum(
            parameter.numel() * parameter.element_size()
            for parameter in block.parameters()
            if not parameter.requires_grad
        )
        for block in blocks
    ]
    tensors = [*model.parameters(), *model.buffers()]
    return functools.partial(
        Traced,
        weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        trained=sum(parameter.numel() for parameter in trained),
        trained_bytes=sum(sizes),
        largest=max(sizes),
        block_bytes=max(frozen),
        frozen_bytes=sum(frozen),
        blocks=len(blocks),
        pinned=sum(pinned_bytes(parameter) for parameter in model.parameters() if not parameter.requires_grad),
    )


def pinned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in page-locked memory, of which torch takes powers of two.

    Source: `CachingHostAllocator` of torch, which keeps such memory for tensors to come.
    """
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes else 0


def _shard(model: torch.nn.Module, mesh: Any, step: TracedStep) -> None:
    """Shard as accelerate does: the blocks one by one, and the rest; see `block_by_block` and `sharded_adapters`."""
    half = HALF.get(step.mixed_precision)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=half)
    if step.adapters.lora_rank is not None:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    names = block_names(model)
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _forward(model: torch.nn.Module, inputs: Mapping[str, Any], step: TracedStep) -> tuple[torch.Tensor, int]:
    """Return the loss of the traced step, in the precision in which accelerate runs the model.

    Also return the bytes of the activations that wait on the CPU.
    """
    half = HALF.get(step.mixed_precision)
    kept: AbstractContextManager[Any] = nullcontext()
    waiting: list[int] = []
    if step.offload_activations:
        kept = torch.autograd.graph.saved_tensors_hooks(functools.partial(_leave, waiting), _fetch)
    with kept:
        with torch.autocast("cpu", dtype=half) if half is not None else nullcontext():
            with torch.no_grad(), base_model(model):
                of_base = [output_of(model(**inputs, return_dict=False)) for _ in range(step.base_predictions)]
                of_base = [torch.stack(of_base).sum(0)] if of_base else []
            result = model(**inputs, return_dict=False)
        output = output_of(result)
        target = of_base[0] if of_base else torch.empty_like(output, dtype=torch.float32)
        loss = (output.float() - target).square().mean()
        if step.audio_length:
            audio = _family_of(model).audio_rows(result).float()
            loss = loss + (audio - torch.empty_like(audio)).square().mean()
        return loss, sum(waiting)


@torch.no_grad()
def trace_call(
    component: Component, call: Callable[[Any, torch.Tensor], Any], inputs: torch.Tensor, *, dtype: torch.dtype
) -> TracedCall:
    """Return the peak and the operations of a call of a frozen model, such as a text encoder.

    The peak has its weights, and what the call makes.
    """
    model = component.build()
    with FakeTensorMode(allow_non_fake_inputs=True):
        _assign(model, lambda name, parameter: dtype if parameter.is_floating_point() else parameter.dtype)
        tracker = PeakTracker.of(model, [])
        inputs = torch.empty(inputs.shape, dtype=inputs.dtype)
        with FlopCounter() as counter, tracker:
            call(model, inputs)
    return TracedCall(peak=tracker.peaks["forward"], flops=counter.flops.hardware)


def _inputs(model: Any, step: TracedStep) -> dict[str, Any]:
    """Return the arguments of the forward: tensors without storage, and what the forward may read.

    These are masks and other conditioning, which are all ones: the most that a sample can have of text and images.
    """
    family = _family_of(model)
    patch, count = family.patch(model.config), len(step.latent_sizes)
    (size,) = set(step.latent_sizes)
    t, h, w = (side // per_token for side, per_token in zip(size, patch, strict=True))
    family.check_grid(model, (t, h, w))
    conditioning = {}
    for name, drawn in family.draw_conditioning(model, [(t, h, w)] * count).items():
        values = drawn if isinstance(drawn, torch.Tensor) else torch.stack([sample.to("meta") for sample in drawn])
        conditioning[name] = values.to("meta") if has_latent_size(values) else torch.ones_like(values)
    added = max(family.added_lengths(conditioning) or (0,))
    length = family.text_length(model.config) or max(1, step.text_length - added)
    channels = family.in_channels(model)
    rows = Rows(
        latents=torch.empty(count, channels, *size, device="meta"),
        timesteps=torch.empty((count, t * h * w) if step.token_timesteps else count, device="meta"),
        text=torch.empty(count, length, family.text_dim(model), device="meta"),
        patch=patch,
        text_mask=torch.ones(count, length) if family.text.padding == "masked" else None,
        conditioning=conditioning,
        references=[torch.empty(count, channels, *size, device="meta") for size in step.reference_sizes],
        audio=_audio(model, step, text_length=length) if step.audio_length else None,
    )
    if rows.references:
        rows = family.with_references(model, rows)
    return {**family.inputs(rows), **family.unpacked_inputs(model, rows)}


def _audio(model: Any, step: TracedStep, *, text_length: int) -> Audio:
    """Return the audio of the samples, without storage."""
    family, count = _family_of(model), len(step.latent_sizes)
    levels, channels = torch.empty(count, device="meta"), family.audio_channels(model)
    text_dim = family.audio_text_dim(model)
    return Audio(
        latents=list(torch.empty(count, step.audio_length, channels, device="meta")),
        timesteps=levels,
        video_timesteps=levels,
        text=torch.empty(count, text_length, text_dim, device="meta") if text_dim else None,
    )


def _materialise(model: torch.nn.Module, step: TracedStep) -> None:
    """Give each weight a tensor in the dtype in which it is loaded or trained."""
    kept: list[str] = getattr(model, "_keep_in_fp32_modules", None) or []
    has_adapters = step.adapters.lora_rank is not None
    trained = step.trained_dtype if step.shards == 1 else "float32"  # accelerate trains in it under FSDP2
    base = step.mixed_precision if has_adapters else trained

    def dtype_of(name: str, parameter: torch.Tensor) -> torch.dtype:
        if not parameter.is_floating_point() or parameter.dtype in (torch.float8_e4m3fn,):
            return parameter.dtype
        if has_adapters and parameter.requires_grad:
            return HALF.get(trained, torch.float32)
        is_kept = any(part in kept for part in name.split("."))
        return torch.float32 if is_kept else HALF.get(base, torch.float32)

    _assign(model, dtype_of)


def _assign(model: torch.nn.Module, dtype_of: Callable[[str, torch.Tensor], torch.dtype]) -> None:
    shared: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in shared:
                    dtype = dtype_of(f"{prefix}.{name}", parameter)
                    shared[id(parameter)] = torch.nn.Parameter(
                        torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = shared[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                is_loaded = buffer.is_floating_point() and name not in module._non_persistent_buffers_set
                dtype = dtype_of(f"{prefix}.{name}", buffer) if is_loaded else buffer.dtype
                module._buffers[name] = torch.empty(buffer.shape, dtype=dtype)


def _leave(waiting: list[int], tensor: torch.Tensor) -> Any:
    """Keep of an activation only its shape: it waits on the CPU, with its bytes in the list."""
    if not tensor.requires_grad or tensor.is_leaf:
        return tensor
    waiting.append(pinned_bytes(tensor))
    return tensor.shape, tensor.stride(), tensor.dtype


def _fetch(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    shape, stride, dtype = kept
    return torch.empty_strided(shape, stride, dtype=dtype)


class _Quantized(torch.nn.Linear):
    """A linear layer that makes the tensors which torchao and bitsandbytes make."""

    kind: Quantization
    scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.kind == "nf4":
            output: torch.Tensor = _FourBits.apply(input, self.weight, self.scale, self.bias)
            return output
        if self.kind == "float8":
            return F.linear(input, self.weight.to(input.dtype) * self.scale.to(input.dtype), self.bias)
        product = torch.mm(input.reshape(-1, self.in_features), self.weight.t().to(input.dtype))
        scaled = (product * self.scale.to(product.dtype).flatten()).reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            scaled += self.bias
        return scaled.to(input.dtype)


class _FourBits(torch.autograd.Function):
    """Unpack a weight of half a byte per number for each product, forward and backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.columns = input.shape[-1]
        return F.linear(input, _unpacked(weight, input), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight, _ = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ _unpacked(weight, gradient, columns=ctx.columns), None, None, None


def _unpacked(weight: torch.Tensor, like: torch.Tensor, *, columns: int | None = None) -> torch.Tensor:
    columns = columns or like.shape[-1]
    return torch.empty(2 * weight.numel() // columns, columns, dtype=like.dtype)


def _quantize(model: torch.nn.Module, kind: Quantization) -> None:
    """Give the linear layers of the blocks weights of one byte or half a byte, and scales."""
    for layer in quantized_linears(model).values():
        rows, columns = layer.weight.shape
        layer.__class__ = _Quantized
        assert isinstance(layer, _Quantized)
        layer.kind = kind
        if kind == "nf4":  # a scale of one byte per 64 numbers, see QLoRA
            weight, scale = torch.empty(rows * columns // 2, dtype=torch.uint8, device="meta"), rows * columns // 64
            scales = torch.empty(scale, dtype=torch.uint8, device="meta")
        else:
            dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
            weight = torch.empty(rows, columns, dtype=dtype, device="meta")
            scales = torch.empty(rows, 1, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.register_buffer("scale", scales, persistent=False)


class _Packed(torch.nn.Linear):
    """A linear layer that makes the tensors which diffusers' layer of GGUF makes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = torch.empty(self.out_features, self.in_features, dtype=torch.float16)
        weight = half if torch.is_autocast_enabled("cpu") else half.to(input.dtype)  # autocast casts as the layer does
        return F.linear(input, weight, self.bias)


def _pack(model: torch.nn.Module, weights: FileWeights) -> None:
    """Give the linear layers that a file has quantised weights of as many bytes as they have there."""
    for name, layer in model.named_modules():
        if name in weights.packed:
            assert isinstance(layer, torch.nn.Linear)
            layer.__class__ = _Packed
            columns = round(layer.in_features * weights.packed_bytes)
            packed = torch.empty(layer.out_features, columns, dtype=torch.uint8, device="meta")
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)


@contextmanager
def _mesh(shards: int) -> Iterator[Any]:
    """Return a mesh of as many pretended processes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", None, None, shards, 0, FakeStore())
    try:
        yield init_device_mesh("cpu", (shards,))
    finally:
        dist.destroy_process_group()
