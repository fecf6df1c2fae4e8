"""Ctrl-C and SIGTERM while training: the step ends and is saved, and the run goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_bucketing.command_line.script import StopSignals
from hf_bucketing.errors import Interrupted
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import log_path, read_status
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process, run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_does_what_it_does_outside(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda *_: seen.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            assert (signals.number, seen) == (number, [])
            os.kill(os.getpid(), number)
            assert seen == [number]
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


def test_what_a_launcher_repeats_at_once_is_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    seconds = 100.0
    monkeypatch.setattr("hf_bucketing.command_line.script.time", SimpleNamespace(monotonic=lambda: seconds))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with StopSignals():
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            seconds += 60
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "lora_rank"), [(signal.SIGTERM, 2), pytest.param(signal.SIGINT, None, marks=pytest.mark.slow)]
)
def test_a_stopped_run_saves_its_place_and_goes_on_as_if_it_had_not_been(
    number: signal.Signals, lora_rank: int | None, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = {"max_train_steps": 4, "gradient_accumulation_steps": 2, "lora_rank": lora_rank, "ema_decay": 0.9}
    expected = run(in_process(pipeline_dir, prepared_dir, whole, **settings))
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, parts, **settings))
    train_on = trainer._train_on

    def signalled(*args, **options):
        if trainer.global_step == 1:
            trainer._train_on = train_on  # type: ignore[method-assign]
            os.kill(os.getpid(), number)
        return train_on(*args, **options)

    trainer._train_on = signalled  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"step 2 of 4 \(SIG\w+\); checkpoint-2.* --resume_from_checkpoint") as error:
        trainer.run()
    assert error.value.number == number
    assert read_status(parts).items() >= {"status": "interrupted", "global_step": 2, "max_train_steps": 4}.items()
    assert (parts / "pytorch_lora_weights.safetensors").exists() == (lora_rank is not None)
    assert not (parts / "run.lock").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = in_process(pipeline_dir, prepared_dir, parts, **settings, resume_from_checkpoint="latest")
    assert run(resumed) == pytest.approx(expected, abs=1e-6)
    assert log_path(parts, "samples").read_text() == log_path(whole, "samples").read_text()
    assert read_status(parts).items() >= {"status": "finished", "global_step": 4, "max_train_steps": 4}.items()


def test_a_folder_that_another_run_writes_is_refused_before_weights_are_loaded(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out")
    trainer = Trainer(config)
    refused = pytest.raises(ValueError, match=f"The run in .* is written by process {os.getpid()} on host")
    train_on = trainer._train_on

    def meanwhile(*args, **options):
        with refused:
            Trainer(config)
        return train_on(*args, **options)

    trainer._train_on = meanwhile  # type: ignore[method-assign]
    trainer.run()
    assert len(losses_of(tmp_path / "out")) == 3
