r"""Compare the planned memory of training runs with the measured one: resident memory less that before the model.

Each run has a process of its own, or two. The CPU has no memory of its own for a model, so that what a process has
loaded before is subtracted, and what torch's kernels allocate inside themselves is measured but not planned. Plans of
the machine are compared with all of the resident memory, that of decoding processes included.

python scripts/benchmarks/benchmark_memory.py --output scripts/benchmarks/results/memory.json

Runs in int8 need torchao (extra `quantization`).
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from benchmark_tools import machine, memory_in_mb
from PIL import Image
from torch.utils.checkpoint import checkpoint

from hf_bucketing import BucketTable, open_table
from hf_bucketing.caching import CacheConfig, cache_dataset
from hf_bucketing.columns import BucketColumns, MediaMetadata, PreparedDataset, load_source, map_columns
from hf_bucketing.command_line.config_file import ACCELERATE_CONFIGS
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import BucketingError
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner.memory import PLAN_ERROR
from hf_bucketing.randomness import ROW
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

NARROW = {"num_attention_heads": 4, "attention_head_dim": 128, "num_layers": 6}
WIDE = {"num_attention_heads": 8, "attention_head_dim": 128, "num_layers": 8}
WAN = {"qk_norm": "rms_norm_across_heads", "freq_dim": 256, "rope_max_seq_len": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "wan-30m": {**WAN, **NARROW, "ffn_dim": 2048},
    "ltx-30m": {**NARROW, "cross_attention_dim": 512},
    "wan-130m": {**WAN, **WIDE, "ffn_dim": 4096},
    "wan-350m": {**WAN, "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 8, "ffn_dim": 8960},
    "wan-1.3b": {**WAN, "num_attention_heads": 12, "attention_head_dim": 128, "num_layers": 30, "ffn_dim": 8960,
                 "in_channels": 16, "out_channels": 16, "text_dim": 4096},
    "wan-2x130m": {**WAN, **WIDE, "ffn_dim": 4096},
}  # fmt: skip
"""Changes of the transformers of the tiny pipelines, by name; `wan-1.3b` is the published configuration, and
`wan-2x130m` has two experts as Wan 2.2 A14B."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a model, the side of its images in pixels, how many are in a step, and settings of training."""

    model: str
    side: int
    samples: int = 1
    cached: bool = True
    num_processes: int = 1
    sharded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items()) or "full float32"
        what = f"{self.samples}x{self.side}px" + ("" if self.cached else " not cached")
        processes = f"{self.num_processes} process(es)" + (" of FSDP2" if self.sharded else "")
        return f"{self.model}, {what}, {processes}, {settings}"


BOTH = {"trained_component": "both", "max_train_steps": 4}
"""Four steps, as each expert has moments once it was trained."""
LORA, BF16, CHECKPOINTS = {"lora_rank": 16}, {"mixed_precision": "bf16"}, {"gradient_checkpointing": True}
WORKERS = {"dataloader_num_workers": 2, "max_train_steps": 6}
"""Two decoding processes, and steps enough for both to have batches ready."""
CASES = [
    Case(model="wan-30m", side=512),
    Case(model="wan-30m", side=512, samples=2, settings=CHECKPOINTS),
    Case(model="wan-30m", side=512, settings=BF16),
    Case(model="wan-30m", side=512, settings=LORA),
    Case(model="wan-30m", side=512, samples=2, settings={**LORA, **BF16}),
    Case(model="wan-30m", side=512, settings={**LORA, "batching": "pack", "max_tokens": 1024}),
    Case(model="ltx-30m", side=512, samples=2, settings={**BF16, **CHECKPOINTS}),
    Case(model="wan-130m", side=256),
    Case(model="wan-130m", side=256, settings={"ema_decay": 0.9, "gradient_accumulation_steps": 2, **CHECKPOINTS}),
    Case(model="wan-130m", side=256, num_processes=2, settings={**BF16, **CHECKPOINTS}),
    Case(model="wan-130m", side=256, num_processes=2, sharded=True, settings=CHECKPOINTS),
    Case(model="wan-130m", side=256, num_processes=2, sharded=True, settings={**BF16, **CHECKPOINTS}),
    Case(model="wan-30m", side=512, samples=2, cached=False, settings=LORA),
    Case(model="wan-30m", side=512, samples=2, cached=False, settings={**LORA, **WORKERS}),
    Case(model="wan-30m", side=512, samples=2, settings={**LORA, **WORKERS}),
    Case(
        model="wan-30m",
        side=256,
        samples=2,
        num_processes=2,
        cached=False,
        settings={**LORA, **WORKERS, "max_train_steps": 3},
    ),
    Case(model="wan-350m", side=256, settings={**LORA, **BF16, **CHECKPOINTS}),
    Case(model="wan-350m", side=256, settings={**LORA, **BF16, **CHECKPOINTS, "quantize_base": "int8"}),
    Case(model="wan-1.3b", side=256, settings={**LORA, **BF16, **CHECKPOINTS}),
    Case(model="wan-1.3b", side=256, settings={**LORA, **BF16, **CHECKPOINTS, "quantize_base": "int8"}),
    Case(model="wan-2x130m", side=256, settings={**CHECKPOINTS, **BOTH}),
    Case(model="wan-2x130m", side=256, settings={**LORA, **BF16, **CHECKPOINTS, **BOTH}),
]


def make_pipeline(folder: Path, model: str) -> None:
    """Save a pipeline of random weights in bf16, of a tiny one's components and a larger transformer."""
    from diffusers import AutoencoderKLWan, DiffusionPipeline
    from transformers import UMT5EncoderModel

    make_tiny_pipeline(folder, family=model.partition("-")[0])
    pipeline = DiffusionPipeline.from_pretrained(folder)
    config = {**pipeline.transformer.config, **MODELS[model]}
    with torch.device("meta"):
        transformer = type(pipeline.transformer).from_config(config)
    transformer = transformer.to(torch.bfloat16).to_empty(device="cpu")
    names = ("transformer", "transformer_2") if "2x" in model else ("transformer",)
    for name in names:
        for parameter in transformer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        transformer.save_pretrained(folder / name)
    if len(names) > 1:
        index = folder / "model_index.json"
        entries = json.loads(index.read_text())
        entries |= {"transformer_2": entries["transformer"], "boundary_ratio": 0.875}
        index.write_text(json.dumps(entries))
    if "text_dim" in MODELS[model]:
        shape = {"d_model": MODELS[model]["text_dim"], "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        text = UMT5EncoderModel(UMT5EncoderModel.config_class(vocab_size=384, **shape))
        text.save_pretrained(folder / "text_encoder")
        AutoencoderKLWan(base_dim=8, z_dim=MODELS[model]["in_channels"], num_res_blocks=1).save_pretrained(
            folder / "vae"
        )


def make_dataset(folder: Path, pipeline: Path, case: Case) -> Path:
    """Prepare, and cache, as many images as two steps of all processes take; return their folder."""
    media = folder / "media"
    media.mkdir(parents=True)
    colors = np.random.default_rng(0).integers(0, 255, (4 * case.samples * case.num_processes, 1, 1, 3), np.uint8)
    for index, color in enumerate(colors):
        image = np.broadcast_to(color, (case.side, case.side, 3))
        Image.fromarray(np.ascontiguousarray(image)).save(media / f"{index}.png")
        (media / f"{index}.txt").write_text("an image")
    recipe = recipe_of(str(pipeline))
    spec = recipe.read_spec(str(pipeline))
    table = BucketTable.parse(f"{case.side},{case.side}", frames=[1])
    loaded = load_source(str(media))
    dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, root=loaded.root))
    dataset = map_columns(dataset, BucketColumns(table, spec))
    prepared = PreparedDataset(
        dataset=dataset.add_column(ROW, range(len(dataset))),
        table=table,
        open_table=open_table(spec),
        column=loaded.column,
        caption_column=loaded.caption_column,
        root=loaded.root,
    )
    if case.cached:
        batching = case.settings.get("batching", "bucket")
        config = CacheConfig(folder=str(folder / "cache"), batching=batching, batch_size=case.samples)
        cached, _ = cache_dataset(prepared, recipe.load(str(pipeline)), config)
        assert cached is not None
        prepared = cached
    prepared.save(folder / "prepared")
    return folder / "prepared"


def measure(flags: dict[str, Any], output: Path) -> None:
    """Train in this process, and write what was planned and the highest resident memory, in MB."""
    from hf_bucketing.planner.host import plan_host
    from hf_bucketing.training import TrainingConfig
    from hf_bucketing.training.estimate import plan_of_run, planned_run
    from hf_bucketing.training.loop import Trainer

    class MeasuredTrainer(Trainer):
        of_workers = 0.0

        def _finish_step(self) -> None:
            workers = psutil.Process().children(recursive=True)
            of_workers = sum(worker.memory_full_info().pss for worker in workers) / 2**20
            self.of_workers = max(self.of_workers, of_workers)
            super()._finish_step()

        def _finish(self) -> None:  # before anything is saved
            self.highest = memory_in_mb("VmHWM")

    if "ACCELERATE_TORCH_DEVICE" in os.environ:
        # accelerate starts FSDP on accelerators alone. This is the one place where it asks which kind there is.
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    # Workers import the main script: that of a user imports next to nothing, and this one what makes models.
    del sys.modules["__main__"].__file__
    for dtype in (torch.float32, torch.bfloat16):  # what is imported or allocated in the first step of any model
        layer = torch.nn.Linear(64, 64).to(dtype)
        checkpoint(layer, torch.randn(64, 64, dtype=dtype), use_reentrant=False).sum().backward()
        torch.optim.AdamW(layer.parameters()).step()
    source = flags["pretrained_model_name_or_path"]
    recipe_of(source).load(source, loading=Loading(parts=()))  # imports the pipeline, and loads nothing
    if "quantize_base" in flags:
        importlib.import_module("torchao.quantization")
    before = memory_in_mb("VmRSS")
    trainer = MeasuredTrainer(TrainingConfig.from_flat(**flags))
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak counts from here, and not from loading on
    trainer.run()
    measured = trainer.highest - before
    plan = plan_of_run(trainer.opened, trainer.data)
    workers = trainer.config.loader.dataloader_num_workers
    host = plan_host(plan, planned_run(trainer.opened), num_workers=workers)
    on_machine = torch.tensor(trainer.highest + trainer.of_workers)
    on_machine = trainer.accelerator.reduce(on_machine).item()
    if trainer.accelerator.is_main_process:
        figures = {"planned_mb": plan.total / 2**20, "measured_mb": measured, "plan": str(plan)}
        figures |= {"host_planned_mb": host.total / 2**20, "host_measured_mb": on_machine}
        output.write_text(json.dumps({**figures, "ratio": figures["planned_mb"] / measured}))
    if trainer.accelerator.num_processes == 1:
        trainer.release()
        return
    trainer.accelerator.wait_for_everyone()
    time.sleep(1)  # gloo fails in a process if another has left the same barrier and exits
    os._exit(0)  # ending gloo's threads may deadlock


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Return the figures of a case, measured in processes of its own."""
    pipeline = folder / case.model
    if not pipeline.exists():
        make_pipeline(pipeline, case.model)
    here = Path(tempfile.mkdtemp(dir=folder))
    flags = {
        "pretrained_model_name_or_path": str(pipeline),
        "dataset_dir": str(make_dataset(here, pipeline, case)),
        "output_dir": str(here / "out"),
        "train_batch_size": case.samples,
        "max_train_steps": 2,
        "dataloader_num_workers": 0,
        "report_to": "none",
        **case.settings,
    }
    output = here / "figures.json"
    # By default glibc keeps what is freed, in one arena per thread.
    quiet = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(case.num_processes)]
    launcher += ["--mixed_precision", "no", "--main_process_port", "0"]
    if case.sharded:
        environment = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
        environment |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        launcher += ["--config_file", str(ACCELERATE_CONFIGS / "fsdp2.yaml")]
    else:
        environment = {"ACCELERATE_USE_CPU": "true"}
        launcher += ["--num_machines", "1", "--dynamo_backend", "no"]
        launcher += ["--multi_gpu"] if case.num_processes > 1 else ["--cpu"]
    command = [*launcher, __file__, "--child", json.dumps(flags), "--output", str(output)]
    environment = {**os.environ, **quiet, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BucketingError(f"The run of {case.name} failed:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--only", nargs="+", default=[""], help="Cases to run, by parts of their names; $ ends one.")
    parser.add_argument("--child", type=json.loads, help="Settings of the run of a process; other flags are ignored.")
    return parser


def table_of(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the runs as the rows of a table, and how much more they take than planned, at least and at most."""
    rows = [
        {
            "run": name,
            "planned MB": result["planned_mb"],
            "measured MB": result["measured_mb"],
            "more than planned": result["measured_mb"] / result["planned_mb"] - 1,
            "machine planned MB": result["host_planned_mb"],
            "machine measured MB": result["host_measured_mb"],
        }
        for name, result in runs.items()
    ]
    more = [row["more than planned"] for row in rows]
    on_machine = [row["machine measured MB"] / row["machine planned MB"] - 1 for row in rows]
    shown = [{**row, "more than planned": f"{row['more than planned']:.1%}"} for row in rows]
    extremes = {"least_more_than_planned": min(more), "most_more_than_planned": max(more)}
    extremes |= {"least_more_on_the_machine": min(on_machine), "most_more_on_the_machine": max(on_machine)}
    return {"table": shown, **extremes, "plan_error": PLAN_ERROR}


def main(args: argparse.Namespace) -> None:
    if args.child:
        measure(args.child, args.output)
        return
    datasets.disable_progress_bars()
    cases = [case for case in CASES if any(part in f"{case.name}$" for part in args.only)]
    if any("quantize_base" in case.settings for case in cases) and importlib.util.find_spec("torchao") is None:
        raise BucketingError(
            'Runs in int8 need torchao: pip install "hf_bucketing[quantization]", or name others (--only).'
        )
    figures: dict[str, Any] = {**machine("torch", "diffusers", "accelerate", "peft"), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            result = figures["runs"][case.name] = run(case, Path(folder))
            print(f"{result['ratio']:.3f}  planned {result['planned_mb']:8.1f} MB, measured "
                  f"{result['measured_mb']:8.1f} MB; on the machine {result['host_planned_mb']:8.1f} and "
                  f"{result['host_measured_mb']:8.1f} MB: {case.name} ({result['plan']})", flush=True)  # fmt: skip
    figures |= table_of(figures["runs"])
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main, make_parser)
