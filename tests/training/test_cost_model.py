"""A run measures what tokens cost, and a later run plans by it."""

from __future__ import annotations

import itertools
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError, PlanError
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.buckets import CostFit
from hf_bucketing.runs.review import read_log
from hf_bucketing.runs.run_log import COST_MODEL
from hf_bucketing.settings import changed
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.step_metrics import StepMetrics
from tests.training.training_cases import in_process, run

PACKED = {"batching": "pack", "max_tokens": 400, "strip_length": 1}
LINEAR, QUADRATIC, PER_BATCH = 1e-3, 2e-4, 0.5


@pytest.fixture
def measured(monkeypatch) -> None:
    """Let a step take the time that its samples would take on another machine; some wait for data meanwhile."""
    now, steps, take = [time.perf_counter()], itertools.count(), PackStep.__call__

    def timed(step, transformer, batch, *, epoch):
        tokens = np.array([frames * height * width for frames, height, width in map(step_grid, batch["size"])])
        stalled = next(steps)
        now[0] += LINEAR * tokens.sum() + QUADRATIC * (tokens**2).sum() + PER_BATCH + 9.0 * (stalled % 7 == 0)
        return take(step, transformer, batch, epoch=epoch)

    def media(recipe, batch):  # in place of the VAE, which takes most of the time of so small a model
        return {"latents": [torch.ones(4, *np.multiply(step_grid(size), (1, 2, 2))) for size in batch["size"]]}

    monkeypatch.setattr("hf_bucketing.batching.drawing.media_of", media)
    monkeypatch.setattr(PackStep, "__call__", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])


def step_grid(size: tuple[int, int, int]) -> tuple[int, int, int]:
    frames, height, width = size
    return (frames - 1) // 4 + 1, height // 16, width // 16


def written(config: TrainingConfig) -> CostFit:
    return CostFit.from_json((Path(config.output_dir) / COST_MODEL).read_text())


@pytest.mark.every
def test_a_run_writes_what_its_steps_cost_at_checkpoints_and_at_the_end(
    measured, pipeline_dir, prepared_dir, tmp_path: Path, caplog
) -> None:
    caplog.set_level(logging.INFO)
    config = in_process(
        pipeline_dir, prepared_dir, tmp_path / "out", **PACKED, max_train_steps=24, checkpointing_steps=24
    )
    run(config)
    fit = written(config)
    assert (fit.linear, fit.quadratic, fit.per_batch) == pytest.approx((LINEAR, QUADRATIC, PER_BATCH), rel=1e-3)
    assert (fit.residual, fit.num_steps) == (pytest.approx(0, abs=1e-3), 24)
    assert sum("Measured cost: " in message for message in caplog.messages) == 1, "at the end"

    (tmp_path / "out" / COST_MODEL).unlink()
    resumed = changed(config, max_train_steps=25, resume_from_checkpoint="latest")
    run(resumed)
    assert written(resumed).num_steps == 25, "the steps before the checkpoint count"


def test_a_run_of_few_steps_says_why_it_leaves_no_cost_model_and_removes_that_of_an_earlier_one(
    pipeline_dir, prepared_dir, tmp_path: Path, caplog
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / COST_MODEL).write_text("{}")
    run(in_process(pipeline_dir, prepared_dir, tmp_path, max_train_steps=2))
    assert not (tmp_path / COST_MODEL).exists()
    assert any("No cost_model.json is written yet: A cost model is fitted to at least 20 steps, got 2" in message
               for message in caplog.messages)  # fmt: skip


@pytest.mark.slow
def test_the_log_measures_the_process_of_the_largest_cost_over_all_batches_of_a_step(
    measured, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    config = in_process(
        pipeline_dir, prepared_dir, tmp_path, **PACKED, max_train_steps=2, gradient_accumulation_steps=2
    )
    trainer = Trainer(config)
    trainer.run()
    plan = trainer.data.sampler.plan(0)
    for line, first in zip(read_log(tmp_path, "losses"), (0, 2), strict=True):
        tokens = np.concatenate([trainer.data.num_tokens[plan.batch(step)] for step in (first, first + 1)])
        pairs = int((tokens**2).sum())
        stalls = 9.0 * (first == 0)
        assert (line["busy_batches"], line["busy_tokens"], line["busy_token_pairs"]) == (2, tokens.sum(), pairs)
        expected = LINEAR * tokens.sum() + QUADRATIC * pairs + 2 * PER_BATCH + stalls
        assert line["busy_seconds"] == pytest.approx(expected, rel=1e-5)
        assert line["seconds"] >= line["busy_seconds"] * (1 - 1e-6)


@pytest.mark.slow
def test_a_later_run_plans_by_the_costs_that_an_earlier_one_measured(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    steep = CostFit(linear=0.0, quadratic=1e-6, per_batch=0.0, residual=0.0, num_steps=100)
    flat = CostFit(linear=1e-3, quadratic=0.0, per_batch=0.0, residual=0.0, num_steps=100)
    first, samplers = {}, []
    for name, fit in (("steep", steep), ("flat", flat)):
        path = tmp_path / f"{name}.json"
        path.write_text(fit.to_json())
        packed = {**PACKED, "balance": "cost", "longest_first": True}
        trainer = Trainer(
            in_process(pipeline_dir, prepared_dir, tmp_path / name, **packed, cost_model=str(path), seed=3)
        )
        data = trainer.data
        assert data.cost_model == data.sampler.config.cost_model == fit.model
        plan = data.sampler.plan(0)
        costs = fit.model.pack_cost(data.num_tokens[plan.indices], plan.offsets)
        assert costs[0] == costs.max(), "longest_first goes by the measured cost"
        first[name] = sorted(plan.batch(0).tolist())
        samplers.append(data.sampler)
        trainer.release()
    assert first["steep"] != first["flat"], "the plan changes with the file"
    with pytest.raises(PlanError, match="cost_model was CostModel"):
        samplers[1].load_state_dict(samplers[0].state_dict())


def test_of_several_processes_the_costliest_is_measured() -> None:
    """The others wait for it, so that their time says nothing about their own samples."""
    others = torch.zeros(2 + 1 + 2 * 10 + 8)
    others[-8:] = torch.tensor([3.0, 900.0, 810_000.0, 1.0, 810_000.0, 0.0, 0.0, 2.0])  # one sample of 900 tokens
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda mine: torch.cat([mine, others[None]]))
    metrics = StepMetrics(cast("Any", accelerator), max_tokens=None)

    def step() -> list[float]:
        for tokens in (np.array([100, 200]), np.array([300])):
            ones = torch.ones(len(tokens))
            metrics.add(ones, ones / 2, weights=ones, tokens=tokens, cost=float((tokens**2).sum()))
        entry, _ = metrics.finish(seconds=lambda: 2.5).read()
        return [entry[name] for name in ("busy_seconds", "busy_tokens", "busy_token_pairs", "busy_batches")]

    assert step() == [2.0, 900, 810_000.0, 1]
    others.zero_()
    assert step() == [2.5, 600, 140_000.0, 2], "the sums over the batches of this process"


@pytest.mark.parametrize(("cost", "known"), [(1.0, True), (9.0, False)])
def test_a_step_that_is_read_late_has_the_time_of_its_own_process_alone(cost: float, known: bool) -> None:
    def gather(mine: torch.Tensor) -> torch.Tensor:
        assert mine[0, -1].isnan(), "nothing waits for the device before the processes exchange what they have"
        other = mine.clone()
        other[0, -6] = cost
        return torch.cat([mine, other])

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=gather, process_index=0)
    metrics = StepMetrics(cast("Any", accelerator), max_tokens=None)
    ones = torch.ones(1)
    metrics.add(ones, ones / 2, weights=ones, tokens=np.array([100]), cost=4.0)
    entry, _ = metrics.finish(seconds=lambda: 2.5, late=True).read()
    assert entry.get("busy_seconds") == (2.5 if known else None)
    assert (entry["busy_tokens"], entry["imbalance"]) == (100, max(cost, 4.0) / ((4.0 + cost) / 2))


@pytest.mark.parametrize(("content", "message"), [
    (None, "is no cost model"),
    ("no json", "Expected a cost model"),
    (json.dumps({"version": 1, "linear": -1}), "residual"),
])  # fmt: skip
def test_a_bad_cost_model_ends_a_run_before_any_weights_are_loaded(
    content: str | None, message: str, prepared_dir, pipeline_dir, tmp_path: Path, monkeypatch
) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("hf_bucketing.models.recipe.Recipe.load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(BucketingError, match=message) as error:
        Trainer(in_process(pipeline_dir, prepared_dir, tmp_path / "out", cost_model=str(path)))
    assert str(path) in str(error.value)


def test_a_run_does_not_plan_by_the_file_that_it_replaces(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="which this run replaces"):
        in_process(pipeline_dir, prepared_dir, tmp_path, cost_model=str(tmp_path / "logs" / ".." / COST_MODEL))
