"""What a run tells while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bucketing.training import TrainingConfig
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
    assert [path.name for path in (tmp_path / "validation").iterdir()] == ["step-2"]
    samples = [json.loads(line) for line in (tmp_path / "logs" / "samples-0.jsonl").read_text().splitlines()]
    assert [sum(batch["loss"]) / len(batch["loss"]) for batch in samples] == pytest.approx(losses, abs=1e-5)
