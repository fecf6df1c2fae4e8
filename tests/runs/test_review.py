"""Looking back at a run by its logs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_bucketing import BucketingError
from hf_bucketing.report.charts import save_charts
from hf_bucketing.runs.logs import Logs, StepLog
from hf_bucketing.runs.review import loss_charts, losses_by_bucket, review_run, running_mean, summarise_losses
from hf_bucketing.runs.run_log import RunLog
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
        logs[0].write_step("losses", step + 1, entry)
    return folder


def test_a_review_fails_on_each_thing_that_can_go_wrong(tmp_path: Path) -> None:
    flat, rising = [2.0] * 20, [2.0] * 10 + [4.0] * 10
    good = Logs(write_run(tmp_path / "good", flat))
    assert review_run(good).passed, "a model that is trained already hardly falls"
    assert not review_run(good, min_fall=1 / 3).passed
    for name, losses, shift in (("twice", flat, 1), ("rising", rising, 0)):
        review = review_run(Logs(write_run(tmp_path / name, losses, shift=shift)))
        assert [check.holds for check in review.checks].count(False) == 1, str(review)
        assert not review.passed
        assert "FAILED" in str(review)
    result = run_script_here("report_training.py", tmp_path / "rising", check=False)
    assert result.returncode == 1
    assert "FAILED  loss 2.0000 in the first tenth, 4.0000 in the last: 100% more" in result.stdout
    runs = [good, Logs(tmp_path / "rising")]
    save_charts(tmp_path / "loss.png", loss_charts(runs), columns=2)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BucketingError, match="at least ten optimizer steps"):
        summarise_losses([1.0] * 9)
    with pytest.raises(BucketingError, match="does not exist"):
        review_run(Logs(tmp_path))


def test_losses_by_bucket_are_means_over_the_second_half(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "losses.jsonl").write_text("")
    batches = [(0, 1, [9.0]), (1, 1, [9.0, 9.0]), (2, 1, [1.0, 3.0]), (3, 4, [5.0])]
    lines = [
        {"batch": b, "epoch": 0, "step": b, "bucket_id": i, "index": [0] * len(v), "loss": v} for b, i, v in batches
    ]
    for process in range(2):
        path = tmp_path / "logs" / f"samples-{process}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert losses_by_bucket(Logs(tmp_path)) == {1: (8, 5.5), 4: (2, 5.0)}


def write_losses(folder: Path, steps: StepLog) -> Path:
    (folder / "logs").mkdir(parents=True)
    names = ("train_loss", "samples", "seconds")
    lines = [dict(zip(names, map(float, step), strict=True)) for step in zip(*steps, strict=True)]
    (folder / "logs" / "losses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_of_unequal_steps_are_drawn_by_samples_and_by_time(tmp_path: Path) -> None:
    few = StepLog(np.full(60, 2.0), np.full(60, 2), np.full(60, 30.0))
    many = StepLog(np.full(20, 1.0), np.full(20, 12), np.full(20, 45.0))
    runs = [write_losses(tmp_path / "few", few), write_losses(tmp_path / "many", many)]
    charts = loss_charts([Logs(run) for run in runs])
    assert [chart.title for chart in charts] == ["Loss over samples seen", "Loss over training time in minutes"]
    for chart, ends in zip(charts, ([120, 240, 120, 240], [30, 15, 30, 15]), strict=True):
        axes = Figure().subplots()
        chart.draw(axes)
        assert [line.get_xdata()[-1] for line in axes.get_lines()] == ends, "single steps, then the running means"
        assert chart.note.startswith("Thick: running mean over 6 samples")
        assert [name for name, _ in chart.legend] == ["few", "many"]


def test_the_running_mean_is_over_samples_and_not_over_steps() -> None:
    steps = StepLog(np.array([4.0, 1.0, 2.0, 8.0]), np.array([1, 3, 1, 2]), np.ones(4))
    np.testing.assert_array_equal(running_mean(steps, window=4), [np.nan, 7 / 4, 5 / 4, 21 / 6])
    np.testing.assert_array_equal(running_mean(steps, window=1), steps.loss)
    assert np.isnan(running_mean(steps, window=8)).all()
