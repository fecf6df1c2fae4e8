"""Memory of a run: an estimate before it starts, the most tokens that fit, and advice when memory runs out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size

from ..batching.rows import TrainingData, make_data
from ..batching.run_data import LargestStep, RunData
from ..batching.sample_rows import ModelTokens
from ..batching.ways import Experts
from ..buckets.sizes import Size
from ..conditions.audio import AUDIO
from ..conditions.names import FRAME_BY_FRAME, KEYFRAMES, MASK, REFERENCE
from ..configuration.run import TrainingConfig
from ..errors import BucketingError
from ..media.audio import CHANNELS
from ..models.loss_mask import LOSS_MASK
from ..models.recipe import Recipe
from ..models.samples import REFERENCES
from ..models.texts import AUDIO_TEXT
from ..optimizers.optimizer import make_optimizer, set_training
from ..packing.batch import has_latent_size
from ..placement.blocks import blocks_of, checkpoint_blocks
from ..planner.components import Components, read_components
from ..planner.memory import (
    PLAN_ERROR,
    MemoryPlan,
    StepShape,
    fewest_checkpoints,
    largest_tokens,
    plan_components,
    verdict_on,
)
from ..planner.settings import PlanConfig, as_reference_sizes
from ..plans.packs import strip_tokens
from ..plans.rows import epoch_occurrences
from ..settings import changed, flatten
from ..units import format_bytes
from .opened import OpenedRun, launch_of

logger = get_logger(__name__)

_SMALL = 0.01
"""Share of the device's memory below which weights are too few for memory to matter."""

_MARGIN = 1.25
"""Memory for which `max_tokens="auto"` is planned, relative to what there is: the search goes down only."""


def describe_memory(opened: OpenedRun, data: RunData, *, transformers: Sequence[torch.nn.Module]) -> list[str]:
    """Return the memory that the most expensive step of the first epoch needs, by kind, as lines of text.

    At the start of a run, the main process alone plans, and not for models whose weights take less than 1 % of the
    device's memory. A model that cannot be traced gets a line that says why.
    """
    config, accelerator = opened.config, opened.accelerator
    held, has = _held_bytes(transformers), _device_bytes(accelerator)
    if not accelerator.is_main_process or (not config.dry_run and held < _SMALL * has):
        return []
    try:
        memory = plan_of_run(opened, data)
    except Exception as error:  # whatever a model does that torch cannot trace must not end a run that works
        return [f"  Memory per process = not planned: {describe_error(error)}"]
    lines = [f"  Memory per process = {memory}"]
    if config.memory.compile:
        lines.append("    at most: blocks are planned as they are, and compiled ones keep less")
    if config.dry_run:
        lines += [f"    {phase}: {parts}" for phase, parts in memory.phases.items()]
    verdict = verdict_on(memory.total, has)
    if verdict == "does not fit":
        lines.append(f"  That is more than the {format_bytes(has)} of the device: see hf_bucketing plan")
    elif verdict == "tight":
        lines.append(
            f"  That is tight in the {format_bytes(has)} of the device, as runs may take {PLAN_ERROR:.0%} more than "
            "planned: see hf_bucketing plan"
        )
    elif config.dry_run:
        lines.append(f"  That fits in the {format_bytes(has)} of the device")
    return lines


def plan_of_run(opened: OpenedRun, data: RunData) -> MemoryPlan:
    """Plan the memory of the most expensive step of a run's epoch.

    Raises:
        BucketingError: As [`planned_run`].
    """
    step = data.largest_step()
    components, config = components_of(opened), planned_run(opened)
    text = data.text_tokens * len(step.sizes) + int(step.conditions.text_tokens(step.sizes, spec=data.spec).sum())
    audio_tokens = sum(step.audio)
    shape = StepShape.of(
        step.sizes,
        tokens=step.tokens - text - audio_tokens,
        text_tokens=text,
        audio_tokens=audio_tokens,
        references=step.conditions.sizes(step.sizes, spec=data.spec),
    )
    return plan_components(components, config, shape)


def components_of(opened: OpenedRun) -> Components:
    """Return the configurations of a run's pipeline."""
    config = opened.config
    return read_components(
        config.pretrained_model_name_or_path,
        trained=config.trained_component,
        transformer_file=config.transformer_file,
    )


def planned_run(opened: OpenedRun, **changes: Any) -> PlanConfig:
    """Return the settings and the launch of a run as a plan takes them, some of them changed.

    Raises:
        BucketingError: If they cannot be combined, or weights are sharded by another library than FSDP2.
    """
    accelerator, called = opened.accelerator, opened.called
    launch = launch_of(accelerator)
    values = {**opened.config.run.flat(), **flatten(launch), "mixed_precision": accelerator.mixed_precision}
    values["cached"] = "nothing" if "vae" in called else "latents" if "text_encoders" in called else "all"
    if launch.wraps_blocks:
        values["gradient_checkpointing"] = True
    return PlanConfig.from_flat(**{**values, **changes})


def fill_checkpointing(opened: OpenedRun, data: RunData, recipe: Recipe) -> TrainingConfig:
    """Return the settings with `gradient_checkpointing="auto"` replaced, and checkpoint as few blocks as are enough.

    They are planned for the most expensive step, and the most of all processes count; all blocks if memory cannot be
    planned.
    """
    config, accelerator = opened.config, opened.accelerator
    if config.memory.gradient_checkpointing != "auto":
        return config
    blocks = min(len(blocks_of(expert.transformer)) for expert in recipe.experts)

    def plan(count: bool | int) -> MemoryPlan:
        chosen = changed(config, gradient_checkpointing=count)
        return plan_of_run(dataclasses.replace(opened, config=chosen), data)

    try:
        count = fewest_checkpoints(plan, blocks=blocks, memory=_device_bytes(accelerator))
    except Exception as error:  # as in describe_memory
        logger.warning(f"All blocks are checkpointed, as memory is not planned: {describe_error(error)}")
        count = True
    number = torch.tensor([blocks if count is True else int(count)], device=accelerator.device)
    most = int(accelerator.gather(number).max())
    chosen: bool | int = True if most == blocks else most or False
    for expert in recipe.experts:
        checkpoint_blocks(expert.transformer, chosen)
    accelerator.print(f"--gradient_checkpointing auto chose {most} of {blocks} blocks")
    return changed(config, gradient_checkpointing=chosen)


def find_max_tokens(try_step: Callable[[int], None], *, largest: int, smallest: int) -> int:
    """Return the largest `max_tokens` whose most expensive step fits, as accelerate's batch size finder searches.

    Args:
        try_step (callable): Function that runs that step for a number of tokens, and raises what torch raises when
            memory runs out.
        largest (`int`): Tokens to start from; each failure takes off a tenth.
        smallest (`int`): Tokens of the largest sample, below which no plan exists.

    Raises:
        BucketingError: If not even `smallest` fits.
    """

    @find_executable_batch_size(starting_batch_size=largest)
    def search(batch_size: int) -> int:
        if batch_size < smallest:
            raise BucketingError(
                f"The largest sample takes {smallest} tokens, and a step of {batch_size} is the most that could fit. "
                'Use smaller sizes, `gradient_checkpointing=True`, `mixed_precision="bf16"` or `lora_rank=16`.'
            )
        try_step(batch_size)
        return batch_size

    most: int = search()
    return most


def fill_max_tokens(opened: OpenedRun, experts: Experts) -> TrainingConfig:
    """Return the settings with `max_tokens="auto"` replaced by the largest number of tokens that fits in memory.

    The most expensive step of the plan is run forward and backward on random media, with an optimizer that changes
    nothing and holds the state of the run's, on each process and by each expert; the smallest result counts.

    Raises:
        BucketingError: If not even the largest sample fits.
    """
    config, spec, accelerator = opened.config, opened.spec, opened.accelerator
    if config.batches.max_tokens != "auto":
        return config
    searched = changed(config, random_resize=None)  # samples at their own size are the largest that are drawn
    cache = None if opened.prepared is None else opened.prepared.cache
    if cache is not None and cache.random_resize is not None:
        searched = changed(searched, cached_views="first")
    recipe = experts.steps[0].recipe
    counting = ModelTokens.of(recipe)
    for expert in recipe.experts:
        expert.transformer.to(accelerator.device)
    unlimited = make_data(changed(searched, max_tokens=2**40), spec, counting, prepared=opened.prepared)
    tokens = unlimited.num_tokens
    smallest = strip_tokens(int(tokens.max()), config.batches.strip_length) + counting.text_tokens
    weights = unlimited.sampler.weights
    assert not isinstance(weights, Mapping), "training weighs rows, not buckets"
    often = epoch_occurrences(weights, num_rows=len(tokens), seed=config.seed)
    of_epoch = int(((tokens + counting.text_tokens * (tokens > 0)) * often).sum())
    share = -(-of_epoch // accelerator.num_processes)
    rows = np.array([tokens.argmax()])
    (size,), (reference_sizes,) = unlimited.sizes(rows), unlimited.reference_sizes(rows)
    fps = None
    if (audio := unlimited.row_conditions.audio) is not None and audio.present[rows[0]]:
        fps = float(audio.fps[rows[0]])
    largest = _planned_tokens(opened, size, reference_sizes, audio_fps=fps, at_most=share, recipe=recipe)

    def try_step(max_tokens: int) -> None:
        data = make_data(changed(searched, max_tokens=max_tokens), spec, counting, prepared=opened.prepared)
        plan = data.sampler.plan(0)
        rows = plan.batch(int(data.costs_of(plan, epoch=0).argmax()))
        others = [expert.transformer for expert in recipe.experts[1:]]
        optimizer = make_optimizer(recipe.transformer, config.optimizer, others=others)
        set_training(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= 0
        for expert in experts.steps:
            condition = None if expert.condition is None else expert.condition.most
            step = dataclasses.replace(expert, texts=data.texts, condition=condition)
            batch = _random_batch(data.step_of(rows, tokens=0), step.recipe, accelerator.device, data=data)
            with accelerator.autocast():
                losses = step(step.recipe.transformer, batch, epoch=0)
            losses.values.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    local_max = torch.tensor(find_max_tokens(try_step, largest=max(largest, smallest), smallest=smallest))
    max_tokens = int(accelerator.gather(local_max.to(accelerator.device)[None]).min())
    accelerator.print(f"--max_tokens auto found {max_tokens} tokens per process and step")
    return changed(config, max_tokens=max_tokens)


def _planned_tokens(
    opened: OpenedRun,
    size: Size,
    references: tuple[Size, ...],
    *,
    audio_fps: float | None = None,
    at_most: int,
    recipe: Recipe,
) -> int:
    """Return somewhat more tokens than a plan says that fit, from which to search down.

    Samples are of a size, with these references each, and with audio of as many frames per second, if any.
    """
    held = _held_bytes([expert.transformer for expert in recipe.experts])
    try:
        reference_sizes = as_reference_sizes(references)
        planned = planned_run(opened, sample_size=list(size), reference_sizes=reference_sizes, audio_fps=audio_fps)
        memory = _MARGIN * (_free_bytes(opened.accelerator) + held)
        return largest_tokens(components_of(opened), planned, memory=memory, at_most=at_most)
    except Exception as error:  # as in describe_memory
        logger.warning(f"The search starts from {at_most} tokens, as memory is not planned: {describe_error(error)}")
        return at_most


def _held_bytes(transformers: Sequence[torch.nn.Module]) -> int:
    """Return the bytes of the weights of transformers, but for those that wait on the CPU."""
    return sum(parameter.nbytes for transformer in transformers for parameter in transformer.parameters())


def describe_error(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def out_of_memory(error: Exception, batch: Mapping[str, Any], config: TrainingConfig) -> str | None:
    """Return what to do if an error says that memory ran out while training on a batch; None for other errors."""
    if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
        return None
    sizes = ", ".join("x".join(map(str, size)) for size in batch["size"])
    less = "`max_tokens`" if config.batches.max_tokens is not None else "`train_batch_size`"
    helps = [f"lower {less}"]
    helps += [] if config.memory.gradient_checkpointing is True else ["use `gradient_checkpointing=True`"]
    helps += ['use `max_tokens="auto"` to find what fits', "or train adapters with `lora_rank=16`"]
    return (
        f"Memory ran out on {len(batch['size'])} samples (frames x height x width: {sizes}; index "
        f"{list(batch['index'])}): {', '.join(helps)}. {str(error).splitlines()[0]}"
    )


def _device_bytes(accelerator: Accelerator) -> int:
    if accelerator.device.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator.device)[1])
    return int(psutil.virtual_memory().total) // accelerator.num_processes


def _free_bytes(accelerator: Accelerator) -> int:
    if accelerator.device.type == "cuda":
        return int(torch.cuda.mem_get_info(accelerator.device)[0])
    return int(psutil.virtual_memory().available) // accelerator.num_processes


def _blank(condition: str, size: Size, device: torch.device) -> torch.Tensor:
    """Return a condition of a sample of that size, all white."""
    frames = size.frames if condition in FRAME_BY_FRAME else 1
    return torch.ones(1 if condition == MASK else 3, frames, size.height, size.width, device=device)


def _random_batch(largest: LargestStep, recipe: Recipe, device: torch.device, *, data: TrainingData) -> dict[str, Any]:
    """Return a batch of the run's kind with random media or, where the run reads a cache, random latents."""
    sizes, references = largest.sizes, largest.references
    batch: dict[str, Any] = {
        "caption": ["a " * data.text_tokens] * len(sizes),  # as long as a caption can be where its length matters
        "index": list(range(len(sizes))),
        "fps": [0.0] * len(sizes),
        "size": sizes,
    }
    transformer, family = recipe.transformer, recipe.family
    name = "pixel_values" if recipe.modules("vae") else "latents"
    channels = 3 if name == "pixel_values" else recipe.latent_channels
    in_front = recipe.reference_condition().in_front and name == "latents"

    def random_media(size: Size, *, before: int = 0) -> torch.Tensor:
        frames, *sides = size if name == "pixel_values" else data.spec.latent_size(size)
        return torch.rand(channels, frames + before, *sides, device=device) * 2 - 1

    pairs = zip(sizes, references, strict=True)
    media = [random_media(size, before=len(of_sample) if in_front else 0) for size, of_sample in pairs]
    pictures = [tuple(map(random_media, of_sample)) for of_sample in references]
    batch[name] = torch.stack(media) if data.way.stacks else media
    if name == "pixel_values":
        batch["shown"] = {
            condition: pictures if condition == REFERENCE else [_blank(condition, size, device) for size in sizes]
            for condition in data.conditions
            if condition != AUDIO
        }
        if (audio := largest.conditions.audio) is not None:
            samples = map(audio.rule.num_samples, largest.audio)
            batch["shown"][AUDIO] = [torch.rand(CHANNELS, count, device=device) for count in samples]
    else:
        blank = [recipe.blank_conditions(latent) for latent in media]
        batch["conditions"] = {condition: [sample[condition] for sample in blank] for condition in blank[0]}
        if MASK in data.conditions:
            batch["conditions"][LOSS_MASK] = [torch.ones_like(latent[:1]) for latent in media]
        if REFERENCE in data.conditions and not recipe.reference_condition().in_front:
            batch["conditions"][REFERENCES] = pictures
        batch["conditions"][KEYFRAMES] = [
            (random_media(size._replace(frames=1)),) * (latent.shape[1] - 1)
            for size, latent in zip(sizes, media, strict=True)
        ]
        if largest.conditions.audio is not None:
            channels = family.audio_channels(transformer)
            batch["conditions"][AUDIO] = [torch.randn(count, channels, device=device) for count in largest.audio]
    if not recipe.modules("text_encoders"):
        length = recipe.max_sequence_length
        words = recipe.text_tokens(length) or recipe.text_length(length)
        shape = len(sizes), words + max(recipe.reference_text(of_sample, data.spec) for of_sample in references)
        batch["text_values"] = torch.randn(*shape, family.text_dim(transformer), device=device)
        batch["text_mask"] = (
            recipe.blank_text_mask(shape, [*map(len, references)]) if family.text.padding == "masked" else None
        )
        drawn = family.draw_conditioning(transformer, [data.spec.grid(size) for size in sizes])
        batch["text_others"] = {
            name: values.to(device) for name, values in drawn.items() if not has_latent_size(values)
        }
        if recipe.audio and (text_dim := family.audio_text_dim(transformer)):
            batch["text_others"][AUDIO_TEXT] = torch.randn(*shape, text_dim, device=device)
    return batch
