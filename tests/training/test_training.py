"""Training as a user starts it: two processes, both ways of batching, resuming, and what stock diffusers loads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState

from hf_bucketing import BucketingError, LatentSpec
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.commands.report_data import kept_of
from hf_bucketing.media import MediaSource, probe
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of, review_run
from tests.conftest import launch, run_script_here
from tests.training.training_cases import BATCHING, TINY_WAN, count_samples, in_process, run, train


@pytest.mark.parametrize("flags", [
    pytest.param(BATCHING["bucket"], id="bucket", marks=pytest.mark.slow),
    pytest.param(BATCHING["pack"], id="pack", marks=pytest.mark.every),
])  # fmt: skip
def test_two_processes_see_every_sample_once_in_equal_steps(flags, pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    result = train(pipeline_dir, prepared_dir, tmp_path / "out", *flags, "--num_train_epochs", 2)
    assert "Num processes = 2" in result.stderr
    assert "100%" in result.stderr
    plans = Logs(tmp_path / "out").first_plans
    epochs = count_samples(tmp_path / "out")
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    for epoch in epochs:
        plan = plans[epoch.epoch]
        assert plan["num_processes"] == 2
        assert epoch.seen == plan["kept"] >= 20 - 1
        assert epoch.repeated == 0
        assert epoch.steps == (plan["num_steps"],) * 2
        if "bucket" in flags:
            assert epoch.mixed_steps == plan["num_mixed_steps"]
            assert plan["kept_area"] == kept_of(PreparedDataset.load(prepared_dir)), "the figure of the page of data"
    assert review_run(Logs(tmp_path / "out"), min_fall=-1).passed
    assert len(losses_of(tmp_path / "out")) == sum(plan["num_steps"] for plan in plans.values())
    check_stock_diffusers_samples(tmp_path / "out", tmp_path / "clip.mp4")


def check_stock_diffusers_samples(pipeline: Path, clip: Path) -> None:
    parts = json.loads((pipeline / "model_index.json").read_text()).values()
    assert {part[0] for part in parts if isinstance(part, list) and part[0]} == {"diffusers", "transformers"}
    flags = ("--num_frames", 5, "--num_inference_steps", 2, "--max_sequence_length", 32)
    run_script_here("sample_video.py", pipeline, "--output", clip, *flags)
    assert probe(MediaSource.from_cell(str(clip)))[:3] == (112, 64, 5)


@pytest.mark.slow
def test_gradient_checkpointing_bf16_and_a_tracker(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    def losses(name: str, **settings: object) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        pack = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 1}
        return run(in_process(pipeline_dir, prepared_dir, tmp_path / name, **pack, **settings))

    plain = losses("plain")
    checkpointing = losses("checkpointing", gradient_checkpointing=True, report_to="tensorboard")
    assert checkpointing == pytest.approx(plain, abs=1e-5)
    assert list((tmp_path / "checkpointing" / "logs").rglob("events.out.tfevents*"))
    assert 0 < max(np.abs(np.subtract(losses("bf16", mixed_precision="bf16"), plain))) < 0.1


@pytest.mark.slow
def test_ddp_is_gone_before_its_process_group_is_destroyed(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    """The other way round, a process hangs at its end once in some hundred runs: see Trainer._finish."""
    script = tmp_path / "count_ddp.py"
    script.write_text("""
import gc, sys
import torch, accelerate
from hf_bucketing.training import TrainingConfig, train

original = accelerate.Accelerator.end_training

def end_training(self):
    alive = sum(isinstance(one, torch.nn.parallel.DistributedDataParallel) for one in gc.get_objects())
    print(f"{self.num_processes} processes, {alive} left", flush=True)
    original(self)

accelerate.Accelerator.end_training = end_training
model, data, output = sys.argv[1:]
train(TrainingConfig.from_flat(
    pretrained_model_name_or_path=model, dataset_dir=data, output_dir=output, max_train_steps=2, train_batch_size=2,
    max_sequence_length=32, report_to="none", dataloader_num_workers=0,
))
""")
    result = launch(script, pipeline_dir, prepared_dir, tmp_path / "out")
    assert result.stdout.count("2 processes, 0 left") == 2


@pytest.mark.parametrize(("flags", "message"), [
    (("--batching", "pack"), "Packing needs --max_tokens"),
    (("--train_batch_size", 0), "--train_batch_size must be at least 1"),
    (("--dataset_dir", "nowhere"), "nowhere holds no bucketing.json"),
])  # fmt: skip
def test_mistakes_in_the_flags_end_in_one_line(
    flags, message: str, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    result = run_script_here(
        "train_text_to_video.py",
        *flags,
        pretrained_model_name_or_path=pipeline_dir,
        dataset_dir=prepared_dir,
        output_dir=tmp_path / "out",
        report_to="none",
        check=False,
    )
    assert result.returncode == 1
    assert message in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "model_index.json").exists()


@pytest.mark.slow
def test_more_processes_than_samples_are_an_error(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    data = PreparedDataset.load(prepared_dir)
    dataclasses.replace(data, dataset=data.dataset.select([0])).save(tmp_path / "one")
    result = train(pipeline_dir, tmp_path / "one", tmp_path / "out", *BATCHING["bucket"], check=False)
    assert result.returncode
    assert "do not fill one step of 2 processes" in result.stderr


def test_a_data_set_of_another_model_is_refused(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    from hf_bucketing.batching.rows import make_data

    config = in_process(pipeline_dir, prepared_dir, tmp_path)
    with pytest.raises(BucketingError, match="prepare it again"):
        make_data(config, LatentSpec(temporal_stride=8, spatial_stride=32), TINY_WAN)
