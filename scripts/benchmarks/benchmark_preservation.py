r"""Fine-tune the demo's pipeline on dark clips with and without preservation, and see how far other renderings move.

The pipeline knows clips before bright backgrounds. Adapters learn those before dark ones; the renderings of prompts
with bright backgrounds, which nobody trains, should stay as they are.

python scripts/benchmarks/benchmark_preservation.py --output scripts/benchmarks/results/preservation.json
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmark_tools import in_fresh_process, machine, report

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.synthetic.demo import make_demo_pipeline
from hf_bucketing.synthetic.media import make_media_dataset

RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "prior": {"preservation": "prior", "preservation_share": 0.5},
    "blank": {"preservation": "blank", "preservation_share": 0.5},
    "class": {
        "preservation": "class",
        "preservation_share": 0.5,
        "preservation_caption": "a picture of a circle moving on a bright background",
    },
}
SHAPES = ("red square moving right", "blue circle moving down", "yellow diamond moving left", "white circle moving up")


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    parser.add_argument("--samples", type=int, default=40, help="Samples of the data set.")
    parser.add_argument("--steps", type=int, default=100, help="Optimizer steps of each run.")
    parser.add_argument("--inference_steps", type=int, default=10, help="Scheduler steps of a rendering.")
    parser.add_argument("--runs", type=int, default=1, help="Runs of each kind, with seeds of their own.")
    return parser


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_media_dataset(folder / "media", num_samples=args.samples)
        make_demo_pipeline(folder / "pipeline")
        flags = ["--dataset", "media", "--output_dir", "prepared", "--pretrained_model_name_or_path", "pipeline"]
        flags += ["--target_fps", "4", "--bucket_tokens", "100,150,260", "--bucket_frames", "1,5,9"]
        script = Path(__file__).parents[1] / "prepare_dataset.py"
        subprocess.run([sys.executable, script, *flags], cwd=folder, check=True)
        before = in_fresh_process(rendered, pipeline=folder / "pipeline", steps=args.inference_steps)
        rows = []
        for preservation, settings in RUNS.items():
            moved = []
            for seed in range(args.runs):
                output = folder / f"{preservation}-{seed}"
                options = {**settings, "seed": seed, "max_train_steps": args.steps}
                after = in_fresh_process(
                    train_and_render, folder=folder, output=output, settings=options, steps=args.inference_steps
                )
                moved.append([distance(after[background], before[background]) for background in before])
            trained, unrelated = np.mean(moved, 0).tolist()
            rows.append({"preservation": preservation, "trained prompts": trained, "unrelated prompts": unrelated})
            print(rows[-1], flush=True)
    unrelated = {row["preservation"]: row["unrelated prompts"] for row in rows}
    shares = {name: moved / unrelated["none"] for name, moved in unrelated.items() if name != "none"}
    report({"machine": machine(), "steps": args.steps, "seeds": args.runs, "rows": rows, "share": shares}, args.output)


def train_and_render(*, folder: Path, output: Path, settings: dict[str, Any], steps: int) -> dict[str, np.ndarray]:
    """Fine-tune the pipeline in a folder, and return what it then renders, see [`rendered`]."""
    from hf_bucketing.training import TrainingConfig
    from hf_bucketing.training.loop import train

    torch.set_num_threads(1)
    common = {
        "pretrained_model_name_or_path": str(folder / "pipeline"),
        "dataset_dir": str(folder / "prepared"),
        "output_dir": str(output),
        "lora_rank": 16,
        "learning_rate": 2e-3,
        "max_tokens": 700,
        "max_sequence_length": 32,
        "dataloader_num_workers": 0,
        "report_to": "none",
    }
    train(TrainingConfig.from_flat(**{**common, **settings}))
    return rendered(pipeline=folder / "pipeline", adapters=output, steps=steps)


@torch.no_grad()
def rendered(*, pipeline: Path, steps: int, adapters: Path | None = None) -> dict[str, np.ndarray]:
    """Return clips before dark backgrounds, which are trained, and before bright ones, `(clips, …, 3)` in [0, 1]."""
    from diffusers import DiffusionPipeline

    torch.set_num_threads(1)
    loaded = DiffusionPipeline.from_pretrained(pipeline)
    loaded.set_progress_bar_config(disable=True)
    if adapters is not None:
        loaded.load_lora_weights(adapters)
    common = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": steps, "guidance_scale": 2.0}
    common |= {"max_sequence_length": 32, "output_type": "np"}
    frames: dict[str, np.ndarray] = {}
    for background in ("dark", "bright"):
        prompts = [f"a {shape} on a {background} background" for shape in SHAPES]
        clips = [loaded(prompt, generator=torch.Generator().manual_seed(7), **common).frames[0] for prompt in prompts]
        frames[background] = np.stack(clips)
    return frames


def distance(frames: np.ndarray, others: np.ndarray) -> float:
    """Return the root of the mean squared difference of pixels, in [0, 1]."""
    return float(np.sqrt(np.square(frames - others).mean()))


if __name__ == "__main__":
    run_script(main, make_parser)
