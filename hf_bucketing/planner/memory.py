"""Plan of the memory of a run, by kind, from a pipeline's configurations: no weight is loaded."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import chain
from typing import Literal

import torch

from ..adapters.loading import count_weights, expert_folder
from ..adapters.lora import check_loads_lora
from ..buckets.sizes import LatentSpec, Size, round_to_multiple
from ..conditions.appended import AppendedFrames
from ..conditions.condition import token_conditions
from ..conditions.names import KEYFRAMES
from ..conditions.rows import ConditionRules
from ..conditions.shares import appended_by, draws_parts, most_appended
from ..configuration.batches import BatchConfig
from ..errors import BucketingError
from ..models.experts import transformers_of
from ..models.weight_files import check_weights_can_train
from ..optimizers.optimizer import state_bytes
from ..placement.offload import check_blocks
from ..placement.sharding import HALF
from ..plans.packs import strip_tokens
from ..plans.ways import stacks
from .components import Components, read_components
from .encoding import encode_media, encode_texts
from .phases import ByteCounts, Phases
from .settings import PlanConfig
from .trace import Traced, TracedStep, trace
from .trackers import Flops, Kinds

CUDA_CONTEXT = 2**30
"""Bytes that are counted for the CUDA context, workspaces of its libraries, and gaps between tensors."""

PLAN_ERROR = 0.15
"""Share by which runs may take more than planned. Those that were measured took 1 to 12 % more, on the CPU:
scripts/benchmarks/results/memory.json; fragmentation of a GPU's memory comes on top."""

MOST_TOKENS = 2**20
"""Tokens per process and step beyond which [`largest_tokens`] does not search, unless one sample has more."""

Verdict = Literal["fits", "tight", "does not fit"]

_SEARCHED = 8
"""Steps that [`largest_tokens`] plans at most after those of one and two samples."""

_FRAMES = 81
_QUANTISED_MOMENT = 1 + 4 / 256
"""Bytes of an 8-bit moment of bitsandbytes: one, and a float32 scale per 256 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts(ByteCounts):
    """Bytes that one process needs on its device at one time, by kind.

    Attributes:
        weights (`int`): Weights of the transformer, or of both; where they are sharded, a share and what is gathered.
        gradients (`int`): Gradients of the trained weights, and the buckets in which DDP sends them.
        optimizer (`int`): Moments of the trained weights, and what a step of the optimizer makes.
        averages (`int`): Averaged weights (`ema_decay`).
        activations (`int`): Inputs, activations, and what the backward pass makes of them.
        text_encoder (`int`): Text encoders: their weights and, while captions are encoded, their activations.
        vae (`int`): VAE: its weights and, while media are encoded, its activations.
        context (`int`): Stated constant for the CUDA context.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    averages: int = 0
    activations: int = 0
    text_encoder: int = 0
    vae: int = 0
    context: int = 0

    def plus(self, other: MemoryParts) -> MemoryParts:
        """Return this and the other."""
        added = asdict(other)
        return MemoryParts(**{name: count + added[name] for name, count in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(Phases[MemoryParts]):
    """Memory that each process of a run needs on its device.

    Attributes:
        phases (mapping of `str` to [`MemoryParts`]): What exists at the highest moment of each phase of a step.
        shape ([`StepShape`]): Samples of the step.
        blocks (`int`): Blocks of the transformer.
        experts (tuple of [`Traced`][hf_bucketing.planner.trace.Traced]): The transformers of the run as they were
            traced: that which the step trains, and the idle one, if there are two.
    """

    shape: StepShape
    blocks: int
    experts: tuple[Traced, ...] = ()

    @property
    def flops(self) -> Flops:
        """Floating-point operations of a step of one process; of two experts, their mean."""
        return mean_flops(self.experts)


def mean_flops(experts: Sequence[Traced]) -> Flops:
    """Return the operations of a step, of the experts that take turns in mean."""
    return reduce(lambda flops, expert: flops.plus(expert.flops, 1 / len(experts)), experts, Flops())


def verdict_on(planned: float, memory: float) -> Verdict:
    """Return whether a run fits in memory, where runs may take more than planned by [`PLAN_ERROR`].

    Args:
        planned (`float`): Bytes that are planned.
        memory (`float`): Bytes of the device.

    Example:
        >>> [verdict_on(planned, 24) for planned in (20, 21.2, 25)]
        ['fits', 'tight', 'does not fit']
    """
    if planned > memory:
        return "does not fit"
    return "fits" if planned * (1 + PLAN_ERROR) <= memory else "tight"


def plan_memory(name_or_path: str, config: PlanConfig) -> MemoryPlan:
    """Plan the memory of a run of a pipeline, from its configurations alone.

    The training step is run without weights and without a device by torch's `MemTracker` under `FakeTensorMode`, so
    that attention is counted as flash attention, which makes no matrix of scores.

    Args:
        name_or_path (`str`): Diffusers pipeline, on the hub or in a folder with the configurations of its models.
        config ([`PlanConfig`]): What is planned for.

    Returns:
        [`MemoryPlan`]: Bytes by phase and kind.

    Raises:
        BucketingError: If there is no such pipeline, no recipe to train it, or it cannot take such samples.
    """
    components = read_components(
        name_or_path, trained=config.run.trained_component, transformer_file=config.run.transformer_file
    )
    return plan_components(components, config)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Samples of one step of one process.

    Attributes:
        size ([`Size`][hf_bucketing.Size]): Frames, height and width of the largest sample.
        samples (`int`): Number of samples.
        tokens (`int`): Tokens of all samples and of their references.
        text_tokens (`int`): Tokens of the texts in their sequences.
        pixels (`int`): Pixels of all samples and references, frames times height times width.
        references (`tuple` of [`Size`][hf_bucketing.Size]): Sizes of the references of the sample that has most.
        audio_tokens (`int`): Tokens of the audio of all samples.
    """

    size: Size
    samples: int
    tokens: int
    text_tokens: int
    pixels: int
    references: tuple[Size, ...] = ()
    audio_tokens: int = 0

    @classmethod
    def of(
        cls,
        sizes: Sequence[Size],
        *,
        tokens: int,
        text_tokens: int = 0,
        audio_tokens: int = 0,
        references: Sequence[tuple[Size, ...]] = (),
    ) -> StepShape:
        """Return the shape of a step of samples of these sizes, with these references of each."""
        return cls(
            size=max(sizes, key=math.prod),
            samples=len(sizes),
            tokens=tokens,
            text_tokens=text_tokens,
            pixels=sum(math.prod(size) for size in chain(sizes, *references)),
            references=max(references, key=lambda grids: sum(map(math.prod, grids)), default=()),
            audio_tokens=audio_tokens,
        )

    def repeated(self, samples: int, *, tokens: int | None = None) -> StepShape:
        """Return the shape of as many samples as this one, each of as many tokens, by default of its own."""
        return replace(
            self,
            samples=samples,
            tokens=samples * (self.tokens if tokens is None else tokens),
            text_tokens=samples * self.text_tokens,
            pixels=samples * self.pixels,
            audio_tokens=samples * self.audio_tokens,
        )

    @property
    def length(self) -> int:
        """Tokens that count for `max_tokens`: those of the samples, their audio and the texts in their sequences."""
        return self.tokens + self.audio_tokens + self.text_tokens


def plan_components(components: Components, config: PlanConfig, shape: StepShape | None = None) -> MemoryPlan:
    """Plan the memory of a run from configurations that were read; see [`plan_memory`].

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for.
        shape ([`StepShape`], *optional*): Samples of a step; by default those that the settings name.

    Raises:
        BucketingError: If the model cannot take such samples, or such adapters.
    """
    if config.run.adapters.lora_rank is not None and config.run.adapters.has_pairs:
        check_loads_lora(components.recipe.pipeline_type())
    check_weights_can_train(components.transformer.weights, adapters=config.run.adapters.lora_rank is not None)
    shape = shape or step_shape(components, config)
    traced, *idle = sorted(trace_experts(components, config, shape), key=lambda expert: -expert.weights)
    check_blocks(config.run.memory.offload_blocks, blocks=round(traced.blocks))
    phases = _phases(components, config, traced, shape)
    for expert in idle:
        held = _held_by_idle(expert, config)
        phases = {name: parts.plus(held) for name, parts in phases.items()}
    return MemoryPlan(phases=phases, shape=shape, blocks=round(traced.blocks), experts=(traced, *idle))


def trace_experts(components: Components, config: PlanConfig, shape: StepShape) -> list[Traced]:
    """Return what a step needs of the transformer that it trains, or of each of two.

    Raises:
        BucketingError: If the model cannot take such samples.
    """
    step = _step(components, config, shape)
    transformers = filter(None, (components.transformer, components.second))
    return [trace(replace(step, transformer=transformer)) for transformer in transformers]


def fewest_checkpoints(plan: Callable[[bool | int], MemoryPlan], *, blocks: int, memory: float) -> bool | int:
    """Return how few blocks must be checkpointed for a step to fit, with the margin of [`verdict_on`].

    Args:
        plan (callable): Returns the memory of a step with a value of `gradient_checkpointing`.
        blocks (`int`): Blocks of the transformer.
        memory (`float`): Bytes of the device.

    Returns:
        `bool` or `int`: False for none, a number from 2 on, or True for all, also where not even those are enough.
    """
    choices: list[bool | int] = [False, *range(2, blocks), True]
    first = bisect_left(choices[:-1], True, key=lambda count: verdict_on(plan(count).total, memory) == "fits")
    return choices[first]


def _audio_tokens(components: Components, config: PlanConfig, size: Size) -> int:
    """Return the tokens of the audio of a sample of a size; 0 where no audio is trained.

    Raises:
        BucketingError: If the settings name audio, and the model makes none.
    """
    if config.samples.audio_fps is None:
        return 0
    if components.audio is None:
        raise BucketingError(f"Omit `audio_fps`: a {components.recipe.pipeline_class} makes no audio.")
    return int(components.audio.num_tokens(size.frames, config.samples.audio_fps))


def _audio_length(components: Components, shape: StepShape) -> int:
    """Return the tokens of the audio of each sample: their mean, in whole stretches of sound; 0 without audio."""
    mean = -(-shape.audio_tokens // shape.samples)
    return round_to_multiple(mean, components.audio.tokens_at_once) if mean and components.audio else 0


def sample_shape(components: Components, config: PlanConfig, size: Size) -> StepShape:
    """Return the shape of a step of one sample of a size, with the references and the audio that the settings name.

    Raises:
        BucketingError: If the model takes no such references, or makes no audio.
    """
    recipe, spec = components.recipe, components.spec
    rule = recipe.reference_rule(components.settings, config.run.trained_component)
    count, still = rule.least, size._replace(frames=1)
    least = rule.in_pixels(spec.multiples).sizes([still] * count, [size] * count, alone=[count == 1] * count)
    reference_sizes = config.samples.references() or tuple(Size(*sides) for sides in least.tolist())
    if fault := rule.fault(len(reference_sizes)):
        raise BucketingError(f"No sample of a {recipe.pipeline_class} has such `reference_sizes`. {fault}.")
    if recipe.reference_condition().in_front:
        reference_sizes = (size._replace(frames=1),) * len(reference_sizes)
    other_rules = ConditionRules(rules=(_appended(components, config), *token_conditions(recipe.conditions)))
    other_rows = other_rules.rows({}, num_rows=1)
    others = other_rows.sizes([size], spec=spec)[0]
    return StepShape.of(
        [size],
        # Raises if one does not divide into tokens.
        tokens=sum(map(spec.num_tokens, (size, *reference_sizes, *others))),
        text_tokens=recipe.text_tokens(config.run.max_sequence_length)
        + recipe.reference_text(reference_sizes, spec)
        + int(other_rows.text_tokens([size], spec=spec)[0]),
        audio_tokens=_audio_tokens(components, config, size),
        references=[(*reference_sizes, *others)],
    )


def _appended(components: Components, config: PlanConfig) -> AppendedFrames:
    """Return the frames that a run appends."""
    return appended_by(config.run.objective.condition, components.recipe.condition(KEYFRAMES))


def keyframe_text(components: Components, config: PlanConfig, size: Size) -> int:
    """Return the tokens that these frames add to the text of a sample of a size."""
    return int(_appended(components, config).text_tokens(size, spec=components.spec)[0])


def step_shape(
    components: Components, config: PlanConfig, size: Size | None = None, *, samples: int | None = None
) -> StepShape:
    """Return the shape of a step of as many samples of a size as the settings name, each of whole strips in packs.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for: `max_tokens`, or else `train_batch_size`, says how many samples.
        size ([`Size`][hf_bucketing.Size], *optional*): Size of the samples, by default `sample_size`.
        samples (`int`, *optional*): Number of samples, in place of what the settings say.

    Raises:
        BucketingError: As [`sample_shape`], or if the settings leave the number to a run (`max_tokens="auto"`).
    """
    sample = sample_shape(components, config, size or _size_of(components, config))
    tokens = sample.tokens
    batches = config.run.batches
    if batches.strips is not None:
        tokens = strip_tokens(tokens + sample.audio_tokens, batches.strips) - sample.audio_tokens
    if samples is None:
        samples = _samples_of(batches, tokens=tokens + sample.audio_tokens + sample.text_tokens)
    return sample.repeated(samples, tokens=tokens)


def _samples_of(batches: BatchConfig, *, tokens: int) -> int:
    """Return the samples of a step, each of as many tokens, at least one."""
    if batches.max_tokens == "auto":
        raise BucketingError(
            '`max_tokens="auto"` is found by a run, on its device; give a number of tokens, or `train_batch_size`. '
            "The plan says how many tokens would fit."
        )
    return batches.train_batch_size if batches.max_tokens is None else max(1, batches.max_tokens // tokens)


def _size_of(components: Components, config: PlanConfig) -> Size:
    if config.samples.sample_size is not None:
        return Size(*config.samples.sample_size)
    images_only = components.recipe.family.images_only
    frames = 1 if images_only else components.transformer.config.get("video_length", _FRAMES)
    return components.spec.snap(Size(frames, *components.recipe.native_sizes[0]))


def _step(components: Components, config: PlanConfig, shape: StepShape) -> TracedStep:
    memory, condition, spec = config.run.memory, config.run.objective.condition, components.spec
    assert not isinstance(memory.gradient_checkpointing, str), "a run has chosen, and a plan refuses it"
    latents, *references = map(spec.latent_size, (shape.size, *shape.references))
    tokens = -(-shape.tokens // shape.samples // memory.context_parallel_degree)
    recipe = components.recipe
    reference_tokens = sum(map(spec.num_tokens, shape.references))
    as_frames = recipe.reference_condition().in_front or recipe.family.references_as_frames
    if as_frames or memory.context_parallel_degree > 1 or tokens <= reference_tokens:
        references, reference_tokens = [], 0  # they are frames of the sample, or a part of its tokens
    if tokens - reference_tokens != spec.num_tokens(shape.size):
        more = len(shape.references) if as_frames else 0
        latents = _grid_of(tokens - reference_tokens, spec, frames=latents[0] + more)
    return TracedStep(
        transformer=components.transformer,
        latent_sizes=(latents,) * shape.samples,
        reference_sizes=tuple(references),
        text_length=-(-shape.text_tokens // shape.samples) or recipe.text_length(config.run.max_sequence_length),
        mixed_precision=config.precision,
        trained_dtype=memory.trained_dtype,
        adapters=replace(config.run.adapters, lora_alpha=None, init_from_adapters=None, frozen_adapters=None),
        quantize_base=memory.quantize_base,
        gradient_checkpointing=memory.gradient_checkpointing,
        offload_activations=memory.offload_activations,
        shards=config.shards,
        base_predictions=config.run.preservation.base_predictions,
        audio_length=_audio_length(components, shape),
        references=most_appended(condition) > 0,
        token_timesteps=recipe.has_clean_parts(components.settings, draws=draws_parts(condition)),
    )


def _grid_of(tokens: int, spec: LatentSpec, *, frames: int) -> tuple[int, int, int]:
    """Return a size of latents with as many tokens, for a part of a sample, or a mean of several."""
    patch_frames, patch_height, patch_width = spec.patch
    frames = min(frames, patch_frames * tokens)
    in_frame = -(-tokens // (frames // patch_frames))
    rows = max(1, math.isqrt(in_frame))
    return frames, patch_height * rows, patch_width * -(-in_frame // rows)


def _phases(components: Components, config: PlanConfig, traced: Traced, shape: StepShape) -> dict[str, MemoryParts]:
    shards, samples = config.shards, config.samples
    trained_bytes = traced.trained_bytes / shards
    accumulated = trained_bytes if config.run.gradient_accumulation_steps > 1 else 0
    text, vae, pixels = Kinds(), Kinds(), 0
    if samples.cached != "all":
        pictures = components.recipe.encoder_pictures(shape.references)
        pictures += keyframe_text(components, config, shape.size)
        text = encode_texts(components, config, samples=shape.samples, pictures=pictures).peak
    if samples.cached == "nothing":
        stacked = stacks(config.run.batches.batching) and not config.run.memory.vae_tiling
        together = shape.samples if stacked else 1
        encoded = {shape.size: together, **dict.fromkeys(set(shape.references) - {shape.size}, 1)}
        calls = [encode_media(components, config, size=size, samples=count) for size, count in encoded.items()]
        vae = max((call.peak for call in calls), key=lambda peak: peak.total)
        pixels = 3 * 4 * shape.pixels
    resident = replace(
        _kept_of_trained(traced, config),
        weights=_offloaded(traced, config) + _frozen_adapters(config),
        activations=pixels,
        text_encoder=round(text.weights),
        vae=round(vae.weights),
        context=CUDA_CONTEXT if config.launch.device == "cuda" else 0,
    )
    phases: dict[str, MemoryParts] = {
        name: replace(
            resident,
            weights=round(resident.weights + kinds.weights),
            gradients=round(resident.gradients + max(kinds.gradients, accumulated)),
            activations=round(resident.activations + kinds.activations),
        )
        for name, kinds in traced.peaks.items()
    }
    weights = traced.weights / shards
    between = replace(resident, weights=round(resident.weights + weights))
    step = _made_by_optimizer(traced, config) / shards
    phases["optimizer"] = replace(
        between,
        gradients=round(resident.gradients + trained_bytes),
        optimizer=round(resident.optimizer + step),
    )
    encoding = replace(between, gradients=round(resident.gradients + accumulated))
    if samples.cached != "all":
        phases["text encoding"] = replace(encoding, text_encoder=round(text.total))
    if samples.cached == "nothing":
        phases["media encoding"] = replace(encoding, vae=round(vae.total))
    return phases


def _frozen_adapters(config: PlanConfig) -> int:
    """Return the bytes of frozen adapters, of the expert that takes most, in the precision of the frozen weights."""
    trained = config.run.trained_component
    folders = [expert_folder(component, trained=trained) for component in transformers_of(trained)]
    adapters = config.run.adapters
    counts = [sum(count_weights(frozen.path) for frozen in adapters.frozen_in(folder)) for folder in folders]
    return round(max(counts) * HALF.get(config.precision, torch.float32).itemsize / config.shards)


def _kept_of_trained(traced: Traced, config: PlanConfig) -> MemoryParts:
    """Return what stays between steps beside the weights: the optimizer's state, averages, and DDP's buckets."""
    shards = config.shards
    # DDP copies gradients into buckets, which it keeps.
    buckets = traced.trained_bytes if shards == 1 and config.launch.num_processes > 1 else 0
    return MemoryParts(
        gradients=round(buckets),
        optimizer=round(optimizer_bytes(traced, config) / shards),
        averages=round(4 * traced.trained / shards) if config.run.ema_decay is not None else 0,
    )


def _held_by_idle(traced: Traced, config: PlanConfig) -> MemoryParts:
    """Return what a transformer takes that a step does not train: its weights, those alone that do not wait."""
    waiting = config.run.memory.offload_blocks * traced.frozen_bytes / traced.blocks
    weights = traced.trained_bytes if config.run.memory.offload_idle_expert else traced.weights - waiting
    return replace(_kept_of_trained(traced, config), weights=round(weights))


def _offloaded(traced: Traced, config: PlanConfig) -> int:
    """Return what blocks that wait on the CPU save, as a negative number: all of them but the one that is computed.

    Where blocks differ, as those of two streams and of one, each that waits counts as their mean.
    """
    if not config.run.memory.offload_blocks:
        return 0
    waiting = traced.frozen_bytes * config.run.memory.offload_blocks / traced.blocks
    return -round(max(waiting - traced.block_bytes, 0))


def optimizer_bytes(traced: Traced, config: PlanConfig) -> float:
    """Return the bytes of the optimizer's state; those of AdamW in 8 bits are known where it is not installed."""
    if config.run.optimizer.optimizer == "adamw_8bit":
        return 2 * _QUANTISED_MOMENT * traced.trained
    half = traced.trained_bytes < torch.float32.itemsize * traced.trained
    dtype = torch.bfloat16 if half else torch.float32
    return state_bytes(config.run.optimizer, dtype=dtype) / dtype.itemsize * traced.trained_bytes


def _made_by_optimizer(traced: Traced, config: PlanConfig) -> float:
    """Return the bytes that a step of the optimizer makes: on a GPU of all weights at once, else of each in turn."""
    if config.run.optimizer.optimizer == "adamw_8bit":
        return 0
    return traced.trained_bytes if config.launch.device == "cuda" else 2 * traced.largest


def largest_tokens(components: Components, config: PlanConfig, *, memory: float, at_most: int = MOST_TOKENS) -> int:
    """Return the most tokens per process and step that a plan holds, in samples of its size or a part of one.

    Memory is a line in the number of samples, drawn through one and two, and through one and what does not fit.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): What is planned for; its number of samples does not matter.
        memory (`float`): Bytes on each device.
        at_most (`int`): Tokens beyond which nothing is gained. The search ends at [`MOST_TOKENS`] in any case, or at
            the tokens of one sample where those are more.

    Returns:
        `int`: Tokens, as `max_tokens` counts them; 0 if not even the weights fit.
    """

    def plan(samples: int) -> MemoryPlan:
        return plan_components(components, config, step_shape(components, config, samples=samples))

    plan_of_one = plan(1)
    length = plan_of_one.shape.length
    samples = min(_crossing(plan_of_one, plan(2), memory), at_most / length, max(1.0, MOST_TOKENS / length))
    for _ in range(_SEARCHED):
        if samples <= 2:
            break
        samples = math.floor(samples)
        more = plan(samples)
        if more.total <= memory:
            break
        samples = _crossing(plan_of_one, more, memory)
    else:
        samples = min(samples, 2)  # as many fit, or there would have been no search
    return max(0, math.floor(samples * length))


def _crossing(fewer: MemoryPlan, more: MemoryPlan, memory: float) -> float:
    """Return how many samples fill the memory in the first phase, on lines through plans of one sample and of more."""
    counts = []
    for name, parts in fewer.phases.items():
        per_sample = (more.phases[name].total - parts.total) / (more.shape.samples - 1)
        room = memory - parts.total
        counts.append(1 + room / per_sample if per_sample > 0 else (float("inf") if room >= 0 else 0.0))
    return min(counts)
