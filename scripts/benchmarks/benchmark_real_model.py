r"""Train LoRA on Wan 2.1 1.3B at its real configuration, with random weights, and measure the peak of resident memory.

python scripts/benchmarks/benchmark_real_model.py --output scripts/benchmarks/results/real_model.json

The training script runs as a user runs it, on the CPU: ten steps on cached latents and texts in bf16 with gradient
checkpointing, killed after a checkpoint and resumed. The weights of text encoder and VAE cannot be read at that time.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmark_tools import benchmark_parser, machine, report
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from hf_bucketing.synthetic.published import TRANSFORMERS

SCRIPTS = Path(__file__).parents[1]
STEPS, RANK = 10, 16
CLIPS = (Clip(9, 96, 160, 8), Clip(9, 160, 96, 8), Clip(5, 128, 128, 8))


def save_pipeline(folder: Path, *, layers: int) -> int:
    """Save the transformer in bf16 beside small encoders that fit it; return the bytes of its weights."""
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer()
    text = UMT5Config(vocab_size=len(tokenizer), d_model=4096, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
    config = {**TRANSFORMERS["wan-1.3b"], "num_layers": layers}
    transformer = WanTransformer3DModel(**config).to(torch.bfloat16)
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
    ).save_pretrained(str(folder))
    return sum(weight.numel() * weight.element_size() for weight in transformer.parameters())


def run(name: str, *flags: object, until: Path | None = None) -> int:
    """Run a script and return the peak of its resident memory in bytes; kill it as soon as a file is there."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / name), *map(str, flags)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        peak = max([peak, *(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))])
        if until is not None and until.exists():
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
    errors = process.stderr.read() if process.stderr else ""
    if process.returncode != (0 if until is None else -signal.SIGKILL):
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{errors[-4000:]}")
    return peak


def settings(folder: Path, *, quantized: bool) -> Iterator[object]:
    flags = {
        "pretrained_model_name_or_path": folder / "model",
        "dataset_dir": folder / "cached",
        "output_dir": folder / ("int8" if quantized else "bf16"),
        "batching": "pack",
        "max_tokens": 384,
        "lora_rank": RANK,
        "mixed_precision": "bf16",
        "gradient_checkpointing": "true",
        "max_train_steps": STEPS,
        "num_train_epochs": STEPS,
        "checkpointing_steps": STEPS // 2,
        "dataloader_num_workers": 0,
        "report_to": "none",
    }
    yield from itertools.chain.from_iterable((f"--{name}", value) for name, value in flags.items())
    if quantized:
        yield from ("--quantize_base", "int8")


def prepare(folder: Path) -> None:
    """Prepare and cache generated clips, then make the weights of the encoders unreadable."""
    make_media_dataset(folder / "media", num_samples=6, clips=CLIPS)
    model = ("--pretrained_model_name_or_path", folder / "model")
    prepared = ("--output_dir", folder / "prepared", "--bucket_tokens", 180, "--bucket_frames", "5,9")
    run("prepare_dataset.py", "--dataset", folder / "media", *model, *prepared)
    cache = ("--cache_dir", folder / "entries", "--output_dir", folder / "cached", "--batching", "pack")
    run("cache_latents.py", "--dataset_dir", folder / "prepared", *model, *cache)
    for component in ("vae", "text_encoder"):
        for file in (folder / "model" / component).glob("*.safetensors"):
            file.write_bytes(b"")


def measure(folder: Path, *, weights: int, quantized: bool) -> dict[str, float]:
    """Train until a checkpoint, kill, resume; return peaks in GiB, and how the adapters load."""
    flags = list(settings(folder, quantized=quantized))
    output = folder / ("int8" if quantized else "bf16")
    first = run("train_text_to_video.py", *flags, until=output / f"checkpoint-{STEPS // 2}" / "progress.json")
    second = run("train_text_to_video.py", *flags, "--resume_from_checkpoint", "latest")
    losses = [json.loads(line) for line in (output / "logs" / "losses.jsonl").read_text().splitlines()]
    assert [loss["global_step"] for loss in losses] == [*range(1, STEPS + 1)], losses
    WanPipeline.from_pretrained(folder / "model", vae=None, text_encoder=None).load_lora_weights(output)
    name = "int8" if quantized else "bf16"
    return {
        f"{name}_first_loss": losses[0]["train_loss"],
        f"{name}_last_loss": losses[-1]["train_loss"],
        f"{name}_seconds_per_step": sorted(loss["seconds"] for loss in losses)[STEPS // 2],
        f"{name}_peak_gib": first / 2**30,
        f"{name}_peak_of_the_resumed_run_gib": second / 2**30,
        f"{name}_limit_gib": (1.6 * weights + 1.5 * 2**30) / 2**30,
    }


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=30, help="Layers of the transformer; Wan 2.1 1.3B has 30.")
    return parser


def main(args: argparse.Namespace) -> None:
    figures = machine("torch", "diffusers", "accelerate", "peft")
    with tempfile.TemporaryDirectory() as folder:
        weights = save_pipeline(Path(folder) / "model", layers=args.layers)
        figures["weights_in_bf16_gib"] = weights / 2**30
        prepare(Path(folder))
        for quantized in (False, True):
            figures.update(measure(Path(folder), weights=weights, quantized=quantized))
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
