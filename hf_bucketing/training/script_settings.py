"""Names of the settings of the scripts of a run, so that one YAML file can hold them all."""

from __future__ import annotations

from typing import Any

from ..caching.settings import CacheConfig
from ..columns.settings import NOT_FLAGS, SourceConfig
from ..command_line.config_file import CACHED_DIR, SOURCES, ConfigFile
from ..report.measure import ReportConfig
from ..settings import names_of
from .config import TrainingConfig
from .settings.plan import PlanConfig

TRAINED_ON = (CACHED_DIR, "dataset_dir")
"""Names in a file of the folder that training reads: what scripts/cache_latents.py writes, if that is given, or else
what scripts/prepare_dataset.py writes."""


def settings_of_scripts() -> dict[str, frozenset[str]]:
    """Return the names of all settings of each script of a run."""
    pipeline = "pretrained_model_name_or_path"
    source = {*names_of(SourceConfig)} - {*NOT_FLAGS}
    cache = {*names_of(CacheConfig)} - {"folder"}
    report = {*names_of(ReportConfig)} - {"metric"}
    names = {
        "prepare_dataset": {*source, pipeline, "num_proc", "overwrite", "streaming", "output_dir"},
        "cache_latents": {*cache, pipeline, "dataset_dir", "cache_dir", "output_dir", "mixed_precision", "vae_tiling"}
        | {"max_sequence_length"},
        "train_text_to_video": {*names_of(TrainingConfig)},
        "plan_memory": {*names_of(PlanConfig), pipeline, "gpu_memory", "figure", "json"},
        "report_buckets": {*report, "dataset", "table", "buckets", "novelai", "bucket_frames", "json", "figures"}
        | {"html", pipeline},
        "report_training": {"runs", "figure", "html", "by_bucket", "min_fall"},
    }
    return {script: frozenset(own) for script, own in names.items()}


def settings_to_repeat(config: TrainingConfig, file: ConfigFile | None, **chosen: Any) -> dict[str, Any]:
    """Return the settings of a training run as a YAML file holds them, with what a file says about other scripts.

    The run's own settings stand under its script's name, all of them, so that other scripts which have settings of
    the same names keep those of the file.

    Args:
        config ([`TrainingConfig`]): Settings of the run, with everything that it chose itself.
        file ([`ConfigFile`], *optional*): File that the run was started with.
        **chosen: Settings that differ from those in `config`.
    """
    scripts, own = settings_of_scripts(), "train_text_to_video"
    others = {SOURCES, *scripts, *TRAINED_ON}.union(*(names for script, names in scripts.items() if script != own))
    kept = {} if file is None else {name: value for name, value in file.plain().items() if name in others}
    return {**kept, own: {**config.flat(), **chosen}}
