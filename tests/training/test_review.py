"""Looking back at a run by its logs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_bucketing import BucketingError
from hf_bucketing.training.review import (
    StepLog,
    draw_losses,
    losses_by_bucket,
    review_run,
    running_mean,
    summarise_losses,
)
from hf_bucketing.training.run_log import RunLog
from tests.conftest import run_script_here


def write_run(folder: Path, losses: list[float], *, shift: int = 0) -> Path:
    """Write the logs of an epoch of two processes, whose second one takes rows from `shift` on."""
    logs = [RunLog(folder, process_index=process, num_processes=2) for process in range(2)]
    counts = {"num_processes": 2, "num_steps": len(losses), "num_mixed_steps": 0}
    logs[0].write_plan(0, {**counts, "kept": 2 * len(losses), "repeated": 0, "consumed": 0, "dropped": {}})
    for step, loss in enumerate(losses):
        for log, row in zip(logs, (step, len(losses) + step - shift), strict=True):
            log.write_samples(epoch=0, step=step, bucket_id=0, index=[row], loss=[loss])
        entry = {"train_loss": loss, "samples": 2, "seconds": 0.5, "busy_batches": 1, "epoch": 0}
        logs[0].write_loss(step + 1, entry)
    return folder


def test_a_review_fails_on_each_thing_that_can_go_wrong(tmp_path: Path) -> None:
    falling, flat = [2.0] * 10 + [1.0] * 10, [2.0] * 20
    assert review_run(write_run(tmp_path / "good", falling)).passed
    for name, losses, shift in (("twice", falling, 1), ("flat", flat, 0)):
        review = review_run(write_run(tmp_path / name, losses, shift=shift))
        assert [check.holds for check in review.checks].count(False) == 1, str(review)
        assert not review.passed
        assert "FAILED" in str(review)
    result = run_script_here("report_training.py", tmp_path / "flat", check=False)
    assert result.returncode == 1
    assert "FAILED" in result.stdout
    draw_losses([tmp_path / "good", tmp_path / "flat"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BucketingError, match="at least ten optimizer steps"):
        summarise_losses([1.0] * 9)
    with pytest.raises(BucketingError, match="does not exist"):
        review_run(tmp_path)


def test_losses_by_bucket_are_means_over_the_second_half(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    batches = [(0, 1, [9.0]), (1, 1, [9.0, 9.0]), (2, 1, [1.0, 3.0]), (3, 4, [5.0])]
    lines = [
        {"batch": b, "epoch": 0, "step": b, "bucket_id": i, "index": [0] * len(v), "loss": v} for b, i, v in batches
    ]
    for process in range(2):
        path = tmp_path / "logs" / f"samples-{process}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert losses_by_bucket(tmp_path) == {1: (8, 5.5), 4: (2, 5.0)}


def write_losses(folder: Path, steps: StepLog) -> Path:
    (folder / "logs").mkdir(parents=True)
    names = ("train_loss", "samples", "seconds")
    lines = [dict(zip(names, map(float, step), strict=True)) for step in zip(*steps, strict=True)]
    (folder / "logs" / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_of_unequal_steps_are_drawn_by_samples_and_by_time(tmp_path: Path, monkeypatch) -> None:
    few = StepLog(np.full(60, 2.0), np.full(60, 2), np.full(60, 30.0))
    many = StepLog(np.full(20, 1.0), np.full(20, 12), np.full(20, 45.0))
    runs = [write_losses(tmp_path / "few", few), write_losses(tmp_path / "many", many)]
    drawn: list[Figure] = []
    create = Figure.subplots

    def keep(self: Figure, *args, **kwargs):
        drawn.append(self)
        return create(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "subplots", keep)
    draw_losses(runs, tmp_path / "loss.png")
    by_samples, by_time = drawn[0].axes
    assert by_samples.get_xlabel() == "samples seen"
    assert [line.get_xdata()[-1] for line in by_samples.get_lines()] == [120, 120, 240, 240]
    assert by_time.get_xlabel() == "training time in minutes"
    assert [line.get_xdata()[-1] for line in by_time.get_lines()] == [30, 30, 15, 15]
    assert by_samples.get_legend().get_title().get_text() == "running mean over 6 samples"


def test_the_running_mean_is_over_samples_and_not_over_steps() -> None:
    steps = StepLog(np.array([4.0, 1.0, 2.0, 8.0]), np.array([1, 3, 1, 2]), np.ones(4))
    np.testing.assert_array_equal(running_mean(steps, window=4), [np.nan, 7 / 4, 5 / 4, 21 / 6])
    np.testing.assert_array_equal(running_mean(steps, window=1), steps.loss)
    assert np.isnan(running_mean(steps, window=8)).all()


def test_logs_without_samples_and_times_are_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "losses.jsonl").write_text(json.dumps({"train_loss": 1.0, "samples": 2}) + "\n")
    with pytest.raises(BucketingError, match=r"losses.jsonl holds no samples and seconds"):
        draw_losses([tmp_path], tmp_path / "loss.png")
