"""What a run prints about itself: what it does and where, how long it takes, and what to do with its result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from accelerate import Accelerator

from ..adapters.settings import AdapterConfig
from ..buckets.sizes import Size
from ..conditions.names import REFERENCE
from ..configuration.run import TrainingConfig
from ..loaders.planned import StepCount
from ..models.calls import IMAGES
from ..models.recipe import Recipe
from ..runs.review import duration

TIMED_STEPS = 10
"""Optimizer steps whose times say how long a run takes."""

_KINDS = {"lora": "LoRA", "dora": "DoRA", "loha": "LoHa", "lokr": "LoKr"}


def describe_run(config: TrainingConfig, accelerator: Accelerator, *, planned: StepCount, finished: int) -> str:
    """Return what a run does and where it writes, in one line."""
    processes = accelerator.num_processes
    files = " and ".join(config.weight_files.values())
    weights = f", with the weights of {files}," if files else ""
    done = f", {finished:,} of them done," if finished else ""
    return (
        f"Trains {_trained(config.adapters)} of {config.pretrained_model_name_or_path}{weights} on "
        f"{config.dataset_dir}: "
        f"{planned} optimizer steps{done} on {processes} {'process' if processes == 1 else 'processes'}, in "
        f"{'float32' if accelerator.mixed_precision == 'no' else accelerator.mixed_precision}. "
        f"Writes to {config.output_dir}; after {TIMED_STEPS} steps it says how long it takes."
    )


def _trained(adapters: AdapterConfig) -> str:
    if adapters.lora_rank is None:
        return "the whole transformer"
    return f"{_KINDS[adapters.adapter]} of rank {adapters.lora_rank} on the transformer"


def time_left(seconds: Sequence[float], *, steps: int) -> str:
    """Return how long the steps that are left take, in one line; the first step, which warms up, does not count.

    Args:
        seconds (sequence of `float`): Times of the first optimizer steps, at least two.
        steps (`int`): Optimizer steps that are left.
    """
    typical = median(seconds[1:])
    return (
        f"About {duration(typical * steps)} are left: {steps:,} optimizer steps of {typical:.3g} s, the median of "
        f"{len(seconds) - 1}, renderings, held-out losses and checkpoints not counted."
    )


def next_commands(config: TrainingConfig, recipe: Recipe, *, size: Size, fps: int, images_only: bool) -> list[str]:
    """Return the commands that a person may want after a run, each with what it does.

    Args:
        config ([`TrainingConfig`]): Settings of the run.
        recipe ([`Recipe`]): Recipe of its pipeline.
        size ([`Size`][hf_bucketing.Size]): Size to render, such as that of most samples.
        fps (`int`): Frame rate of a rendered video.
        images_only (`bool`): Whether the pipeline makes images.
    """
    folder, adapted = config.output_dir, config.adapters.lora_rank is not None
    prompt = (config.validation.validation_prompts or ["what it shows"])[0]
    names = [*IMAGES[: recipe.num_images(recipe.config)], *recipe.required_conditions()]
    names += [REFERENCE] if recipe.needs_reference else []
    sample: list[object] = [config.pretrained_model_name_or_path if adapted else folder]
    for name, file in config.weight_files.items() if adapted else ():
        sample += [f"--{name}", file]
    sample += ["--adapter", folder] if adapted else []
    if config.trained_component != "transformer":
        sample += ["--trained_component", config.trained_component]
    for name in names:
        sample += [f"--{name}", f"{name}.png"]
    sample += ["--prompt", prompt, "--height", size.height, "--width", size.width]
    sample += [] if images_only else ["--num_frames", size.frames, "--fps", fps]
    picture = images_only or size.frames == 1
    sample += ["--output", Path(folder) / ("sample.png" if picture else "sample.mp4")]
    sample += ["--compare_base"] if adapted else []
    report = [folder, "--html", Path(folder) / "report.html"]
    lines = [
        "What to do next:",
        f"  render a prompt:  {_command('sample', *sample)}",
        f"  see how it went:  {_command('report', 'run', *report)}",
    ]
    if config.checkpoints.checkpointing_steps is not None:
        lines.append("  train for longer: the same command with --resume_from_checkpoint latest and more steps")
    return lines


def _command(*words: object) -> str:
    return shlex.join(["hf_bucketing", *map(str, words)])
