r"""Measure the time and the memory that saving LoRA of Wan 2.1 14B takes, with and without the proof for ComfyUI.

python scripts/benchmarks/benchmark_saving.py --output scripts/benchmarks/results/saving.json

The adapters have their real shapes and random weights; the model below them has none. Files go to the folder of
temporary files.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import PartialState, init_empty_weights
from benchmark_tools import benchmark_parser, in_fresh_process, machine, memory_in_mb, report, seconds_of
from diffusers import WanPipeline, WanTransformer3DModel

from hf_bucketing.adapters.kinds import adapters_of
from hf_bucketing.adapters.lora import add_adapters, save_lora
from hf_bucketing.adapters.settings import AdapterConfig, LoraFormat
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.synthetic.published import TRANSFORMERS

RANK = 32
TARGETS = {"attention": None, "all": "to_q,to_k,to_v,to_out.0,ffn.net.0.proj,ffn.net.2"}
"""Layers that have adapters: those that do by default, and with them the feed-forward layers."""


def adapted_pipeline(*, layers: int, targets: str | None) -> WanPipeline:
    """Return a pipeline of a transformer without weights, whose adapters have random ones."""
    with init_empty_weights():
        transformer = WanTransformer3DModel(**{**TRANSFORMERS["wan-14b"], "num_layers": layers})
        add_adapters(transformer, AdapterConfig(lora_rank=RANK, lora_targets=targets))
    for name, empty in list(transformer.named_parameters()):
        if empty.requires_grad:
            module, _, weight = name.rpartition(".")
            setattr(transformer.get_submodule(module), weight, torch.nn.Parameter(torch.randn(empty.shape)))
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer)
    pipeline.register_to_config(_name_or_path="Wan-AI/Wan2.1-T2V-14B-Diffusers")
    return pipeline


def measure(*, layers: int, targets: str | None, runs: int) -> dict[str, float | int]:
    PartialState()  # its main process writes
    pipeline = adapted_pipeline(layers=layers, targets=targets)
    weights = list(adapters_of(pipeline.transformer).values())
    with tempfile.TemporaryDirectory() as folder:

        def save(lora_format: LoraFormat) -> None:
            save_lora(pipeline, folder, lora_format=lora_format)

        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here
        before = memory_in_mb("VmRSS")
        save("both")
        peak = memory_in_mb("VmHWM") - before
        alone, proven = seconds_of(lambda: save("diffusers"), lambda: save("both"), runs=runs)
        return {
            "layers": len(weights) // 2,
            "adapters_mib": sum(weight.nbytes for weight in weights) / 2**20,
            "seconds_diffusers_alone": alone.median,
            "seconds": proven.median,
            "seconds_spread": proven.spread,
            "peak_mib": peak,
        }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=40, help="Blocks of the transformer; Wan 2.1 14B has 40.")
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("torch", "diffusers", "peft", "safetensors")
    figures["rank"] = RANK
    for name, targets in TARGETS.items():
        measured = in_fresh_process(measure, layers=args.layers, targets=targets, runs=args.runs)
        figures |= {f"{name}_{key}": value for key, value in measured.items()}
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
