"""Training runs as a user launches them, small enough for tests."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import pytest

from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_sample_logs
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer
from tests.conftest import as_flags, kill_training_when, launch_training

BATCHING = {
    "bucket": ("--batching", "bucket", "--train_batch_size", 2),
    "pack": ("--batching", "pack", "--max_tokens", 640, "--strip_length", 16),
    "length": ("--batching", "length", "--max_tokens", 640),
}
batching = pytest.mark.parametrize("flags", BATCHING.values(), ids=BATCHING)

TINY_WAN = ModelTokens(width=96)
"""What the transformer of the tiny Wan pipeline adds to the tokens of samples."""

STABLE = {"adam_epsilon": 1e-4}
"""AdamW divides by the gradient's size: with its usual epsilon, the rounding of a gradient near zero, which depends on
the order in which processes are summed, moves a weight by up to the learning rate."""


def in_process(pipeline: Path, prepared: Path, output: Path, **settings) -> TrainingConfig:
    """Make the settings of a short run in this process."""
    common = {
        "pretrained_model_name_or_path": str(pipeline),
        "dataset_dir": str(prepared),
        "output_dir": str(output),
        "report_to": "none",
        "dataloader_num_workers": 0,
        "max_sequence_length": 32,
        "max_train_steps": 3,
        "train_batch_size": 2,
        "learning_rate": 5e-3,
    }
    return TrainingConfig.from_flat(**{**common, **settings})


def run(config: TrainingConfig) -> list[float]:
    """Train in this process, and return the loss of each optimizer step."""
    Trainer(config).run()
    return losses_of(Path(config.output_dir))


def train(pipeline: Path, prepared: Path, output: Path, *flags: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a training to its end."""
    return launch_training(*_common(pipeline, prepared, output), *flags, **options)


def train_until(
    done: Callable[[], bool], pipeline: Path, prepared: Path, output: Path, *flags: object, num_processes: int
) -> None:
    """Start a training, and kill all its processes at once when something is done."""
    kill_training_when(done, *_common(pipeline, prepared, output), *flags, num_processes=num_processes)


def _common(pipeline: Path, prepared: Path, output: Path) -> list[object]:
    return as_flags(
        pretrained_model_name_or_path=pipeline,
        dataset_dir=prepared,
        output_dir=output,
        max_sequence_length=32,
        dataloader_num_workers=1,
        report_to="none",
        learning_rate=5e-3,
    )


def run_card(folder: Path, *, dtype: str = "bfloat16", steps: int = 1) -> dict[str, Any]:
    """Run the code that the card of a run shows, on the CPU and with few steps of the scheduler.

    Returns its names, and with them what it has `written`: frames, path and frame rate of each video.
    """
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    code = code.replace('"cuda"', '"cpu"').replace("torch.bfloat16", f"torch.{dtype}")
    code = code.replace("num_frames=", f"num_inference_steps={steps}, num_frames=")
    names: dict[str, Any] = {}
    written = []
    with pytest.MonkeyPatch.context() as patch:  # diffusers writes videos with packages that are not installed here
        patch.setattr(
            diffusers.utils, "export_to_video", lambda frames, path, fps: written.append((frames, path, fps))
        )
        exec(compile(code, "README.md", "exec"), names)
    return {**names, "written": written}


class SampleCount(NamedTuple):
    """What all processes saw in one epoch: different samples, samples seen again, steps of each, mixed steps."""

    epoch: int
    seen: int
    repeated: int
    steps: tuple[int, ...]
    mixed_steps: int


def count_samples(output: Path) -> list[SampleCount]:
    """Count the samples in the logs of a run that was not resumed on other processes, epoch by epoch."""
    logs = read_sample_logs(output)
    counts = []
    for epoch in sorted({line["epoch"] for log in logs for line in log}):
        by_process = [[line for line in log if line["epoch"] == epoch] for log in logs]
        seen = Counter(index for lines in by_process for line in lines for index in line["index"])
        mixed = sum(len({line["bucket_id"] for line in step}) > 1 for step in zip(*by_process, strict=False))
        counts.append(SampleCount(epoch, len(seen), seen.total() - len(seen), tuple(map(len, by_process)), mixed))
    return counts
