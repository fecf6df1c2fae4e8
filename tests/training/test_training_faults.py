"""The training script when files are broken, and when it goes on with another number of processes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from hf_bucketing import MediaError
from hf_bucketing.batching.rows import make_data
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.loaders import FaultRule
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.recount import recount
from hf_bucketing.runs.review import review_run
from hf_bucketing.settings import changed
from hf_bucketing.training import TrainingConfig
from tests.training.training_cases import BATCHING, TINY_WAN, count_samples, in_process, run, train


@pytest.fixture
def broken_dir(prepared_dir: Path, media_dir: Path, tmp_path: Path) -> Path:
    """The prepared data set after one of its files broke."""
    shutil.copytree(media_dir, tmp_path / "media")
    data = PreparedDataset.load(prepared_dir)
    dataclasses.replace(data, root=str(tmp_path / "media")).save(tmp_path / "broken")
    (tmp_path / "media" / "videos" / "0004.mp4").write_bytes(b"broken")
    return tmp_path / "broken"


def test_a_file_that_breaks_after_preparing_stops_training_by_name(pipeline_dir, broken_dir, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"0004\.mp4"):
        run(in_process(pipeline_dir, broken_dir, tmp_path / "out", max_train_steps=None))
    assert not (tmp_path / "out" / "model_index.json").exists()


@pytest.mark.slow
def test_an_unreadable_sample_is_replaced_and_logged(pipeline_dir, broken_dir, tmp_path: Path) -> None:
    flags = (*BATCHING["bucket"], "--num_train_epochs", 1, "--on_error", "replace", "--max_error_share", 0.05)
    train(pipeline_dir, broken_dir, tmp_path / "out", *flags)
    (line,) = map(json.loads, (tmp_path / "out" / "logs" / "unreadable.jsonl").read_text().splitlines())
    assert "0004.mp4" in line["reason"]
    (epoch,) = count_samples(tmp_path / "out")
    assert (epoch.repeated, len(set(epoch.steps))) == (1, 1)
    assert recount(Logs(tmp_path / "out")).replaced == 1
    assert review_run(Logs(tmp_path / "out"), min_fall=-1).passed
    assert "1 unreadable samples were replaced" in str(review_run(Logs(tmp_path / "out")))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| unreadable and replaced, in all epochs | 1 |" in card


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_settings_of_faults_reach_the_loader(batching: str, pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    config = TrainingConfig.from_flat(
        pretrained_model_name_or_path=str(pipeline_dir), dataset_dir=str(prepared_dir), output_dir=str(tmp_path),
        batching=batching, max_tokens=640, on_error="replace", max_errors=7, max_error_share=0.5,
        dataloader_timeout=33,
    )  # fmt: skip
    spec = PreparedDataset.load(prepared_dir).spec
    loader = make_data(config, spec, TINY_WAN).loader
    assert loader.timeout == 33
    replacements = loader.collate_fn.replacements
    assert replacements.faults == FaultRule(on_error="replace", max_errors=7, max_error_share=0.5)
    assert replacements.log == tmp_path / "logs" / "unreadable.jsonl"
    alone = make_data(changed(config, dataloader_num_workers=0, on_error="raise"), spec, TINY_WAN).loader
    assert (alone.timeout, alone.collate_fn.replacements) == (0, None)


@pytest.mark.every
def test_a_run_goes_on_with_another_number_of_processes_in_the_middle_of_an_epoch(
    pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    out, seen = tmp_path / "out", Counter()
    flags = (*BATCHING["bucket"], "--checkpointing_steps", 1, "--resume_from_checkpoint", "latest")
    for num_processes, stop in ((2, ("--max_train_steps", 2)), (3, ("--max_train_steps", 3)), (1, ())):
        train(pipeline_dir, prepared_dir, out, *flags, *stop, num_processes=num_processes)
    for process in range(3):
        for line in map(json.loads, (out / "logs" / f"samples-{process}.jsonl").read_text().splitlines()):
            seen.update(line["index"])
            assert line["epoch"] == 0
    assert seen == dict.fromkeys(range(20), 1)
    review = review_run(Logs(out), min_fall=-9)
    assert review.passed, str(review)
    assert "every planned sample seen exactly once in 1 of 1 epochs" in str(review)
