r"""Measure on one GPU what cannot be measured without: kernels, steps, memory, tests, options and resuming.

python scripts/benchmarks/benchmark_gpu.py --output_dir gpu --figure gpu.png

Time on a GPU is short: each part begins no further case after 90 seconds (`--part_seconds`), and its figures are in
`PART.json` after each case, with the device and the versions. Parts come in the order of what is least known.
Without a GPU the same code runs at small sizes, which shows that it runs, and nothing else.
"""

import argparse
import datetime
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmark_tools import accelerator_and_versions, write_figures
from gpu_benchmark.measuring import Figures, Run, failures, free, measure
from gpu_benchmark.scale import FULL, SMALL

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script

PACKAGES = (
    "torch", "triton", "diffusers", "accelerate", "peft", "transformers", "torchao", "bitsandbytes", "flash_attn",
    "flash_attn_4", "nvidia_cutlass_dsl", "quack_kernels",
)  # fmt: skip
PARTS = {
    "attention": "attention.cases",
    "steps": "steps.lora",
    "compiled_steps": "steps.compiled",
    "wide_steps": "steps.wide",
    "compiled_wide_steps": "steps.compiled_wide",
    "memory": "memory.cases",
    "tests": "device_tests.cases",
    "quantization": "options.quantization",
    "offload": "options.offload",
    "reading": "options.reading",
    "resume": "resume.cases",
    "strategies": "strategies.cases",
    "parity": "parity.cases",
}
"""Parts by name: modules of `gpu_benchmark`, imported when they are measured, and the function of their cases."""


def lines_of(figures: Figures, *path: str) -> Iterator[str]:
    """Iterate over nested figures as lines of text."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from lines_of(value, *path, name)
        else:
            yield f"{' / '.join((*path, name)):80} {f'{value:.4g}' if isinstance(value, float) else value}"


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="Parts to measure.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder for a JSON file of each part.")
    parser.add_argument("--runs", type=int, default=3, help="Runs, of which the median is reported.")
    parser.add_argument("--part_seconds", type=float, default=90, help="Seconds of a part after which no case begins.")
    parser.add_argument("--small", action="store_true", help="Small sizes, as without a GPU.")
    parser.add_argument("--figure", type=Path, help="PNG file for a figure; needs matplotlib.")
    return parser


def measure_part(part: str, run: Run, described: Figures) -> Figures:
    """Measure a part, print its figures and write them to its file after each case."""
    module, function = PARTS[part].split(".")
    start = time.perf_counter()

    def keep(figures: Figures) -> None:
        whole = {**described, "part": part, "seconds": time.perf_counter() - start, "cases": figures}
        write_figures(whole, run.folder / f"{part}.json")

    figures = measure(
        lambda: getattr(importlib.import_module(f"gpu_benchmark.{module}"), function)(run),
        seconds=run.seconds,
        keep=keep,
    )
    print("\n".join(lines_of(figures, part)), flush=True)
    free()
    return figures


def main(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = args.small or device == "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the reference in float32 would have errors of its own
    args.output_dir.mkdir(parents=True, exist_ok=True)
    run = Run(
        scale=(SMALL if small else FULL).on(device), runs=args.runs, seconds=args.part_seconds, folder=args.output_dir
    )
    described = {
        **accelerator_and_versions(*PACKAGES),
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "scale": "small" if small else "full",
        "runs": args.runs,
    }
    measured = {part: measure_part(part, run, described) for part in args.parts}
    if args.figure:
        from gpu_benchmark.figure import draw_figure

        draw_figure(described, measured, args.figure)
    if failed := failures(measured):
        sys.exit(f"Some cases failed: {'; '.join(failed)}.")


if __name__ == "__main__":
    run_script(main, make_parser)
