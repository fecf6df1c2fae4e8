"""Names of the settings of the commands of a run, so that one YAML file can hold them all."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..command_line.config_file import CACHE, CACHED_DIR, PREPARE, SOURCES, TRAIN, ConfigFile
from ..configuration.run import LaunchConfig
from ..planner.settings import PlanConfig
from ..settings import changed_settings, marked, names_of
from .table import COMMANDS

if TYPE_CHECKING:
    from ..planner.options import MemoryOption

TRAINED_ON = (CACHED_DIR, "dataset_dir")
"""Names in a file of the folder that training reads: what `hf_bucketing cache` writes, if that is given, or else
what `hf_bucketing prepare` writes."""

NOT_PLANNED = frozenset(name for name, planned in marked(PlanConfig, "planned").items() if not planned)
"""Settings of a plan on which neither memory nor time depends: they are no flags of the scripts that plan."""

SUGGESTED = NOT_PLANNED | {*marked(PlanConfig, "chosen")}
"""Settings of a plan that are no flags of `hf_bucketing suggest`: it chooses them, or does without."""


def plan_of_flags(args: argparse.Namespace, **others: Any) -> PlanConfig:
    """Return what the flags of a command plan for, and `others`, without settings on which no plan depends."""
    values = {**vars(args), **others}
    planned = {*names_of(PlanConfig)} - NOT_PLANNED
    return PlanConfig.from_flat(**{name: value for name, value in values.items() if name in planned})


def settings_of_scripts() -> dict[str, frozenset[str]]:
    """Return the names of all settings of each command that takes a file of them, by the name of its section there.

    A section has the name of the command's script.
    """
    sections = [command.load().make_parser().section for command in COMMANDS.values()]
    return dict(section for section in sections if section is not None)


def settings_kept(file: ConfigFile, made_with: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says about other commands than training, for the file that repeats a run.

    Settings of preparing and of caching are those of the folder that was trained, where it holds them, and not those
    of the file.

    Args:
        file ([`ConfigFile`]): File that the run was started with.
        made_with (mapping): Settings by which its rows were prepared and cached, as its `dataset_dir` holds them.
    """
    scripts = settings_of_scripts()
    left = {TRAIN, "suggest_run", *([PREPARE] if SOURCES in made_with else [])}  # a suggestion precedes a run
    others = {SOURCES, *scripts, *TRAINED_ON}.union(*(scripts[script] for script in scripts if script not in left))
    if SOURCES in made_with:  # another script has some of them too, for tables that it tries
        others -= scripts[PREPARE] - scripts[CACHE]
    return {name: value for name, value in file.plain().items() if name in others}


def commands_of(name_or_path: str, row: MemoryOption) -> list[str]:
    """Return the commands of a run with the settings of an option: that which caches, if any, and that which trains.

    Args:
        name_or_path (`str`): Diffusers pipeline.
        row ([`MemoryOption`]): The option.
    """
    settings = changed_settings(row.config.run)
    cached, launch = row.config.samples.cached != "nothing", launcher(row.config.launch)
    common = f"--pretrained_model_name_or_path {shlex.quote(name_or_path)}"
    flags = [_flag(name, value) for name, value in settings.items()]
    commands = []
    if cached:
        names = settings_of_scripts()[CACHE]
        of_cache = [flag for flag in flags if flag.split()[0].removeprefix("--") in names]
        folders = "--dataset_dir prepared --cache_dir cache --output_dir cached"
        commands.append(" ".join([f"{launch} cache", folders, common, *of_cache]))
    folders = f"--dataset_dir {'cached' if cached else 'prepared'} --output_dir trained"
    commands.append(" ".join([f"{launch} train", folders, common, *flags]))
    return commands


def launcher(launch: LaunchConfig) -> str:
    """Return the beginning of a command that starts the processes of a run."""
    file = f"--config_file {launch.sharding} " if launch.num_processes > 1 else ""
    return f"hf_bucketing launch {file}--num_processes {launch.num_processes}"


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
