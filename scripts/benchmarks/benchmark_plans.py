r"""Plan the memory of published models for the tables of the documentation, from configurations that lie beside this.

python scripts/benchmarks/benchmark_plans.py --output scripts/benchmarks/results/plans.json --figures docs/figures

No weight is loaded, and no figure depends on the machine. The rows are those that `hf_bucketing plan` prints for
the pipeline on the hub whose name stands in the command.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmark_tools import write_figures

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands import plan
from hf_bucketing.commands.script_settings import plan_of_flags
from hf_bucketing.planner.memory import verdict_on
from hf_bucketing.planner.options import MemoryOption, best_option, option_rows, options_chart, plan_options
from hf_bucketing.report.charts import save_charts
from hf_bucketing.synthetic.published import write_published_configs

SETUPS = {
    "lora_24": ("LoRA, one GPU of 24 GiB", 24, "--lora_rank 16"),
    "lora_8x24": ("LoRA, eight GPUs of 24 GiB", 24, "--lora_rank 16 --num_processes 8"),
    "full_80": ("all weights, one GPU of 80 GiB", 80, ""),
    "full_8x80": ("all weights, eight GPUs of 80 GiB", 80, "--num_processes 8"),
}
"""What is trained where: title, GiB of each GPU, and further flags of `hf_bucketing plan`."""

GPUS = (16, 24, 48, 80)
"""GiB of the GPUs of the tables by GPU."""


class Model(NamedTuple):
    """A published pipeline: its name, that of its configurations here, a size of samples, and keys of `SETUPS`."""

    hub: str
    configs: str
    sample_size: str
    setups: tuple[str, ...] = tuple(SETUPS)


MODELS = {
    "wan_1_3b": Model("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan-1.3b", "81 480 832"),
    "wan_5b": Model("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "wan-5b", "121 704 1280"),
    "wan_14b": Model("Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan-14b", "81 480 832"),
    "ltx_2b": Model("Lightricks/LTX-Video", "ltx-2b", "121 512 704"),
    "ltx_13b": Model("Lightricks/LTX-Video-0.9.7-dev", "ltx-13b", "121 512 704"),
    "ltx_2": Model("Lightricks/LTX-2", "ltx-2", "121 512 768"),
    "hunyuan_video": Model("hunyuanvideo-community/HunyuanVideo", "hunyuan-video", "129 544 960"),
    "hunyuan_video_15": Model(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "hunyuan-video-1.5",
        "121 480 848",
        ("full_80", "full_8x80"),
    ),
    "qwen_image": Model("Qwen/Qwen-Image", "qwen-image", "1 1328 1328"),
    "flux_2": Model("black-forest-labs/FLUX.2-dev", "flux.2", "1 1024 1024", ("lora_24",)),
    "z_image": Model("Tongyi-MAI/Z-Image", "z-image", "1 1024 1024", ("lora_24",)),
    "krea_2": Model("krea/Krea-2-Raw", "krea-2", "1 1024 1024", ("lora_24",)),
    "minimax_h3": Model("MiniMaxAI/MiniMax-H3", "minimax-h3", "124 768 1344", ("lora_24",)),
}
"""Models of the pages under docs/models/, at sizes that they were made for."""


def command_of(model: Model, gpu_memory: int, flags: str) -> str:
    size = f"--sample_size {model.sample_size} --train_batch_size 1 --mixed_precision bf16 --gpu_memory {gpu_memory}"
    return f"hf_bucketing plan {model.hub} {size} {flags}".strip()


def planned(model: Model, command: str) -> list[MemoryOption]:
    """Plan what a command names, for configurations that are written here in place of the pipeline on the hub."""
    with tempfile.TemporaryDirectory() as folder:
        write_published_configs(Path(folder), model.configs)
        args = plan.make_parser().parse_args([folder, *shlex.split(command)[3:]])
        return plan_options(folder, plan_of_flags(args), gpu_memory=args.gpu_memory)


def summary_of(title: str, rows: list[MemoryOption], gpu_memory: int) -> dict[str, str | float | int]:
    """Return a row for the first options that fit, else that are tight, or for those that need least."""
    chosen = best_option(rows, gpu_memory=gpu_memory)
    return {
        "training": title,
        "with the options up to": chosen.name,
        "verdict": verdict_on(chosen.plan.total, gpu_memory * 2**30),
        "GiB per GPU": round(chosen.plan.total / 2**30, 3),
        "most tokens per step": chosen.max_tokens,
    }


def by_gpu(rows: list[dict[str, str | float | int]]) -> list[dict[str, str | float]]:
    """Return for GPUs of each size the first of these options that fit, that are tight, or that need least."""
    table: list[dict[str, str | float]] = []
    for gpu_memory in GPUS:
        verdicts = [verdict_on(float(row["total"]), gpu_memory) for row in rows]
        best = min(("fits", "tight", "does not fit"), key=lambda verdict: verdict not in verdicts)
        least = min(range(len(rows)), key=lambda index: rows[index]["total"])
        chosen = least if best == "does not fit" else verdicts.index(best)
        table.append(
            {
                "LoRA on one GPU of": f"{gpu_memory} GiB",
                "with the options up to": rows[chosen]["each with those above"],
                "verdict": best,
                "GiB planned": rows[chosen]["total"],
            }
        )
    return table


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    models = list(MODELS)
    parser.add_argument(
        "--models", nargs="*", choices=models, default=models, help="Models to plan; the file keeps the others."
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--figures", type=Path, help="Folder to draw the plans of Wan 2.1 14B into.")
    return parser


def plans_of(name: str, figures: Path | None) -> Iterator[tuple[str, object]]:
    model, summaries = MODELS[name], []
    for setup in model.setups:
        title, gpu_memory, flags = SETUPS[setup]
        command = command_of(model, gpu_memory, flags)
        rows = planned(model, command)
        table = option_rows(rows, gpu_memory=gpu_memory)
        shape = rows[0].plan.shape
        summaries.append(summary_of(title, rows, gpu_memory))
        print(f"{name} {summaries[-1]}", flush=True)
        yield setup, {"command": command, "rows": table}
        if figures and (name, setup) == ("wan_14b", "lora_24"):
            save_charts(figures / "plan_wan_14b.png", [options_chart(rows, gpu_memory=gpu_memory)])
    yield "summary", summaries
    yield "sample", {"size": "×".join(map(str, shape.size)), "tokens": shape.tokens, "text_tokens": shape.text_tokens}


def main(args: argparse.Namespace) -> None:
    known = json.loads(args.output.read_text()) if args.output and args.output.is_file() else {}
    for name in args.models:
        known[name] = dict(plans_of(name, args.figures))
    write_known(known, args.output)


def write_known(known: dict[str, Any], output: Path | None) -> None:
    """Write the plans of all models, with a table by GPU of those that load LoRA."""
    for plans in known.values():
        if "lora_24" in plans:
            plans["lora_by_gpu"] = by_gpu(plans["lora_24"]["rows"])
    write_figures({name: known[name] for name in MODELS if name in known}, output)


if __name__ == "__main__":
    run_script(main, make_parser)
