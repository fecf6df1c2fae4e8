"""Runs on several sources, each with conditions and a weight in the loss of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.shares import read_conditions
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW
from hf_bucketing.runs.logs import Logs
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from hf_bucketing.training.loop import Trainer
from tests.conftest import as_flags
from tests.training.condition_runs import ConditionRuns, each_mode, loader_of
from tests.training.training_cases import run, train

PIPELINE = "wan-2.2-ti2v"
WEIGHTS = {"clips": 1.0, "stills": 0.25}


@pytest.fixture(scope="module")
def runs(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ConditionRuns:
    """Videos, and images beside videos."""
    folder = tmp_path_factory.mktemp("sources")
    pack = {"max_tokens": 300, "train_batch_size": 4}
    made = ConditionRuns(folder=folder, pipeline=tiny_folder(PIPELINE), common={"lora_rank": 2}, bucket={}, pack=pack)
    make_media_dataset(folder / "clips", num_samples=4, clips=(Clip(9, 64, 96, 8), Clip(5, 64, 64, 8)))
    make_media_dataset(folder / "stills", num_samples=4, clips=(Clip(9, 64, 96, 8), Clip(1, 64, 64)))
    made.prepare([folder / "clips", folder / "stills"])
    made.cache(max_sequence_length=32)
    return made


@each_mode
def test_batches_name_the_source_of_each_sample_whose_loss_has_its_weight(
    mode: str, runs: ConditionRuns, tmp_path: Path
) -> None:
    config = runs.settings(mode, tmp_path, loss_weight="stills=0.25")
    data = runs.data(config)
    sources = PreparedDataset.load(runs.folder / "prepared").source_ids
    loader, planned, seen = loader_of(data), "stream" not in mode, []
    for batch in loader:
        rows = data.rows_of(loader, batch, epoch=0)
        assert batch["source"] == [data.sources[number] for number in rows.sources]
        assert rows.weights.tolist() == [WEIGHTS[name] for name in batch["source"]]
        if planned:
            assert batch["source"] == [("clips", "stills")[sources[index]] for index in batch["index"]]
            assert rows.total == rows.weights.sum()
        seen += batch["source"]
    assert sorted(seen) == ["clips"] * 4 + ["stills"] * 4


@pytest.mark.cases(slow=("pack", "streamed-packs"))
@each_mode
def test_a_run_of_several_tasks_is_their_weighted_mean_and_resumes_exactly(
    mode: str, runs: ConditionRuns, tmp_path: Path
) -> None:
    """Images, plain videos, first frames and prefixes meet in a step."""
    settings = {
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "condition": "first_frame:0.5,prefix:0.5;stills=none",
        "loss_weight": "stills=0.25",
        "num_train_epochs": 2,
    }
    config = runs.settings(mode, tmp_path / "out", **settings)
    whole = run(config)
    logs = Logs(tmp_path / "out")
    batches = {line["batch"]: line for line in logs.batches}
    for step, loss in enumerate(whole):
        weights = np.array([[1.0, 0.25][source] for source in batches[step]["sources"]])
        assert loss == pytest.approx(np.average(batches[step]["loss"], weights=weights), rel=1e-5)
    again = runs.settings(mode, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2")
    assert run(again) == whole
    unnamed = {**settings, "condition": "first_frame:0.5,prefix:0.5"}
    assert run(runs.settings(mode, tmp_path / "unnamed", **unnamed)) != whole
    unweighted = {**settings, "loss_weight": None}
    first = run(runs.settings(mode, tmp_path / "unweighted", **unweighted))[0]
    assert first == pytest.approx(np.mean(batches[0]["loss"]), rel=1e-5)


@pytest.mark.cases(slow=("bucket", "stream"))
@each_mode
def test_a_run_weighs_samples_by_what_is_drawn_for_them_and_resumes_exactly(
    mode: str, runs: ConditionRuns, tmp_path: Path
) -> None:
    """Weights of conditions inside a source, beside those of sources, over accumulated batches of unequal sums."""
    settings = {
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "gradient_accumulation_steps": 2,
        "condition": "first_frame:0.5:3,none:0.5:0.5",
        "loss_weight": "stills=0.25",
        "num_train_epochs": 6,
    }
    whole = run(runs.settings(mode, tmp_path / "out", **settings))
    logs, conditions = Logs(tmp_path / "out"), read_conditions(str(settings["condition"]))
    steps: list[list[tuple[str, float, float]]] = [[] for _ in whole]
    position = 0
    for line in logs.batches:
        for index, source, loss in zip(line["index"], line["sources"], line["loss"], strict=True):
            drawn = conditions.of(None).draw(0, line["epoch"], index, latent_frames=3, stride=4)
            steps[position].append((drawn.name, drawn.weight * (1.0, 0.25)[source], loss))
        ends = line["step"] == max(other["step"] for other in logs.batches if other["epoch"] == line["epoch"])
        if position + 1 < len(whole) and (line["step"] % 2 or ends):
            position += 1
    for loss, logged, samples in zip(whole, logs.losses, steps, strict=True):
        names, weights, losses = zip(*samples, strict=True)
        assert loss == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
        for name in {*names}:
            mean = np.mean([own for own, other in zip(losses, names, strict=True) if other == name])
            assert logged[f"loss_by_condition/{name}"] == pytest.approx(mean, rel=1e-5)
    again = runs.settings(mode, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2")
    assert run(again) == whole
    unweighted = {**settings, "condition": "first_frame:0.5,none:0.5"}
    assert run(runs.settings(mode, tmp_path / "unweighted", **unweighted)) != whole


@pytest.mark.slow
def test_two_processes_weigh_samples_by_what_is_drawn_for_them(runs: ConditionRuns, tmp_path: Path) -> None:
    """The mean of a step is that over both processes, and `loss_by_condition` is without weights."""
    condition = "first_frame:0.5:3,none:0.5:0.5"
    flags = {
        "batching": "pack",
        "strip_length": 16,
        **runs.pack,
        "lora_rank": 2,
        "condition": condition,
        "max_train_steps": 2,
        "max_sequence_length": 32,
    }
    train(runs.pipeline, runs.folder / "prepared", tmp_path, *as_flags(**flags), num_processes=2)
    logs, shares = Logs(tmp_path), read_conditions(condition).of(None)
    for step, (logged, lines) in enumerate(zip(logs.losses, zip(*logs.samples, strict=True), strict=True)):
        weights, losses, names = [], [], []
        for line in lines:
            drawn = [shares.draw(0, line["epoch"], index, latent_frames=3, stride=4) for index in line["index"]]
            weights += [each.weight for each in drawn]
            names += [each.name for each in drawn]
            losses += line["loss"]
        assert logged["train_loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-5), step
        for name in {*names}:
            mean = np.mean([loss for loss, own in zip(losses, names, strict=True) if own == name])
            assert logged[f"loss_by_condition/{name}"] == pytest.approx(mean, rel=1e-5)


def test_held_out_samples_weigh_as_in_training(runs: ConditionRuns, tmp_path: Path) -> None:
    config = runs.settings("bucket", tmp_path, loss_weight="stills=0.25", validation_split=0.5)
    spec = recipe_of(str(runs.pipeline)).read_spec(str(runs.pipeline))
    held_out = make_held_out_data(config, spec, ModelTokens(width=96))
    assert held_out is not None
    rows = np.arange(len(held_out.dataset))
    weights = held_out.loss_weights(rows, epoch=0).tolist()
    assert weights == [(1.0, 0.25)[source] for source in held_out.source_ids]
    assert {*weights} == {1.0, 0.25}


@pytest.mark.cases(fast=("pack",), slow=("*",))
@pytest.mark.parametrize("mode", ["bucket", "pack"])
def test_held_out_losses_by_condition_are_means_and_their_weights_count(
    mode: str, runs: ConditionRuns, tmp_path: Path
) -> None:
    """The held-out loss is compared with that of each row, drawn and run by itself."""
    condition = "first_frame:0.5:3,none:0.5:0.5"
    held_out = {"validation_split": 0.7, "validation_noise_levels": 2, "loss_weight": "stills=0.25"}
    trainer = Trainer(runs.settings(mode, tmp_path, condition=condition, seed=4, **held_out))
    found = trainer.evaluation.held_out_loss(0)
    data, (step,) = trainer.evaluation.held_out.data, trainer.experts.steps
    shares, model = read_conditions(condition).of(None), trainer.recipe.transformer
    names, weights, losses = [], [], []
    for row, weight in zip(data.dataset, data.loss_weights(np.arange(len(data.dataset)), epoch=0), strict=True):
        frames = (data.table.size(int(data.bucket_ids[len(names)])).frames - 1) // 4 + 1
        drawn = shares.draw(row[ROW], latent_frames=frames, stride=4)
        names.append(drawn.name)
        weights.append(drawn.weight * float(weight))
        with torch.no_grad():
            alone = step.held_out(model, data.loader.collate_fn([row]), num_levels=2)
        losses.append([float(level.values) for level in alone])
    assert found["samples"] == len(names) >= 4
    assert found["validation_loss"] == pytest.approx(np.average(np.mean(losses, 1), weights=weights), rel=1e-5)
    assert [group["condition"] for group in found["by_condition"]] == ["first_frame", "none"]
    for group in found["by_condition"]:
        chosen = [own for own, name in zip(losses, names, strict=True) if name == group["condition"]]
        assert group["samples"] == len(chosen) >= 1
        assert group["by_noise"] == pytest.approx(np.mean(chosen, 0).tolist(), rel=1e-5)
        assert group["loss"] == pytest.approx(np.mean(chosen), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"condition": "none;faces=prefix"}, "`condition` names `faces`, but .* the sources `clips`, `stills`"),
        ({"loss_weight": "faces=2"}, "`loss_weight` names `faces`"),
        ({"condition": "clips=prefix"}, "no shares for `stills`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["bucket", "stream"])
def test_sources_that_are_not_there_are_refused(
    settings, message: str, mode: str, runs: ConditionRuns, tmp_path: Path
) -> None:
    with pytest.raises(BucketingError, match=message):
        Trainer(runs.settings(mode, tmp_path / "out", **settings))


def test_a_data_set_of_one_source_has_no_names(runs: ConditionRuns, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(runs.folder / "prepared")
    single = prepared.dataset.remove_columns(["hf_bucketing_source"])
    config = runs.settings("bucket", tmp_path / "out", loss_weight="clips=2")
    spec = recipe_of(str(runs.pipeline)).read_spec(str(runs.pipeline))
    with pytest.raises(BucketingError, match="has one source, which has no name"):
        make_data(config, spec, ModelTokens(width=96), prepared=dataclasses.replace(prepared, dataset=single))


@pytest.mark.parametrize("text", ["stills", "stills=0", "stills=x", "a=1,a=2", "a=inf", "a=-1"])
def test_weights_that_cannot_be_read_are_refused(text: str, runs: ConditionRuns, tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match="must be sources with their weights above 0"):
        runs.settings("bucket", tmp_path, loss_weight=text)
