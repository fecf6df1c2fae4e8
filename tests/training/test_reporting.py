"""What a run tells while it trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_bucketing.devices import Reading
from hf_bucketing.runs.page import PAGE, write_live_page
from hf_bucketing.runs.run_log import RunLog
from hf_bucketing.training import TrainingConfig, reporting
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run


def test_a_run_leaves_its_settings_and_its_metrics(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path, batching="pack", max_tokens=640, strip_length=16,
                        validation_prompts=["red"], validation_sizes="5,32,48", validation_steps=2,
                        validation_inference_steps=1, ema_decay=0.0)  # fmt: skip
    losses = run(config)
    assert TrainingConfig.from_flat(**json.loads((tmp_path / "training_config.json").read_text())) == config
    entries = [json.loads(line) for line in (tmp_path / "logs" / "losses.jsonl").read_text().splitlines()]
    assert [entry["train_loss"] for entry in entries] == losses
    for entry in entries:
        assert 0 < entry["fill"] <= 1
        assert entry["imbalance"] == 1
        assert entry["tokens"] == pytest.approx(entry["fill"] * 640)
        assert entry["tokens_per_second"] > entry["samples_per_second"] > 0
        assert entry["seconds"] * entry["samples_per_second"] == pytest.approx(entry["samples"])
        levels = [value for name, value in entry.items() if name.startswith("loss_by_noise/")]
        assert min(levels) - 1e-5 <= entry["train_loss"] <= max(levels) + 1e-5  # means of float32 and float64
    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["step-2", f"step-{len(losses)}"]
    samples = [json.loads(line) for line in (tmp_path / "logs" / "samples-0.jsonl").read_text().splitlines()]
    assert [sum(batch["loss"]) / len(batch["loss"]) for batch in samples] == pytest.approx(losses, abs=1e-5)


def test_a_run_says_what_it_does_how_long_it_takes_and_what_to_do_next(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(reporting, "TIMED_STEPS", 2)
    caplog.set_level(logging.INFO)
    run(in_process(pipeline_dir, prepared_dir, tmp_path, lora_rank=2, checkpointing_steps=3))
    lines = [message.removeprefix("[RANK 0] ") for message in caplog.messages]
    (start,) = [line for line in lines if line.startswith("Trains LoRA of rank 2 on the transformer of ")]
    assert f"on {prepared_dir}: 3 optimizer steps on 1 process, in float32. Writes to {tmp_path};" in start
    (time,) = [line for line in lines if line.startswith("About ")]
    assert "are left: 1 optimizer steps of " in time
    after = lines[lines.index("What to do next:") :]
    assert f"hf_bucketing sample {pipeline_dir} --adapter {tmp_path} --prompt" in after[1]
    assert f"hf_bucketing report run {tmp_path} --html {tmp_path}/report.html" in after[2]
    assert "--resume_from_checkpoint latest" in after[3]


@pytest.mark.slow
def test_the_page_of_a_run_is_written_while_it_trains_and_at_its_end(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshes = []

    def write(folder: Path) -> None:
        write_live_page(folder)
        refreshes.append("http-equiv" in (folder / PAGE).read_text())

    monkeypatch.setattr(reporting, "write_live_page", write)
    run(in_process(pipeline_dir, prepared_dir, tmp_path / "without"))
    assert not refreshes
    run(in_process(pipeline_dir, prepared_dir, tmp_path / "with", page_steps=2))
    assert refreshes == [True, False]


@pytest.mark.slow
def test_between_the_read_of_a_step_and_its_update_nothing_is_written(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path, gradient_accumulation_steps=2))
    events: list[str] = []

    def noting(event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(Reading, "values", noting("read", Reading.values))
    monkeypatch.setattr(trainer.trained, "update", noting("update", trainer.trained.update))
    monkeypatch.setattr(RunLog, "_write", noting("write", RunLog._write))
    trainer.run()
    of_steps = events[events.index("read") :]
    assert of_steps == ["read", "update", "write", "write", "write"] * 3  # two batches, and the loss
