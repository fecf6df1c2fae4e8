r"""Write presets, hf_bucketing/presets/MODEL/GPU-TRAINED.yaml, for models whose published configurations are known.

python scripts/tools/write_presets.py

Each is the best run that scripts/suggest_run.py's planner finds for `ASSUMED`, in buckets of the model's own smallest
size: their memory does not depend on the data, while that of packs does. Where nothing fits, there is no file.
scripts/benchmarks/results/presets.json keeps the plan of each for the docs and for a test that plans it again.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hf_bucketing import BucketingError
from hf_bucketing.adapters import AdapterConfig
from hf_bucketing.command_line.config_file import PRESETS, name_of_preset, write_config
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands.script_settings import launcher
from hf_bucketing.commands.suggested import run_settings
from hf_bucketing.files import complete_file
from hf_bucketing.planner import PlanConfig
from hf_bucketing.planner.components import Components, read_components
from hf_bucketing.planner.gpus import TimeConfig
from hf_bucketing.planner.rows import DataRows
from hf_bucketing.planner.settings import MachineConfig
from hf_bucketing.planner.suggestion import Candidate, Suggester, Suggestion
from hf_bucketing.planner.time import Speed
from hf_bucketing.planner.ways import tables_of, ways_of
from hf_bucketing.report.measure import Sizes
from hf_bucketing.settings import changed_settings, flatten, settings_in
from hf_bucketing.synthetic.published import write_published_configs
from hf_bucketing.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "scripts" / "benchmarks" / "results" / "presets.json"

MODELS = {
    "wan-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "qwen-image": "Qwen/Qwen-Image",
    "flux": "black-forest-labs/FLUX.1-dev",
    "z-image": "Tongyi-MAI/Z-Image",
    "ltx-2": "Lightricks/LTX-2",
    "wan-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "hunyuan-video-1.5": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "flux.2": "black-forest-labs/FLUX.2-dev",
    "krea-2": "krea/Krea-2-Raw",
    "minimax-h3": "MiniMaxAI/MiniMax-H3",
}
"""Pipelines on the hub by the name of their published configuration."""

GPUS = {
    "16gb": MachineConfig(gpu_memory=16),
    "24gb": MachineConfig(gpu_memory=24),
    "48gb": MachineConfig(gpu_memory=48),
    "80gb": MachineConfig(gpu_memory=80),
    "8x80gb": MachineConfig(gpu_memory=80, num_gpus=8),
}
TRAINED = {"lora": AdapterConfig(lora_rank=16), "full": AdapterConfig()}

ROWS, CAPTION = 1000, 400.0
SIDES = ((1080, 1920), (1920, 1080), (1080, 1080))
FRAMES = (33, 49, 81, 121)
ASSUMED = (
    f"{ROWS:,} captions of {CAPTION:.0f} characters, each of a 1080p picture, or of a 1080p clip of 33, 49, 81 or 121 "
    "frames, a third of them upright and a third square"
)


def assumed_rows(components: Components) -> DataRows:
    frames = (1,) if components.recipe.family.images_only else FRAMES
    sizes = [(count, *sides) for count in frames for sides in SIDES]
    return DataRows(sizes=Sizes(*np.resize(sizes, (ROWS, 3)).T), total=ROWS, caption_characters=CAPTION)


def suggest(components: Components, rows: DataRows, machine: MachineConfig, adapters: AdapterConfig) -> Suggestion:
    """Plan buckets of the model's smallest size.

    Raises:
        BucketingError: If no run fits.
    """
    spec, sizes = components.spec, components.recipe.native_sizes
    name, settings = next(iter(tables_of(components, rows.sizes).items()))
    ways = ways_of({name: (settings, settings.make(spec, native_sizes=sizes))}, rows.sizes, spec=spec)
    speed = Speed.of(TimeConfig(), gpu_memory=machine.gpu_memory)
    suggester = Suggester(
        components,
        rows,
        machine=machine,
        base=PlanConfig.from_flat(mixed_precision="bf16", **flatten(adapters)),
        speed=speed,
    )
    return suggester.suggest(way for way in ways if way.batching == "bucket")


def write_preset(path: Path, suggestion: Suggestion, *, model: str, machine: MachineConfig, rows: DataRows) -> None:
    run = suggestion.candidates[0]
    table = run.way.settings
    assert table is not None, "the table is one of those that are made here"
    assert run.once is not None, "several epochs are worth a cache"
    file = f"--config {name_of_preset(path)}"
    time, launch = run.time, launcher(run.config.launch)
    comment = [
        f"hf_bucketing prepare {file} --dataset clips --output_dir prepared",
        f"{launch} cache {file} --dataset_dir prepared --cache_dir cache --output_dir cached",
        f"{launch} train {file} --dataset_dir cached --output_dir trained",
        "",
        f"Each GPU: {format_bytes(run.memory.total)} of {machine.gpu_memory:g} GiB ({run.memory.peak})",
        f"The machine: {run.host}",
        f"On disk: {run.disk}",
        f"Assumed: {ASSUMED}",
        f"Caching: {format_seconds(run.once.seconds)} "
        f"({format_seconds(run.once.least)} to {format_seconds(run.once.most)})",
        f"Epoch of {time.steps:,} steps: {hours_of(run)}; steps from {format_seconds(time.p5)} to "
        f"{format_seconds(time.p95)}",
        f"Times: {suggestion.source}",
    ]
    values = {
        "pretrained_model_name_or_path": model,
        **{
            setting.name: getattr(table, setting.name)
            for setting in settings_in(type(table))
            if getattr(table, setting.name) != setting.default
        },
        **run_settings(run, machine=machine, rows=rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with complete_file(path) as partial:
        partial.write_text(write_config(values, comment="\n".join(comment)))


def hours_of(run: Candidate) -> str:
    seconds = (run.time.seconds, run.time.least, run.time.most)
    return "{} ({} to {})".format(*map(format_seconds, seconds))


def plan_model(name: str) -> dict[str, Any]:
    """Write the presets of a model, and return the plan of each, or why none fits."""
    with tempfile.TemporaryDirectory() as folder:
        write_published_configs(Path(folder), name)
        components = read_components(folder)
    rows = assumed_rows(components)
    plans: dict[str, Any] = {}
    for gpu, machine in GPUS.items():
        for trained, adapters in TRAINED.items():
            path = PRESETS / name / f"{gpu}-{trained}.yaml"
            try:
                suggestion = suggest(components, rows, machine, adapters)
            except BucketingError as error:
                path.unlink(missing_ok=True)
                plans[path.stem] = {"refused": str(error)}
                continue
            write_preset(path, suggestion, model=MODELS[name], machine=machine, rows=rows)
            run = suggestion.candidates[0]
            plans[path.stem] = {
                "config": changed_settings(run.config),
                "bytes": run.memory.total,
                "epoch": hours_of(run),
            }
            print(f"{path}: {format_bytes(run.memory.total)}, {hours_of(run)}", flush=True)
    return plans


def cell_of(plan: dict[str, Any]) -> str:
    if "refused" in plan:
        return "–"
    return f"{plan['bytes'] / 2**30:.1f} GiB, {plan['epoch'].partition(' (')[0]}"


def table_of(models: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"model": name, "trained": trained, **{gpu: cell_of(plans[f"{gpu}-{trained}"]) for gpu in GPUS}}
        for name, plans in models.items()
        for trained in TRAINED
    ]


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="Write those of these alone (default: all).")
    return parser


def main(args: argparse.Namespace) -> None:
    models = json.loads(RECORD.read_text())["models"] if RECORD.is_file() else {}
    for name in args.models or MODELS:
        models[name] = plan_model(name)
        models = {known: models[known] for known in MODELS if known in models}
        with complete_file(RECORD) as partial:
            partial.write_text(json.dumps({"table": table_of(models), "models": models}, indent=1) + "\n")


if __name__ == "__main__":
    run_script(main, make_parser)
