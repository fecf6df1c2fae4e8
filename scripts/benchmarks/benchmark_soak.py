r"""Train for some minutes with workers, unreadable files, checkpoints and validation, and watch what grows.

The memory of two training processes and their workers, open files and the shared memory of the machine are read
every few seconds. They must be as high at the end as in the first half: what a run forgets to free shows here.

python scripts/benchmarks/benchmark_soak.py --minutes 10 --output scripts/benchmarks/results/soak.json
"""

import argparse
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from benchmark_tools import machine, report

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.errors import BucketingError
from hf_bucketing.runs.review import losses_of
from hf_bucketing.synthetic.media import make_media_dataset
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline
from hf_bucketing.training.checkpoint import list_checkpoints

SCRIPTS = Path(__file__).parents[1]
FLAGS = shlex.split("""
    --batching pack --max_tokens 1200 --strip_length 16 --lora_rank 4
    --num_train_epochs 100000 --max_sequence_length 32 --dataloader_num_workers 2
    --on_error replace --max_error_share 0.5 --max_errors 100
    --checkpointing_steps 40 --checkpoints_total_limit 2
    --validation_prompts 'a red square' --validation_sizes 9,64,64 --validation_steps 100
    --validation_inference_steps 2 --validation_split 0.1 --validation_loss_steps 50
""")
SAMPLED = ("memory_mb", "files", "processes", "shared_memory_mb")


def prepare(folder: Path, samples: int) -> None:
    """Make media, a pipeline and a prepared data set, and then break some of the files."""
    make_media_dataset(folder / "media", num_samples=samples)
    make_tiny_pipeline(folder / "pipeline")
    flags = ["--dataset", "media", "--output_dir", "prepared", "--pretrained_model_name_or_path", "pipeline"]
    flags += ["--target_fps", "8", "--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25"]
    subprocess.run([sys.executable, SCRIPTS / "prepare_dataset.py", *flags], cwd=folder, check=True)
    videos = sorted((folder / "media").rglob("*.mp4"))
    for path in videos[:: max(2, len(videos) // 3)]:
        path.write_bytes(path.read_bytes()[:200])


def read_use(process: psutil.Process) -> dict[str, float]:
    """Return what a launched run and all its children use now: memory that is theirs alone, open files, processes."""
    memory = files = processes = 0
    for running in [process, *process.children(recursive=True)]:
        try:
            memory += running.memory_full_info().uss
            files += running.num_fds()
            processes += 1
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile
            continue
    shared = shutil.disk_usage("/dev/shm").used
    return {
        "memory_mb": memory / 2**20,
        "files": files,
        "processes": processes,
        "shared_memory_mb": shared / 2**20,
    }


def watch(folder: Path, *, minutes: float, every: float) -> list[dict[str, float]]:
    """Train for some minutes, and return what the run used, sample by sample, from its first optimizer step on."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(SCRIPTS / "train_text_to_video.py"), "--pretrained_model_name_or_path", "pipeline"]
    command += ["--dataset_dir", "prepared", "--output_dir", "out", *FLAGS]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    used = []
    with (folder / "run.log").open("w") as log:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        process, end = psutil.Process(running.pid), None
        while running.poll() is None and (end is None or time.monotonic() < end):
            losses = folder / "out" / "logs" / "losses.jsonl"
            if end is None and losses.is_file() and losses.stat().st_size:
                end = time.monotonic() + 60 * minutes
            if end is not None:
                used.append(read_use(process))
            time.sleep(every)
        if running.poll() is not None:
            raise BucketingError(f"The run ended by itself:\n{(folder / 'run.log').read_text()[-4000:]}")
        running.send_signal(signal.SIGTERM)
        running.wait(timeout=600)
    return used


def summarise(used: list[dict[str, float]]) -> dict[str, object]:
    """Return the medians of the second and of the last quarter of the samples, and how much grew between them."""
    quarter = len(used) // 4
    figures: dict[str, object] = {"samples": len(used)}
    for name in SAMPLED:
        early = statistics.median(sample[name] for sample in used[quarter : 2 * quarter])
        late = statistics.median(sample[name] for sample in used[-quarter:])
        figures |= {f"{name}, second quarter": early, f"{name}, last quarter": late}
        figures[f"{name}, growth"] = late / early - 1 if early else float(late > 0)
    return figures


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="How long to watch the run.")
    parser.add_argument("--every", type=float, default=2, help="Seconds between two readings.")
    parser.add_argument("--samples", type=int, default=60, help="Media files of the data set.")
    parser.add_argument("--most_growth", type=float, default=0.05, help="Growth that still counts as flat.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    return parser


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.samples)
        used = watch(folder, minutes=args.minutes, every=args.every)
        figures = {**machine("torch", "accelerate"), "minutes": args.minutes, **summarise(used)}
        out = folder / "out"
        figures["optimizer_steps"] = len(losses_of(out))
        figures["replaced"] = len((out / "logs" / "unreadable.jsonl").read_text().splitlines())
        figures["checkpoints_kept"] = len(list_checkpoints(out))
    report(figures, args.output)
    grown = [name for name in SAMPLED if float(str(figures[f"{name}, growth"])) > args.most_growth]
    if grown:
        raise BucketingError(f"{', '.join(grown)} grew by more than {args.most_growth:.0%}.")


if __name__ == "__main__":
    run_script(main, make_parser)
