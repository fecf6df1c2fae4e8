r"""Compare suggested runs with what they measure: their memory, and the order of their epochs' times.

python scripts/benchmarks/benchmark_suggestions.py --output scripts/benchmarks/results/suggestions.json

Of the demo's clips, and of clips as long as those of three published data sets at a tenth of their sides and 4 frames
per second, runs of a tiny pipeline on the CPU are suggested, prepared, cached and trained for an epoch by the files of
settings as they are written. The first suggestion goes by the speed of a GPU, and its runs measure the cost of tokens
together; times are compared with a second one, by this cost (`--cost_model`). Memory is that of the processes of a run
together, workers included; it is within the plan if it exceeds it by no more than the share that every verdict spares.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from benchmark_tools import benchmark_parser, machine, report
from published_data_sets import DATA_SETS

from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.commands import suggest
from hf_bucketing.commands.suggested import FILES, write_suggestion
from hf_bucketing.planner.memory import PLAN_ERROR
from hf_bucketing.runs.run_log import fit_steps, read_log
from hf_bucketing.synthetic.media import DEMO_CLIPS, Clip, make_media_dataset
from hf_bucketing.synthetic.pipelines import make_tiny_pipeline

MIXES = ("Panda-70M", "OpenVid-1M", "SpatialVID")
FPS, SMALLER, MOST_FRAMES = 4, 10, 33
SCRIPTS = Path(__file__).parents[1]
ALIKE = 0.05
"""Runs whose planned times are nearer than this share have no order."""


class Measured(NamedTuple):
    """Memory of all processes of a run in bytes, and the lines of the log of its steps."""

    memory: int
    steps: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Seconds of its epoch, in which the first step, which warms up, takes as long as the others."""
        seconds = [step["seconds"] for step in self.steps]
        return sum(seconds[1:]) * len(seconds) / max(len(seconds) - 1, 1)


def clips_of(mix: str, count: int) -> list[Clip]:
    _, frames, heights, widths = DATA_SETS[mix].draw(count, fps=FPS)
    return [
        Clip(min(frame, MOST_FRAMES), height // SMALLER // 2 * 2, width // SMALLER // 2 * 2, FPS)
        for frame, height, width in zip(frames.tolist(), heights.tolist(), widths.tolist(), strict=True)
    ]


def run(name: str, *flags: object) -> int:
    """Run a script to its end, and return the most memory that its processes had together, in bytes."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, flags)]
    highest = 0
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            highest = max(highest, _memory_of(process.pid))
            time.sleep(0.05)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)}:\n{output.read().decode()[-4000:]}")
    return highest


def _memory_of(pid: int) -> int:
    """Return the memory of a process and its children, in which what they share counts once; 0 once it has ended."""
    try:
        parent = psutil.Process(pid)
        return sum(process.memory_full_info().pss for process in (parent, *parent.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def suggested(media: Path, pipeline: Path, folder: Path, *flags: object) -> suggest.Suggested:
    given = [
        *("--dataset", media, "--pretrained_model_name_or_path", pipeline, "--device", "cpu", "--output_dir", folder),
        *("--mixed_precision", "no", "--gpu_memory", 2, "--num_train_epochs", 2, "--target_fps", FPS, *flags),
    ]
    made = suggest.suggest(suggest.make_parser().parse_args([*map(str, given)]))
    write_suggestion(
        made.suggestion, folder, model=str(pipeline), data=made.data, machine=made.machine, rows=made.rows
    )
    return made


def trained(file: Path) -> Measured:
    """Prepare, cache and train as a file says, all but its number of epochs."""
    for script in ("prepare_dataset.py", "cache_latents.py"):
        run(script, "--config", file)
    memory = run("train_text_to_video.py", "--config", file, "--report_to", "none", "--num_train_epochs", 1)
    return Measured(memory, [*read_log(file.parent / "trained", "losses")])


def cost_of(runs: Iterable[Measured], file: Path) -> Path:
    """Write the cost of tokens that runs measured together, all but their first steps."""
    file.write_text(fit_steps(step for run in runs for step in run.steps[1:]).to_json())
    return file


def measure_mix(name: str, clips: list[Clip], pipeline: Path, folder: Path) -> list[dict[str, Any]]:
    media = folder / "media"
    make_media_dataset(media, num_samples=len(clips), clips=clips)
    first = suggested(media, pipeline, folder / "first").suggestion.candidates[:FILES]
    runs = [trained(folder / "first" / str(rank) / "config.yaml") for rank in range(1, len(first) + 1)]
    made = suggested(media, pipeline, folder / "second", "--cost_model", cost_of(runs, folder / "cost_model.json"))
    rows = []
    for rank, candidate in enumerate(made.suggestion.candidates[:FILES], start=1):
        measured = trained(folder / "second" / str(rank) / "config.yaml")
        rows.append(
            {
                "data": name,
                "run": candidate.name,
                "times from": made.suggestion.source,
                "planned MB": candidate.host.total / 2**20,
                "measured MB": measured.memory / 2**20,
                "within the plan": measured.memory <= candidate.host.total * (1 + PLAN_ERROR),
                "planned s": candidate.time.seconds,
                "measured s": measured.seconds,
            }
        )
    return rows


def orders(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many pairs of runs of the same data differ in planned time, and how many have its order measured."""
    pairs = [
        (first, second)
        for first, second in combinations(rows, 2)
        if first["data"] == second["data"]
        and abs(first["planned s"] - second["planned s"]) > ALIKE * first["planned s"]
    ]
    right = [
        (first["planned s"] < second["planned s"]) == (first["measured s"] < second["measured s"])
        for first, second in pairs
    ]
    return {"pairs": len(right), "pairs_in_the_planned_order": sum(right)}


def make_parser() -> FlagParser:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--samples", type=int, default=60, help="Clips of each data set.")
    parser.add_argument("--mixes", nargs="*", choices=MIXES, default=[*MIXES], help="Published data sets.")
    return parser


def main(args: argparse.Namespace) -> None:
    figures: dict[str, Any] = {**machine("torch", "diffusers"), "samples": args.samples}
    clips = {"demo": [*DEMO_CLIPS] * (args.samples // len(DEMO_CLIPS) or 1)}
    clips |= {mix: clips_of(mix, args.samples) for mix in args.mixes}
    rows = []
    for name, sizes in clips.items():
        with tempfile.TemporaryDirectory() as folder:
            make_tiny_pipeline(Path(folder) / "tiny-wan")
            measured = measure_mix(name, sizes, Path(folder) / "tiny-wan", Path(folder))
            print(*measured, sep="\n", flush=True)
            rows += measured
    report({**figures, **orders(rows), "runs": rows}, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
