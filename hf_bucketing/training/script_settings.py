"""Names of the settings of the scripts of a run, so that one YAML file can hold them all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..caching.settings import CacheConfig
from ..columns.settings import SourceConfig, TableConfig
from ..command_line.config_file import CACHED_DIR, SOURCES, ConfigFile
from ..configuration.run import TrainingConfig
from ..planner.gpus import TimeConfig
from ..planner.settings import MachineConfig, PlanConfig
from ..plans.ways import stacks
from ..report.measure import ReportConfig
from ..settings import flag_names, flatten, marked, names_of, settings_in

if TYPE_CHECKING:
    from ..planner.options import MemoryOption

TRAINED_ON = (CACHED_DIR, "dataset_dir")
"""Names in a file of the folder that training reads: what scripts/cache_latents.py writes, if that is given, or else
what scripts/prepare_dataset.py writes."""

NOT_PLANNED = frozenset(name for name, planned in marked(PlanConfig, "planned").items() if not planned)
"""Settings of a plan on which neither memory nor time depends: they are no flags of the scripts that plan."""

SUGGESTED = NOT_PLANNED | {*marked(PlanConfig, "chosen")}
"""Settings of a plan that are no flags of scripts/suggest_run.py: it chooses them, or does without."""


def settings_of_scripts() -> dict[str, frozenset[str]]:
    """Return the names of all settings of each script of a run."""
    pipeline = "pretrained_model_name_or_path"
    names = {
        "prepare_dataset": {*flag_names(SourceConfig), pipeline, "num_proc", "overwrite", "streaming", "output_dir"},
        "cache_latents": {*flag_names(CacheConfig), pipeline, "dataset_dir", "cache_dir", "output_dir"}
        | {"mixed_precision", "vae_tiling", "max_sequence_length", "condition"},
        "train_text_to_video": {*flag_names(TrainingConfig)},
        "plan_memory": {*flag_names(PlanConfig), *flag_names(TimeConfig), pipeline, "gpu_memory", "figure", "json"}
        - {"price_per_hour"},
        "suggest_run": {*flag_names(SourceConfig), *flag_names(PlanConfig), *flag_names(TimeConfig), pipeline}
        - {*names_of(TableConfig), *SUGGESTED}
        | {*flag_names(MachineConfig), "num_proc", "streaming", "cost_model", "output_dir", "html"},
        "report_buckets": {
            *flag_names(ReportConfig),
            "dataset",
            "table",
            "buckets",
            "novelai",
            "compare",
            "condition",
            "bucket_frames",
            "json",
            "figures",
        }
        | {"html", pipeline},
        "report_training": {"runs", "figure", "html", "by_bucket", "min_fall"},
    }
    return {script: frozenset(settings) for script, settings in names.items()}


def settings_to_repeat(
    config: TrainingConfig,
    file: ConfigFile | None,
    *,
    made_with: Mapping[str, Any] = MappingProxyType({}),
    **chosen: Any,
) -> dict[str, Any]:
    """Return the settings of a training run as a YAML file holds them, with what a file says about other scripts.

    The run's own settings stand under its script's name, all of them, so that other scripts which have settings of
    the same names keep those of the file. Settings of preparing and of caching are those of the folder that was
    trained, where it holds them, and not those of the file.

    Args:
        config ([`TrainingConfig`]): Settings of the run, with everything that it chose itself.
        file ([`ConfigFile`], *optional*): File that the run was started with.
        made_with (mapping): Settings by which its rows were prepared and cached, as its `dataset_dir` holds them.
        **chosen: Settings that differ from those in `config`.
    """
    scripts, own = settings_of_scripts(), "train_text_to_video"
    left = {own, "suggest_run", *(["prepare_dataset"] if SOURCES in made_with else [])}  # a suggestion precedes a run
    others = {SOURCES, *scripts, *TRAINED_ON}.union(*(scripts[script] for script in scripts if script not in left))
    if SOURCES in made_with:  # another script has some of them too, for tables that it tries
        others -= scripts["prepare_dataset"] - scripts["cache_latents"]
    kept = {} if file is None else {name: value for name, value in file.plain().items() if name in others}
    return {**kept, **made_with, own: {**config.flat(), **chosen}}


def commands_of(name_or_path: str, row: MemoryOption) -> list[str]:
    """Return the commands of a run with the settings of an option: that which caches, if any, and that which trains.

    Args:
        name_or_path (`str`): Diffusers pipeline.
        row ([`MemoryOption`]): The option.
    """
    planned = flatten(row.config)
    settings = training_settings(row.config, length=row.plan.shape.length)
    cached, launch = planned["cached"] != "nothing", launcher(row.config)
    common = f"--pretrained_model_name_or_path {shlex.quote(name_or_path)}"
    given = [_flag(name, value) for name, value in settings.items()]
    commands = []
    if cached:
        names = settings_of_scripts()["cache_latents"]
        of_cache = [flag for flag in given if flag.split()[0].removeprefix("--") in names]
        folders = "--dataset_dir prepared --cache_dir cache --output_dir cached"
        commands.append(" ".join([f"{launch} scripts/cache_latents.py", folders, common, *of_cache]))
    folders = f"--dataset_dir {'cached' if cached else 'prepared'} --output_dir trained"
    commands.append(" ".join([f"{launch} scripts/train_text_to_video.py", folders, common, *given]))
    return commands


def training_settings(config: PlanConfig, *, length: int) -> dict[str, Any]:
    """Return the settings of training that a plan decides.

    Packs without `max_tokens` get `length`, the tokens of a step as it was planned.
    """
    planned = flatten(config)
    if not stacks(planned["batching"]) and planned["max_tokens"] is None:
        planned["max_tokens"] = length
    if planned["max_tokens"] is not None:
        del planned["train_batch_size"]
    return {
        setting.name: planned[setting.name]
        for setting in settings_in(TrainingConfig)
        if setting.name in planned and planned[setting.name] != setting.default
    }


def launcher(config: PlanConfig) -> str:
    """Return the beginning of a command that starts the processes of a plan."""
    file = f"--config_file scripts/accelerate_configs/{config.sharding}.yaml " if config.num_processes > 1 else ""
    return f"accelerate launch {file}--num_processes {config.num_processes}"


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
