r"""Plan the memory of a training run from a pipeline's configurations: what does not fit, and what makes it fit.

No weight is loaded and no GPU is needed. Memory is in GiB, per process.

%(prog)s Wan-AI/Wan2.1-T2V-14B-Diffusers --gpu_memory 24 --lora_rank 16 --figure memory.png
"""

import argparse
import json
import sys
from pathlib import Path

from ..command_line.flags import FlagParser, from_flags
from ..files import check_writable, complete_file


def make_parser() -> FlagParser:
    from ..placement.conflicts import conflicting_settings
    from ..planner.gpus import TimeConfig
    from ..planner.settings import PlanConfig
    from ..settings import names_of
    from .script_settings import NOT_PLANNED, settings_of_scripts

    parser = FlagParser(__doc__)
    parser.add_argument("pretrained_model_name_or_path", help="Diffusers pipeline, on the hub or in a folder.")
    parser.add_argument("--gpu_memory", type=float, required=True, help="GiB of each GPU.")
    parser.add_argument("--figure", type=Path, help="PNG file to draw the options into.")
    parser.add_argument("--json", type=Path, help="JSON file to write the table's rows into.")
    parser.add_settings(PlanConfig, skip=sorted(NOT_PLANNED))
    parser.add_settings(TimeConfig, skip=["price_per_hour"])
    named = {*names_of(PlanConfig)} - NOT_PLANNED - {"max_tokens"}  # whose "auto" alone conflicts, and is no plan
    parser.name_conflicts(conflicting_settings(named))
    parser.add_config("plan_memory", others=settings_of_scripts)
    return parser


def main(args: argparse.Namespace) -> None:
    from ..configuration.run import configured_precision
    from ..planner.gpus import TimeConfig
    from ..planner.memory import verdict_on
    from ..planner.options import (
        MemoryOption,
        best_option,
        check_fits,
        describe_verdict,
        format_options,
        option_rows,
        options_chart,
        plan_options,
    )
    from ..planner.time import BatchCost, Speed
    from ..report.charts import save_charts
    from ..units import format_bytes
    from .script_settings import commands_of, plan_of_flags

    def show(row: MemoryOption) -> None:
        verdict = verdict_on(row.plan.total, memory * 2**30)
        print(f"  {row.name}: {format_bytes(row.plan.total)}, {verdict}", file=sys.stderr, flush=True)

    check_writable(args.figure, args.json)
    precision = args.mixed_precision or configured_precision()
    config = plan_of_flags(args, mixed_precision=precision)
    name, memory = args.pretrained_model_name_or_path, args.gpu_memory
    print("Planning one option after another, each with those above:", file=sys.stderr, flush=True)
    rows = plan_options(name, config, gpu_memory=memory, progress=show)
    plan = rows[0].plan
    shape = plan.shape
    text = f", {shape.audio_tokens} of audio" if shape.audio_tokens else ""
    text += f", and {shape.text_tokens} of text" if shape.text_tokens else ""
    print(f"{shape.samples} x {shape.size} per process and step: {shape.tokens} tokens{text}")
    for phase, parts in plan.phases.items():
        print(f"  as given, {phase}: {parts}")
    print(format_options(rows, gpu_memory=memory))
    if args.figure:
        save_charts(args.figure, [options_chart(rows, gpu_memory=memory)])
        print(f"Figure: {args.figure}")
    if args.json:
        with complete_file(args.json) as partial:
            partial.write_text(json.dumps(option_rows(rows, gpu_memory=memory), indent=2) + "\n")
        print(f"Rows: {args.json}")
    check_fits(rows, gpu_memory=memory)
    best = best_option(rows, gpu_memory=memory)
    flops = best.plan.flops.hardware
    speed = Speed.of(from_flags(TimeConfig, args), gpu_memory=memory).of_step(flops, blocks=best.plan.blocks)
    seconds = speed.seconds(BatchCost(per_batch=flops))
    print(f"A step takes {seconds.describe(seconds.cost.per_batch)}: {flops / 1e12:,.1f} TFLOP at {seconds.source}")
    print(describe_verdict(best, gpu_memory=memory), *commands_of(name, best), sep="\n")
