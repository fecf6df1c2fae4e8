"""With a fused optimizer, a step is read after the next one is launched: nothing else differs."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.batching.steps import StepLosses
from hf_bucketing.errors import Interrupted
from hf_bucketing.models.loading import MODEL_PARTS
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.runs.run_log import log_path, read_log, read_status
from hf_bucketing.training import TrainingConfig, loop
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.trained import TrainedModel, add_trained_parts
from tests.conftest import as_flags
from tests.devices import Device
from tests.training.test_experts import LORA, expert_dir
from tests.training.test_steps_on_a_device import AT_THE_END, TIMES
from tests.training.training_cases import BATCHING, in_process, train
from tests.waits import Waits

__all__ = ["expert_dir"]

FUSED = {
    "torch.optim:AdamW": [],
    "torch.optim:Adam": ["amsgrad=true"],
    "torch.optim:SGD": ["momentum=0.9", "dampening=0.1"],
    "torch.optim:Adagrad": [],
}


class SpoiledTrainer(Trainer):
    """A run that notes when its steps are read, some of which have NaN among their gradients."""

    spoiled: frozenset[int] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events: list[str] = []

    def _train_on(self, *args: Any, **options: Any) -> StepLosses:
        self.events.append(f"launch {self.launched + 1}")
        losses = super()._train_on(*args, **options)
        if self.launched + 1 in self.spoiled:
            for weight in self.trained.weights[self.step.recipe.trained]:
                weight.grad.mul_(math.nan)
        return losses

    def _settle(self) -> None:
        if self.open is not None:
            self.events.append(f"read {self.global_step + 1}")
        super()._settle()


def result_of(folder: Path) -> dict[str, Any]:
    """Return what a run leaves, but for times: the lines of its logs and its weights."""

    def timeless(line: dict[str, Any]) -> dict[str, Any]:
        return {name: repr(value) for name, value in line.items() if "second" not in name}

    logs = {name: [*map(timeless, read_log(folder, name))] for name in ("losses", "skipped", "plans", "validation")}
    files = {path.relative_to(folder): path for path in folder.rglob("*.safetensors")}
    weights = {f"{file} {name}": value for file, path in files.items() for name, value in load_file(path).items()}
    averages = {
        f"{path.relative_to(folder)} {number}": value
        for path in folder.rglob("custom_checkpoint_*.pkl")
        for number, value in enumerate(torch.load(path, weights_only=False).get("shadow_params", ()))
    }
    return {**logs, "samples": log_path(folder, "samples").read_text(), "weights": {**weights, **averages}}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    weights, others = result.pop("weights"), expected.pop("weights")
    assert result == expected
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def run(config: TrainingConfig) -> tuple[list[str], dict[str, Any]]:
    """Train, and return when steps were launched and read, and what the run leaves."""
    trainer = SpoiledTrainer(config)
    trainer.run()
    return trainer.events, result_of(Path(config.output_dir))


def settings_of(optimizer: str, **settings: Any) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "optimizer_args": ["fused=true", *FUSED[optimizer]],
        "lora_rank": 2,
        "ema_decay": 0.5,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 2,
        "max_train_steps": 5,
        **settings,
    }


@pytest.mark.parametrize(
    ("optimizer", "spoiled"),
    [
        pytest.param("torch.optim:AdamW", {3}, marks=pytest.mark.slow),
        *(pytest.param(name, {1, 3}, marks=pytest.mark.every) for name in FUSED),
    ],
)
def test_a_step_is_read_after_the_next_one_is_launched_and_nothing_else_differs(
    optimizer: str, spoiled: set[int], pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is read before it: fused SGD would leave momentum buffers unset if it omitted that one."""
    settings = settings_of(optimizer, max_train_steps=4, gradient_accumulation_steps=2)
    monkeypatch.setattr(SpoiledTrainer, "spoiled", frozenset(spoiled))
    events, result = run(in_process(pipeline_dir, prepared_dir, tmp_path / "late", **settings))
    first = 2 if 1 in spoiled else 1
    read_after = {step: step if step <= first else min(step + 1, 4) for step in range(1, 5)}
    assert events == [
        event
        for launched in range(1, 5)
        for event in (
            *[f"launch {launched}"] * 2,
            *(f"read {step}" for step in read_after if read_after[step] == launched),
        )
    ]
    monkeypatch.setattr(TrainedModel, "reads_late", lambda *_: False)
    events, expected = run(in_process(pipeline_dir, prepared_dir, tmp_path / "before", **settings))
    assert events == [f"{what} {step}" for step in range(1, 5) for what in ("launch", "launch", "read")]
    assert_same(result, expected)
    assert [line["global_step"] for line in expected["skipped"]] == [repr(step) for step in sorted(spoiled)]


@pytest.mark.slow
def test_a_signal_is_obeyed_after_the_step_that_is_open_and_the_run_goes_on_as_if_it_had_not_been(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    settings = settings_of("torch.optim:AdamW", checkpointing_steps=4, checkpoints_total_limit=1)
    events, whole = run(in_process(pipeline_dir, prepared_dir, tmp_path / "whole", **settings))
    assert events.index("read 4") < events.index("launch 5"), "a checkpoint holds finished steps"
    stopped = SpoiledTrainer(in_process(pipeline_dir, prepared_dir, tmp_path / "parts", **settings))
    train_on = stopped._train_on

    def signalled(*args: Any, **options: Any) -> Any:
        if stopped.launched == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_on(*args, **options)

    stopped._train_on = signalled  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match=r"step 3 of 5 \(SIGTERM\); checkpoint-3 is saved"):
        stopped.run()
    assert stopped.events[-3:] == ["launch 3", "read 2", "read 3"]
    resumed = in_process(pipeline_dir, prepared_dir, tmp_path / "parts", **settings, resume_from_checkpoint="latest")
    assert_same(run(resumed)[1], whole)


def test_too_many_skipped_steps_end_the_run_with_the_same_error_and_finite_weights(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpoiledTrainer, "spoiled", frozenset({2, 3}))
    trainer = SpoiledTrainer(
        in_process(pipeline_dir, prepared_dir, tmp_path, **settings_of("torch.optim:AdamW", max_skipped_steps=1))
    )
    with pytest.raises(BucketingError, match=r"step 3 .*grad_norm nan, the last of 2 such steps in a row"):
        trainer.run()
    assert trainer.events[-3:] == ["read 2", "launch 4", "read 3"]
    assert all(weight.isfinite().all() for weight in trainer.trained.weights["transformer"])
    assert [line.get("skipped", False) for line in read_log(tmp_path, "losses")] == [False, True]
    assert read_status(tmp_path).items() >= {"status": "failed", "global_step": 2}.items()


@pytest.mark.slow
def test_what_is_due_after_a_step_comes_after_it_was_read(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    losses = {"validation_split": 0.1, "validation_loss_steps": 3, "validation_noise_levels": 1}
    renderings = {"validation_prompts": ["red"], "validation_sizes": "1,32,32", "validation_steps": 4}
    due = {**losses, **renderings, "validation_inference_steps": 1, "page_steps": 5}
    settings = settings_of("torch.optim:SGD", max_train_steps=6, **due)
    events, _ = run(in_process(pipeline_dir, prepared_dir, tmp_path, **settings))
    at_once = [step for step in range(1, 6) if events.index(f"read {step}") < events.index(f"launch {step + 1}")]
    assert at_once == [1, 3, 4, 5]


@pytest.mark.slow
def test_the_loop_waits_for_its_device_once_per_step_and_then_for_a_step_that_is_over(
    device: Device, pipeline_dir, cached_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of("torch.optim:AdamW", max_train_steps=3, ema_decay=None)

    def run_there(name: str) -> tuple[list[str], list[list[float]]]:
        config = in_process(pipeline_dir, cached_dir, tmp_path / name, **settings)
        with on_device(device, config, monkeypatch) as (trainer, waits):
            trainer._finish = lambda: None  # type: ignore[method-assign]
            trainer.run()
            waits.check({TIMES}, counted=dict.fromkeys(AT_THE_END, 3))
        losses = read_log(tmp_path / name, "losses")
        return trainer.events, [[line[name] for name in ("train_loss", "grad_norm", "lr")] for line in losses]

    late, metrics = run_there("late")
    assert late == ["launch 1", "read 1", "launch 2", "launch 3", "read 2", "read 3"]
    monkeypatch.setattr(TrainedModel, "reads_late", lambda *_: False)
    at_once, expected = run_there("at once")
    assert at_once == [f"{what} {step}" for step in range(1, 4) for what in ("launch", "read")]
    assert np.array(metrics) == pytest.approx(np.array(expected), rel=device.rounding, abs=0)


@contextmanager
def on_device(
    device: Device, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SpoiledTrainer, Waits]]:
    """Return a run that computes on a device after its weights are loaded, and what waits for it."""
    entered: list[Waits] = []
    with monkeypatch.context() as patch, ExitStack() as stack:

        def added(recipe: Recipe, config: TrainingConfig, accelerator: Accelerator) -> TrainingConfig:
            config = add_trained_parts(recipe, config, accelerator)
            for module in recipe.modules(*MODEL_PARTS):
                device.move_module(module)
            for state in (PartialState, AcceleratorState):
                state._shared_state["device"] = device.device
            accelerator.dataloader_config.non_blocking = True  # as where there is a GPU
            entered.append(stack.enter_context(device.recording()))
            return config

        patch.setattr(loop, "add_trained_parts", added)
        patch.setattr(
            sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: [device.device.type]
        )
        trainer = SpoiledTrainer(config)
        entered[0].clear()
        yield trainer, entered[0]
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_both_experts_are_read_late_after_their_first_updates(
    expert_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of("torch.optim:AdamW", **LORA, weighting_scheme="uniform", shift=5.0, max_train_steps=7)
    monkeypatch.setattr(SpoiledTrainer, "spoiled", frozenset({5}))
    events, late = run(in_process(expert_dir, prepared_dir, tmp_path / "late", **settings))
    experts = [line["expert"] for line in late["losses"]]
    first = [experts.index(expert) + 1 for expert in set(experts)]
    at_once = [step for step in range(1, 7) if events.index(f"read {step}") < events.index(f"launch {step + 1}")]
    assert sorted(at_once) == sorted(first)
    monkeypatch.setattr(TrainedModel, "reads_late", lambda *_: False)
    assert_same(late, run(in_process(expert_dir, prepared_dir, tmp_path / "at once", **settings))[1])


@pytest.mark.every
def test_two_processes_read_late_what_they_read_at_once(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    """A page after each step makes a run read each of them before the next one."""
    flags = (*BATCHING["pack"], *as_flags(**settings_of("torch.optim:AdamW", max_train_steps=3)))
    train(pipeline_dir, prepared_dir, tmp_path / "late", *flags)
    train(pipeline_dir, prepared_dir, tmp_path / "at once", *flags, "--page_steps", 1)
    late, at_once = (result_of(tmp_path / name) for name in ("late", "at once"))
    assert len(late["losses"]) == 3
    assert_same(late, at_once)
