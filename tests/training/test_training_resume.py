"""A training that is killed at any moment goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import BATCHING, in_process, run, train, train_until

STEPS = 4
EVERY_VALUE = [("bucket", "full", 1), ("pack", "adapters", 2), ("length", "adapters", 2)]
AT_ONCE = [
    EVERY_VALUE[1],
    *(pytest.param(*values, marks=pytest.mark.every) for values in (EVERY_VALUE[0], EVERY_VALUE[2])),
]
"""Every value of batching, trained weights and number of processes occurs."""


@pytest.mark.slow
@pytest.mark.parametrize(("batching", "weights", "num_processes"), AT_ONCE)
def test_a_killed_and_resumed_run_repeats_the_losses_and_samples_of_an_uninterrupted_one(
    batching: str, weights: str, num_processes: int, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    common = [*BATCHING[batching], "--max_train_steps", STEPS, "--ema_decay", 0.9]
    common += ["--gradient_accumulation_steps", 2, "--checkpointing_steps", 2, "--checkpoints_total_limit", 1]
    common += ["--lora_rank", 2] if weights == "adapters" else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(pipeline_dir, prepared_dir, whole, *common, num_processes=num_processes)
    at = random.randint(2, STEPS - 1)
    log = parts / "logs" / "losses.jsonl"
    train_until(
        lambda: log.exists() and log.read_text().count("\n") >= at and any(parts.glob("checkpoint-*")),
        pipeline_dir,
        prepared_dir,
        parts,
        *common,
        num_processes=num_processes,
    )
    assert not (parts / "model_index.json").exists()
    resume = (*common, "--resume_from_checkpoint", "latest")
    result = train(pipeline_dir, prepared_dir, parts, *resume, num_processes=num_processes)
    assert "Resumed after optimizer step" in result.stderr
    assert losses_of(parts) == pytest.approx(losses_of(whole), abs=1e-6)
    assert len(losses_of(parts)) == STEPS
    for process in range(num_processes):
        name = f"logs/samples-{process}.jsonl"
        assert (parts / name).read_text() == (whole / name).read_text()
    assert sorted(path.name for path in parts.glob("checkpoint-*")) == [f"checkpoint-{STEPS}"]
    saved = "pytorch_lora_weights.safetensors" if weights == "adapters" else "model_index.json"
    assert (parts / saved).exists()


@pytest.mark.every
def test_a_run_whose_steps_are_estimated_ends_with_its_last_epoch_and_resumes_its_schedule(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_bucketing.loaders.planned._COUNTED_ROWS", 1)  # plan one epoch ahead
    out = tmp_path / "out"
    settings = {"batching": "pack", "max_tokens": 1600, "strip_length": 16, "lora_rank": 2}
    settings |= {"max_train_steps": None, "num_train_epochs": 3, "lr_scheduler": "linear", "checkpointing_steps": 3}
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, out, **settings))
    steps = [trainer.data.sampler.plan(epoch).num_steps for epoch in range(3)]
    assert str(trainer.planned) == f"about {steps[0] + 2 * steps[1]}"
    trainer.run()
    whole = read_log(out, "losses")
    assert len(whole) == sum(steps)
    run(in_process(pipeline_dir, prepared_dir, out, **settings, resume_from_checkpoint="checkpoint-3"))
    resumed = read_log(out, "losses")
    assert [line["lr"] for line in resumed] == [line["lr"] for line in whole]
    assert losses_of(out) == pytest.approx([line["train_loss"] for line in whole], abs=1e-6)
