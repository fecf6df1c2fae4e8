"""Optimizer steps whose loss or gradients are not finite change no weights, and too many of them end the run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.batching.steps import StepLosses
from hf_bucketing.runs.logs import StepLog
from hf_bucketing.runs.review import losses_of, running_mean, summarise_losses
from hf_bucketing.runs.run_log import read_log, read_status
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.optimizer_steps import SkippedSteps, check_finite
from hf_bucketing.training.step_metrics import StepMetrics
from tests.training.training_cases import in_process

ADAPTERS = {"lora_rank": 2, "ema_decay": 0.5, "checkpointing_steps": 1, "checkpoints_total_limit": 1}


def spoiled(pipeline: Path, prepared: Path, output: Path, *, steps: set[int], what: str, **settings: Any) -> Trainer:
    """Make a run whose gradients, or whose losses of a second sample, are NaN in some optimizer steps."""
    trainer = Trainer(in_process(pipeline, prepared, output, **ADAPTERS, **settings))
    step: Any = trainer.step

    class Spoiled(type(step)):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> StepLosses:
            losses = super().__call__(*args, **options)
            values = losses.values
            if trainer.launched + 1 in steps and what == "gradient":
                values.register_hook(lambda gradient: gradient * math.nan)
            elif trainer.launched + 1 in steps:
                values = values * torch.tensor([1.0, math.nan])[: len(values)]
            return losses._replace(values=values)

    step.__class__ = Spoiled
    return trainer


@pytest.mark.cases(fast=("loss",), slow=("*",))
@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_no_weights_and_is_named(
    what: str, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    trainer = spoiled(pipeline_dir, prepared_dir, tmp_path / "out", steps={2}, what=what)
    before: dict[int, list[torch.Tensor]] = {}
    finish = trainer._finish_step

    def note() -> None:
        (weights,), (ema,) = trainer.trained.weights.values(), trainer.trained.ema.values()
        before[trainer.launched] = [weight.detach().clone() for weight in (*weights, *ema.shadow_params)]
        finish()

    trainer._finish_step = note  # type: ignore[method-assign]
    trainer.run()
    assert all(torch.equal(*pair) for pair in zip(before[1], before[2], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(before[2], before[3], strict=True))
    saved = load_file(tmp_path / "out" / "pytorch_lora_weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    lines = read_log(tmp_path / "out", "losses")
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    assert math.isnan(lines[1]["grad_norm"])
    assert lines[0]["grad_norm"] > 0
    (skipped,) = read_log(tmp_path / "out", "skipped")
    (samples,) = [line for line in read_log(tmp_path / "out", "samples-0") if line["batch"] == 1]
    assert (skipped["global_step"], skipped["index"]) == (2, sorted(samples["index"]))
    assert skipped["not_finite"] == ([samples["index"][1]] if what == "loss" else [])
    assert (
        read_status(tmp_path / "out").items() >= {"status": "finished", "global_step": 3, "max_train_steps": 3}.items()
    )


def test_too_many_in_a_row_end_the_run_and_keep_the_good_checkpoint(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    trainer = spoiled(
        pipeline_dir, prepared_dir, tmp_path / "out", steps={2, 3, 4}, what="gradient",
        max_train_steps=6, max_skipped_steps=1,
    )  # fmt: skip
    with pytest.raises(BucketingError, match=r"step 3 .* has train_loss .* grad_norm nan, the last of 2 .*rows \d"):
        trainer.run()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    saved = load_file(tmp_path / "out" / "checkpoint-2" / "pytorch_lora_weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()
    assert len(losses_of(tmp_path / "out")) == 2
    assert (
        read_status(tmp_path / "out").items() >= {"status": "failed", "global_step": 2, "max_train_steps": 6}.items()
    )


def test_a_run_without_one_finite_step_saves_no_result(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    trainer = spoiled(pipeline_dir, prepared_dir, tmp_path / "out", steps={1}, what="gradient", max_train_steps=1)
    with pytest.raises(BucketingError, match="in all 1 optimizer steps, so nothing was learned"):
        trainer.run()
    assert not (tmp_path / "out" / "pytorch_lora_weights.safetensors").exists()


def test_weights_that_are_not_finite_are_neither_saved_nor_rotate_a_good_checkpoint(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **ADAPTERS))
    step = trainer.trained.optimizer.step

    def spoil() -> None:
        step()
        if trainer.global_step == 1:
            trainer.trained.weights["transformer"][0].data[0, 0] = math.inf

    trainer.trained.optimizer.step = spoil
    with pytest.raises(BucketingError, match=r"2 of 128 .* not finite, so checkpoint-2 is not saved and earlier ones"):
        trainer.run()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


def test_weights_are_checked_whatever_their_shape() -> None:
    accelerator = Accelerator(cpu=True)
    good = [torch.zeros(2, 3), torch.zeros(0), torch.tensor(1.0, dtype=torch.bfloat16)]
    check_finite(good, accelerator, what="nothing")
    check_finite([], accelerator, what="nothing")
    with pytest.raises(BucketingError, match="1 of 4 trained tensors"):
        check_finite([*good, torch.tensor([0.0, -math.inf])], accelerator, what="nothing")


def test_all_processes_decide_by_the_largest_norm_and_the_first_signal() -> None:
    """Process 1 has a NaN norm and a signal, process 0 neither."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        other = mine.clone()
        other[0, :2] = torch.tensor([math.nan, 15.0])
        return torch.cat([mine, other])

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=gather)
    metrics = StepMetrics(cast("Any", accelerator), max_tokens=None)
    ones = torch.ones(1)
    metrics.add(ones, ones / 2, weights=ones, tokens=np.array([4]), cost=1.0)
    pending = metrics.finish(seconds=lambda: 1.0, grad_norm=torch.tensor(0.5))
    entry, _ = pending.read()
    assert pending.found_inf() == 1.0
    assert math.isnan(entry["grad_norm"])
    assert entry["stop"] == 15


def steps_of_deepspeed(*, skipped: bool) -> SkippedSteps:
    accelerator: Any = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, optimizer_step_was_skipped=skipped, num_processes=1
    )
    return SkippedSteps(
        accelerator, limit=1, folder=Path("out"), name_rows=lambda rows: [f"row {row}" for row in rows]
    )


def test_deepspeed_which_steps_before_it_is_asked_may_skip_or_ends_the_run() -> None:
    Accelerator(cpu=True)  # for warnings
    finite, broken = {"train_loss": 1.0, "grad_norm": 2.0}, {"train_loss": math.nan}
    assert steps_of_deepspeed(skipped=False).check(1, finite, epoch=0, step=0) is None
    by_scaler = steps_of_deepspeed(skipped=True)
    by_scaler.add([7, 3], np.array([1.0, 2.0]), np.array([True, True]))
    assert by_scaler.check(1, finite, epoch=0, step=0) == {
        "epoch": 0, "step": 0, **finite, "index": [3, 7], "not_finite": [],
    }  # fmt: skip
    with pytest.raises(BucketingError, match="DeepSpeed has applied it, so nothing is saved"):
        steps_of_deepspeed(skipped=False).check(1, broken, epoch=0, step=0)


def test_losses_of_skipped_steps_are_left_out_of_means() -> None:
    losses = [math.nan, 4.0, *[3.0] * 17, 1.0, math.inf]
    assert summarise_losses(losses) == (4.0, 1.0)
    steps = StepLog(np.array([2.0, math.nan, 4.0]), np.array([1, 5, 1]), np.ones(3))
    assert running_mean(steps, window=6).tolist() == pytest.approx([math.nan, 2.0, 4.0], nan_ok=True)
