"""A training that is resumed on the device, beside one that was not interrupted."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .measuring import Cases, Figures, Run

SCRIPTS = Path(__file__).parents[2]
STEPS, SAVED = 4, 2


def cases(run: Run) -> Cases:
    """Yield runs of a small model through the training script, of LoRA and of all weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script("make_tiny_pipeline", output_dir=folder / "tiny")
        script("make_demo_dataset", output_dir=folder / "clips", num_samples=9)
        script(
            "prepare_dataset", dataset=folder / "clips", output_dir=folder / "prepared", target_fps=8,
            pretrained_model_name_or_path=folder / "tiny", bucket_tokens="60,110", bucket_frames="1,9,17",
        )  # fmt: skip
        yield "LoRA, packs", lambda: resumed(folder, batching="pack", max_tokens=640, strip_length=16, lora_rank=4)
        yield "all weights, buckets", lambda: resumed(folder, batching="bucket", train_batch_size=2)


def resumed(folder: Path, **settings: object) -> Figures:
    """Train to the end, then again from the checkpoint in the middle, and compare the losses of the steps after it."""
    output = folder / f"trained-{settings['batching']}"
    common = {
        "dataset_dir": folder / "prepared", "output_dir": output, "report_to": "none", "max_sequence_length": 32,
        "pretrained_model_name_or_path": folder / "tiny", "max_train_steps": STEPS, "checkpointing_steps": SAVED,
        "mixed_precision": "bf16", **settings,
    }  # fmt: skip
    script("train_text_to_video", **common)
    whole = losses(output)
    script("train_text_to_video", **common, resume_from_checkpoint=f"checkpoint-{SAVED}")
    again = losses(output)
    differences = [abs(loss - repeated) for loss, repeated in zip(whole, again, strict=True)]
    return {
        "losses": whole,
        "losses_of_the_resumed": again,
        "most_difference": max(differences),
        "bit_equal": whole == again,
    }


def losses(output: Path) -> list[float]:
    """Return the losses of a run by step; a resumed one repeats the lines of steps after its checkpoint."""
    lines = [json.loads(line) for line in (output / "logs" / "losses.jsonl").read_text().splitlines()]
    by_step = {line["global_step"]: line["train_loss"] for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def script(name: str, **settings: object) -> None:
    """Run a script to its end, with settings as flags."""
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, SCRIPTS / f"{name}.py", *flags], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-1000:]}")
