"""The way from "does not fit" to "fits": options one after another, and what each of them saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import BucketingError
from ..formats import is_gguf
from ..report.charts import Chart, bar_chart
from ..settings import changed, flatten
from ..units import format_bytes
from .components import Components, read_components
from .memory import (
    MOST_TOKENS,
    PLAN_ERROR,
    MemoryPlan,
    fewest_checkpoints,
    largest_tokens,
    plan_components,
    verdict_on,
)
from .settings import PlanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOption:
    """One row of a table of options: the settings of the row above with one more.

    Attributes:
        name (`str`): What is added, and its flag.
        config ([`PlanConfig`]): All settings of the row.
        plan ([`MemoryPlan`]): What they need.
        saved (`int`): Bytes that the row above needs more.
        max_tokens (`int`): The most tokens per process and step that the memory holds as planned with these settings.
    """

    name: str
    config: PlanConfig
    plan: MemoryPlan
    saved: int
    max_tokens: int


def plan_options(
    name_or_path: str,
    config: PlanConfig,
    *,
    gpu_memory: float,
    progress: Callable[[MemoryOption], None] = lambda row: None,
) -> list[MemoryOption]:
    """Plan the given settings, then add options that save memory, the cheapest in time and quality first.

    What is trained stays the same: no option replaces the weights by adapters. Once a step holds the most tokens that
    are searched for ([`MOST_TOKENS`][hf_bucketing.planner.memory.MOST_TOKENS]), nothing more is added.

    Args:
        name_or_path (`str`): Diffusers pipeline, on the hub or in a folder with the configurations of its models.
        config ([`PlanConfig`]): Settings to start from.
        gpu_memory (`float`): GiB of each device.
        progress (callable): Function that gets each option as soon as it is planned, after some seconds, also one
            that saves nothing.

    Returns:
        `list` of [`MemoryOption`]: Rows for the options that the model can have, and that save something.

    Raises:
        BucketingError: If there is no such pipeline, it cannot be trained on such samples, or `gpu_memory` is not
            above 0.
    """
    if not 0 < gpu_memory < math.inf:
        raise BucketingError(f"`gpu_memory` must be above 0 GiB, got {gpu_memory}.")
    components = read_components(
        name_or_path, trained=config.run.trained_component, transformer_file=config.run.transformer_file
    )
    rows: list[MemoryOption] = []
    for name, settings, plan in iter_plans(components, config, memory=gpu_memory * 2**30):
        row = MemoryOption(
            name=name,
            config=settings,
            plan=plan,
            saved=rows[-1].plan.total - plan.total if rows else 0,
            max_tokens=largest_tokens(components, settings, memory=gpu_memory * 2**30),
        )
        progress(row)
        if not rows or row.saved > 0.001 * plan.total:
            rows.append(row)
        if row.max_tokens + plan.shape.length // plan.shape.samples > MOST_TOKENS:
            break
    return rows


def iter_plans(
    components: Components, config: PlanConfig, *, memory: float | None = None
) -> Iterator[tuple[str, PlanConfig, MemoryPlan]]:
    """Iterate over the given settings and those with one more option each, and the memory that they need.

    Options that the model cannot have are omitted.

    Args:
        components ([`Components`]): Configurations of the pipeline.
        config ([`PlanConfig`]): Settings to start from.
        memory (`float`, *optional*): Bytes of the device, for which as few checkpointed blocks as are enough are an
            option too. Omit it where a step is to hold as many tokens as possible, for which all blocks save most.

    Raises:
        BucketingError: If it cannot be trained on such samples with the given settings.
    """
    for name, settings in _ladder(components, config, memory=memory):
        try:
            plan = plan_components(components, settings)
        except BucketingError:
            if name == UNCHANGED:
                raise
            continue  # the settings as given can be planned, so this model cannot have the option
        yield name, settings, plan


def best_option(rows: Sequence[MemoryOption], *, gpu_memory: float) -> MemoryOption:
    """Return the first row that fits; where none does, the first that is tight, or the one that needs least.

    Args:
        rows (sequence of [`MemoryOption`]): Options, the cheapest first.
        gpu_memory (`float`): GiB of each device.
    """
    for wanted in ("fits", "tight"):
        for row in rows:
            if verdict_on(row.plan.total, gpu_memory * 2**30) == wanted:
                return row
    return min(rows, key=lambda row: row.plan.total)


def describe_verdict(row: MemoryOption, *, gpu_memory: float) -> str:
    """Return in a sentence whether an option fits.

    Args:
        row ([`MemoryOption`]): The option.
        gpu_memory (`float`): GiB of each device.
    """
    plan, verdict = row.plan, verdict_on(row.plan.total, gpu_memory * 2**30)
    options = "as given" if row.name == UNCHANGED else f'with the options up to "{row.name}"'
    warning = f"; runs may take {PLAN_ERROR:.0%} more than planned" if verdict == "tight" else ""
    return (
        f"{verdict[0].upper()}{verdict[1:]}: {options}, {plan.shape.samples} x {plan.shape.size} per step are planned "
        f"to take {format_bytes(plan.total)} of {gpu_memory:g} GiB{warning}."
    )


def check_fits(rows: Sequence[MemoryOption], *, gpu_memory: float) -> None:
    """Raise BucketingError if no row fits, naming the one that needs least."""
    least = best_option(rows, gpu_memory=gpu_memory)
    if verdict_on(least.plan.total, gpu_memory * 2**30) == "does not fit":
        plan, tokens = least.plan, least.max_tokens
        advice = f"Smaller samples (`sample_size`) of {tokens} tokens would fit" if tokens else "No sample would fit"
        adapters = "" if least.config.run.adapters.lora_rank else ", or train adapters (`lora_rank=16`)"
        raise BucketingError(
            f"No combination fits in `gpu_memory={gpu_memory:g}` GiB: {plan.shape.samples} x {plan.shape.size} "
            f"({plan.shape.tokens} tokens) needs {format_bytes(plan.total)} with all of the options up to "
            f'"{least.name}", highest in {plan.highest}. {advice}; else use GPUs with more memory{adapters}.'
        )


def _ladder(components: Components, config: PlanConfig, *, memory: float | None) -> Iterator[tuple[str, PlanConfig]]:
    """Iterate over names and settings, each with one more option that can be combined with those before."""
    yield UNCHANGED, config
    blocks = plan_components(components, config).blocks
    for name, values in _steps(config, blocks, can_cache=components.can_cache(config.run.objective.condition)):
        now = flatten(config)
        if all(now[setting] == value for setting, value in values.items()):
            continue
        if values == _CHECKPOINTS and memory is not None:
            yield from _some_checkpoints(components, config, blocks=blocks, memory=memory)
        config = changed(config, **values)
        yield name, config


def _steps(config: PlanConfig, blocks: int, *, can_cache: bool) -> list[tuple[str, Mapping[str, Any]]]:
    steps: list[tuple[str, Mapping[str, Any]]] = [
        ("latents and texts cached (hf_bucketing cache)", {"cached": "all"} if can_cache else {}),
        ("--mixed_precision bf16", {"mixed_precision": "bf16"} if config.precision == "no" else {}),
        ("--gradient_checkpointing", _CHECKPOINTS),
    ]
    can_shard = config.run.trained_component != "both" and not is_gguf(config.run.transformer_file)
    if config.launch.num_processes > 1 and can_shard:
        steps.append((f"FSDP2 over {config.launch.num_processes} processes (fsdp2.yaml)", _FSDP))
    if config.run.adapters.lora_rank is None:
        steps += [("--optimizer adamw_8bit", {"optimizer": "adamw_8bit"})]
        if config.precision != "fp16" and config.launch.num_processes == 1:  # FSDP2 trains in float32
            steps += [("--trained_dtype bf16", {"trained_dtype": "bf16"})]
        return [*steps, ("--offload_activations", {"offload_activations": True})]
    if is_gguf(config.run.transformer_file):  # which is quantised, and stays on the device
        return [*steps, ("--offload_activations", {"offload_activations": True})]
    quantized = {"sharding": "ddp", "gradient_checkpointing": True}
    waits, stays = (
        {"offload_idle_expert": waits} if config.run.trained_component == "both" else {} for waits in (True, False)
    )
    return [
        *steps,
        ("--offload_idle_expert", waits),
        ("--quantize_base int8", {"quantize_base": "int8", **quantized}),
        ("--offload_activations", {"offload_activations": True}),
        ("--quantize_base nf4 instead", {"quantize_base": "nf4", **quantized, **stays}),
        (
            f"--quantize_base int8 --offload_blocks {blocks} instead",
            {"quantize_base": "int8", "offload_blocks": blocks, **quantized, **waits},
        ),
    ]


def _some_checkpoints(
    components: Components, config: PlanConfig, *, blocks: int, memory: float
) -> Iterator[tuple[str, PlanConfig]]:
    """Yield the settings with as few checkpointed blocks as are enough, if that is neither none nor all of them."""

    def plan(count: bool | int) -> MemoryPlan:
        return plan_components(components, changed(config, gradient_checkpointing=count))

    # fsdp2.yaml checkpoints all blocks
    if config.run.memory.gradient_checkpointing is False and config.launch.sharding == "ddp":
        count = fewest_checkpoints(plan, blocks=blocks, memory=memory)
        if not isinstance(count, bool):
            yield f"--gradient_checkpointing {count}", changed(config, gradient_checkpointing=count)


_CHECKPOINTS = {"gradient_checkpointing": True}

_FSDP = {"sharding": "fsdp2", "quantize_base": None, "offload_blocks": 0, "trained_dtype": "float32"}

UNCHANGED = "as given"
"""Name of the row of the settings as they are."""


def option_rows(rows: Sequence[MemoryOption], *, gpu_memory: float) -> list[dict[str, str | float | int]]:
    """Return rows of a table: GiB by kind at the highest moment of a step, and the tokens that would fit.

    Args:
        rows (sequence of [`MemoryOption`]): Options.
        gpu_memory (`float`): GiB of each device.

    Returns:
        `list` of `dict`: Cells by column title. Kinds of less than 64 MiB in all rows have no column.
    """
    peaks = [asdict(row.plan.peak) for row in rows]
    columns = titles_of([kind for kind in peaks[0] if any(peak[kind] >= 2**26 for peak in peaks)])
    return [
        {
            "each with those above": row.name,
            **{title: _gib(peak[kind]) for kind, title in columns.items()},
            "total": _gib(row.plan.total),
            "saves": _gib(row.saved) if row.saved else "",
            f"in {gpu_memory:g} GiB": verdict_on(row.plan.total, gpu_memory * 2**30),
            "most tokens per step": row.max_tokens,
        }
        for row, peak in zip(rows, peaks, strict=True)
    ]


def titles_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return the titles of kinds of memory."""
    return {kind: kind.replace("_", " ").replace("vae", "VAE") for kind in kinds}


def format_options(rows: Sequence[MemoryOption], *, gpu_memory: float) -> str:
    """Return [`option_rows`] as a table in Markdown."""
    cells = option_rows(rows, gpu_memory=gpu_memory)
    numbers = [not isinstance(cell, str) for cell in cells[-1].values()]
    lines = [list(cells[0]), ["---:" if number else "---" for number in numbers]]
    lines += [[_written(cell) for cell in row.values()] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _written(cell: str | float | int) -> str:
    return f"{cell:.1f}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else cell


def _gib(count: float) -> float:
    return round(count / 2**30, 3)


def options_chart(rows: Sequence[MemoryOption], *, gpu_memory: float) -> Chart:
    """Chart the highest memory of a step with each option; bars beyond three times the GPU's memory are cut.

    Args:
        rows (sequence of [`MemoryOption`][hf_bucketing.planner.options.MemoryOption]): Rows of the table.
        gpu_memory (`float`): GiB of the GPU, where a line is drawn.
    """
    peaks = [asdict(row.plan.peak) for row in rows]
    bars: list[tuple[str, list[float], str]] = []
    for row, peak in zip(rows, peaks, strict=True):
        name = f"+ {row.name}" if bars else row.name
        bars.append((name, [count / 2**30 for count in peak.values()], f"{row.plan.total / 2**30:.1f}"))
    return bar_chart(
        bars,
        title="Memory of a training step",
        x_label="GiB per process at the highest moment of a step",
        parts=[*titles_of(peaks[0]).values()],
        limit=(gpu_memory, f"{gpu_memory:g} GiB"),
    )
