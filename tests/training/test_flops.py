"""TFLOP/s of a run: of stacks and packs, in its log line and on its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bucketing import LatentSpec, Size
from hf_bucketing.batching.steps import Computed, Prediction
from hf_bucketing.planner.time import BatchCost, TrainingFlops
from hf_bucketing.planner.trackers import FlopCounter
from hf_bucketing.report.page import render_page
from hf_bucketing.runs.page import run_page
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.training import step_metrics
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.step_metrics import StepFlops, traced_sizes
from tests.training.training_cases import in_process, run

TFLOPS = {"model_tflops", "hardware_tflops"}
PACKED = {"batching": "pack", "max_tokens": 640, "strip_length": 16}
FLOPS = StepFlops(
    training=TrainingFlops(
        model=BatchCost(per_sample=5.0, linear=3.0, quadratic=2.0),
        recomputed=BatchCost(linear=1.0),
        base=BatchCost(linear=10.0),
    )
)


def test_a_pack_is_trained_for_the_sum_of_its_samples_and_computes_its_padding_too() -> None:
    counted = np.ones(2, np.bool_)
    alone = [FLOPS.of_batch(Computed(np.array([n])), counted[:1], base=False) for n in (10, 20)]
    model, hardware = FLOPS.of_batch(Computed(np.array([10, 20])), counted, base=False)
    assert (model, hardware) == tuple(np.sum(alone, 0)) == (10 + 90 + 2 * 500, 10 + 120 + 2 * 500)
    assert FLOPS.of_batch(Computed(np.array([10, 20]), padding=6), counted, base=False) == (model, hardware + 4 * 6)
    assert FLOPS.of_batch(Computed(np.array([10, 20])), counted, base=True) == (model + 300, hardware + 300)


def test_samples_that_fill_a_batch_are_computed_but_not_trained() -> None:
    counted = np.array([True, False])
    model, hardware = FLOPS.of_batch(Computed(np.array([10, 20])), counted, base=False)
    assert model == 5 + 30 + 200
    assert hardware == 10 + 120 + 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="stack", marks=pytest.mark.slow),
        pytest.param(
            {"lora_rank": 2, "gradient_checkpointing": True}, id="stack-lora-checkpoints", marks=pytest.mark.every
        ),
        pytest.param(PACKED, id="pack", marks=pytest.mark.slow),
        pytest.param({**PACKED, "token_drop_rate": 0.5}, id="pack-token-drop"),
    ],
)
def test_logged_operations_are_those_that_the_steps_compute(
    settings: dict, pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path, log_tflops=True, **settings))
    computed: list[float] = []
    predict, backward, counter = type(trainer.step)._predict, trainer.accelerator.backward, FlopCounter()

    def counted_forward(*args: Any) -> Prediction:
        with counter:
            return predict(*args)

    def counted_backward(loss: torch.Tensor) -> None:
        with counter:
            backward(loss)
        computed.append(counter.flops.hardware - sum(computed))

    monkeypatch.setattr(type(trainer.step), "_predict", counted_forward)
    monkeypatch.setattr(trainer.accelerator, "backward", counted_backward)
    trainer.run()
    lines = read_log(tmp_path, "losses")
    assert all(computed)
    logged = [line["hardware_tflops"] * 1e12 * line["seconds"] for line in lines]
    assert logged == pytest.approx(computed, rel=0.03)
    for line in lines:
        assert 0 < line["model_tflops"] < line["hardware_tflops"]
        assert not {"mfu", "hfu"} & line.keys(), "the peak of a CPU is not known"


@pytest.mark.slow
def test_a_run_shows_its_share_of_the_peak_on_its_page(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_metrics, "_peak_of", lambda accelerator: 0.5)
    run(in_process(pipeline_dir, prepared_dir, tmp_path, log_tflops=True))
    for line in read_log(tmp_path, "losses"):
        assert line["mfu"] == pytest.approx(line["model_tflops"] / 0.5)
        assert line["hfu"] == pytest.approx(line["hardware_tflops"] / 0.5)
    page = render_page(run_page([tmp_path]))
    assert "Useful TFLOP/s per process" in page
    assert "Hardware TFLOP/s per process" in page
    assert "% of the peak)" in page


@pytest.mark.slow
def test_operations_are_counted_on_gpus_alone_unless_asked_for(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    run(in_process(pipeline_dir, prepared_dir, tmp_path))
    assert not any(TFLOPS & line.keys() for line in read_log(tmp_path, "losses"))
    assert "TFLOP/s" not in render_page(run_page([tmp_path]))


def test_a_model_that_cannot_be_traced_trains_without_them(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no shapes")

    monkeypatch.setattr(step_metrics, "training_flops", fail)
    run(in_process(pipeline_dir, prepared_dir, tmp_path, log_tflops=True))
    assert "No TFLOP/s are logged, as operations are not counted: RuntimeError: no shapes" in caplog.text
    assert not any(TFLOPS & line.keys() for line in read_log(tmp_path, "losses"))


@pytest.mark.slow
def test_losses_are_those_of_a_run_without(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    with_them, without = (
        run(in_process(pipeline_dir, prepared_dir, tmp_path / str(wanted), log_tflops=wanted, **PACKED))
        for wanted in (True, False)
    )
    assert with_them == without


def test_sizes_that_a_model_refuses_are_not_traced() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
    only = Size(1, 64, 96)
    assert traced_sizes([only], spec, refused=lambda size: size != only) == [only]
    several = [Size(1, 32, 32), Size(1, 64, 96), Size(5, 64, 96), Size(9, 64, 96)]
    assert traced_sizes(several[::-1], spec, refused=lambda size: True) == several
