"""The held-out loss: which rows are held out, that each counts once, and that training does not notice."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file

from hf_bucketing import BucketingError, MediaError
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.prepared import CacheInfo
from hf_bucketing.columns.split import check_apart, files_of, split_rows
from hf_bucketing.media import MediaSource, View
from hf_bucketing.media.sample import load_sample
from hf_bucketing.models import disable_packing
from hf_bucketing.randomness import ROW, Purpose, integer_seed
from hf_bucketing.runs.held_out import describe_held_out, held_out_changes
from hf_bucketing.runs.logs import Logs
from hf_bucketing.settings import changed
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.held_out_loss import ReadableRows, unreadable_message
from hf_bucketing.training.loop import Trainer
from tests.placement.test_sharding import DDP, train_all
from tests.training.training_cases import TINY_WAN, in_process, run

BUCKET = {"train_batch_size": 3}
PACK = {"batching": "pack", "max_tokens": 320, "strip_length": 16, "train_batch_size": 4}
each_batching = pytest.mark.parametrize("batches", [BUCKET, PACK], ids=["bucket", "pack"])


def rows_of(prepared: PreparedDataset, cells: list[Any], *, fps: list[float], tokens: list[int]) -> PreparedDataset:
    columns = {"video": cells, "fps": fps, "num_tokens": tokens, ROW: list(range(len(cells)))}
    return dataclasses.replace(prepared, dataset=Dataset.from_dict(columns), column="video", root="/data")


@pytest.fixture
def prepared(prepared_dir: Path) -> PreparedDataset:
    return PreparedDataset.load(prepared_dir)


def indices(data: PreparedDataset) -> list[int]:
    return data.dataset[ROW][:]


def test_whole_files_are_held_out_of_images_and_of_videos_the_same_share(prepared: PreparedDataset) -> None:
    clips = [f"a/{row // 4}.mp4" if row % 2 else f"a//{row // 4}.mp4" for row in range(80)]
    images = [f"{row}.png" for row in range(20)]
    data = rows_of(prepared, clips + images, fps=[8.0] * 80 + [0.0] * 20, tokens=[0] * 8 + [5] * 92)
    training, held_out = split_rows(data, 0.25)
    assert sorted(indices(training) + indices(held_out)) == list(range(100))
    files = [{data.dataset[row]["video"].replace("//", "/") for row in indices(part)} for part in (training, held_out)]
    assert not files[0] & files[1]
    usable = [row for row in indices(held_out) if row >= 8]
    assert sum(row >= 80 for row in usable) == 5
    assert sum(row < 80 for row in usable) == 20, "as few files of four as hold 18 of 72"
    assert indices(split_rows(data, 0.25)[1]) == indices(held_out)


def test_bytes_without_a_path_are_files_of_their_own(prepared: PreparedDataset) -> None:
    cells = [{"bytes": b"1", "path": None}, {"bytes": b"2", "path": "x.mp4"}, {"bytes": None, "path": "x.mp4"},
             {"bytes": b"1", "path": None}]  # fmt: skip
    data = rows_of(prepared, cells, fps=[8.0] * 4, tokens=[5] * 4)
    assert files_of(data).of_row.tolist() == [1, 0, 0, 2]
    assert files_of(rows_of(prepared, [b"1", b"1"], fps=[8.0] * 2, tokens=[5] * 2)).of_row.tolist() == [0, 1]
    other = rows_of(prepared, [{"bytes": b"3", "path": "x.mp4"}], fps=[8.0], tokens=[5])
    check_apart(data, other)  # a name of bytes says nothing
    with pytest.raises(BucketingError, match=r"also trained on: /data/x\.mp4\."):
        check_apart(data, rows_of(prepared, ["./x.mp4", "y.mp4"], fps=[8.0] * 2, tokens=[5] * 2))


@pytest.mark.parametrize(("share", "cells", "message"), [
    (0.5, ["a", "a", "a"], "of 3 usable rows in 1 files leaves none to train on"),
])  # fmt: skip
def test_a_split_needs_rows_on_both_sides(share: float, cells, message: str, prepared: PreparedDataset) -> None:
    with pytest.raises(BucketingError, match=rf"`validation_split={share}` {message}"):
        split_rows(rows_of(prepared, cells, fps=[8.0] * 3, tokens=[5] * 3), share)


@pytest.mark.parametrize("fps", [[8.0] * 3, [0.0] * 3, [0.0, 0.0, 8.0]])
def test_a_share_of_few_rows_holds_out_one(fps: list[float], prepared: PreparedDataset) -> None:
    training, held_out = split_rows(rows_of(prepared, ["a", "b", "c"], fps=fps, tokens=[5] * 3), 0.05)
    assert (len(training.dataset), len(held_out.dataset)) == (2, 1)


@each_batching
def test_held_out_rows_are_neither_drawn_nor_replacements_and_nothing_about_them_is_random(
    batches, pipeline_dir, prepared: PreparedDataset, prepared_dir, tmp_path: Path
) -> None:
    more = {"longest_first": True, "flip_probability": 0.5, "on_error": "replace", "max_error_share": 1.0}
    more |= {"validation_split": 0.2, "seed": 3, "frame_picking": "random"}
    config = in_process(pipeline_dir, prepared_dir, tmp_path, **batches, **more)
    training = make_data(config, prepared.spec, TINY_WAN)
    held_out = make_held_out_data(changed(config, seed=4), prepared.spec, TINY_WAN)
    trained, apart = (data.loader.dataset[ROW][:] for data in (training, held_out))
    assert len(apart) == 4
    assert sorted(trained + apart) == list(range(20))
    assert training.loader.collate_fn.replacements.dataset[ROW][:] == trained
    assert held_out.loader.collate_fn.replacements is None
    assert held_out.loader.collate_fn.views.num_draws == 0
    assert sorted(held_out.sampler.plan().indices) == list(range(4))
    assert held_out.sampler.plan().indices.tolist() == held_out.sampler.plan(1).indices.tolist()


@pytest.mark.parametrize(("settings", "message"), [
    ({"validation_split": 0.5, "validation_dataset_dir": "other"}, "give one of them"),
    ({"validation_split": 1.0}, "above 0 and below 1"),
    ({"validation_loss_steps": 3}, "Omit `validation_loss_steps`"),
    ({"validation_loss_on_start": False}, "Omit `validation_loss_on_start`"),
    ({"validation_split": 0.5, "validation_noise_levels": 0}, "`validation_noise_levels` must be at least 1"),
    ({"validation_dataset_dir": "data/../data"}, "as `dataset_dir` is"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        TrainingConfig.from_flat(
            pretrained_model_name_or_path="model", dataset_dir="data", output_dir="out", **settings
        )


def computed(config: TrainingConfig, *, check: Callable[[Trainer, dict], None] | None = None) -> dict[str, Any]:
    """Compute the held-out loss of a run that has not begun."""
    AcceleratorState._reset_state(reset_partial_state=True)
    trainer = Trainer(config)
    before = torch.get_rng_state()
    entry = trainer.evaluation.held_out.compute(trainer.experts, trainer.trained.transformers, trainer.accelerator)
    assert torch.equal(before, torch.get_rng_state())
    if check is not None:
        check(trainer, entry)
    trainer.release()
    return without_times(entry)


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "seconds"}


@torch.no_grad()
def by_hand(trainer: Trainer, *, levels: int) -> dict[int, list[float]]:
    """Return the loss of each held-out row at each noise level, one sample at a time, in the stock model."""
    data, recipe = trainer.evaluation.held_out.data, trainer.recipe
    if trainer.config.batches.batching == "pack":
        disable_packing(recipe.transformer)
    root, losses = data.loader.collate_fn.root, {}
    for row, cells in enumerate(data.loader.dataset):
        size = data.table.size(int(data.bucket_ids[row]))
        view = View(size=size, fps=cells["fps"])
        pixels, _ = load_sample(MediaSource.from_cell(cells["file_name"], root=root), view)
        latent, text = recipe.encode_latents(pixels[None]), recipe.encode_text([cells["caption"]]).values
        losses[cells[ROW]] = []
        for level in range(levels):
            generator = torch.Generator().manual_seed(integer_seed(Purpose.HELD_OUT_NOISE, cells[ROW], level))
            quantile = (level + torch.rand((), generator=generator, dtype=torch.float64)) / levels
            sigma = torch.special.ndtri(quantile).sigmoid()
            sigma = float(3 * sigma / (1 + 2 * sigma))
            noise = torch.randn(latent.shape[1:], generator=generator)
            predicted = recipe.transformer(
                hidden_states=(1 - sigma) * latent + sigma * noise,
                timestep=torch.tensor([1000 * sigma]),
                encoder_hidden_states=text,
                return_dict=False,
            )[0]
            losses[cells[ROW]].append(float((predicted - (noise - latent)).square().mean()))
    return losses


def check_by_hand(trainer: Trainer, entry: dict[str, Any]) -> None:
    again = trainer.evaluation.held_out.compute(trainer.experts, trainer.trained.transformers, trainer.accelerator)
    assert without_times(again) == without_times(entry), "the same twice in a row"
    data, levels = trainer.evaluation.held_out.data, len(entry["by_noise"])
    training = trainer.data.loader.dataset[ROW][:]
    losses = by_hand(trainer, levels=levels)
    assert sorted([*losses, *training]) == list(range(20))
    assert entry["samples"] == len(losses) == sum(bucket["samples"] for bucket in entry["by_bucket"])
    assert entry["validation_loss"] == pytest.approx(np.mean([*losses.values()]), rel=1e-6)
    for level, counted in enumerate(entry["by_noise"]):
        assert counted["loss"] == pytest.approx(np.mean([loss[level] for loss in losses.values()]), rel=1e-6)
    for bucket in entry["by_bucket"]:
        (rows,) = np.nonzero(data.bucket_ids == bucket["bucket_id"])
        mine = [losses[data.loader.dataset[int(row)][ROW]] for row in rows]
        assert (bucket["samples"], bucket["loss"]) == (len(mine), pytest.approx(np.mean(mine), rel=1e-6))
        assert bucket["by_noise"] == pytest.approx(np.mean(mine, axis=0), rel=1e-6)
    assert f"Held out = {len(losses)} samples" in "\n".join(trainer.describe())


def test_the_loss_is_the_one_by_hand_with_each_row_once(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    settings = {**BUCKET, "validation_split": 0.1, "validation_noise_levels": 2, "caption_dropout": 0.5}
    computed(in_process(pipeline_dir, prepared_dir, tmp_path, **settings), check=check_by_hand)


@pytest.mark.slow
def test_packs_have_the_loss_of_the_stock_model_by_hand(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    settings = {**PACK, "validation_split": 0.15, "validation_noise_levels": 2, "token_drop_rate": 0.5}
    computed(in_process(pipeline_dir, prepared_dir, tmp_path, **settings), check=check_by_hand)


@pytest.fixture
def apart(prepared: PreparedDataset, tmp_path: Path) -> tuple[Path, Path]:
    """Two folders: rows to train on, and two to hold out."""
    for name, rows in (("train", range(12)), ("validation", range(18, 20))):
        dataclasses.replace(prepared, dataset=prepared.dataset.select(rows)).save(tmp_path / name)
    return tmp_path / "train", tmp_path / "validation"


def logged(output: Path) -> list[dict[str, Any]]:
    return [without_times(entry) for entry in Logs(output).held_out]


@pytest.mark.cases(slow=("pack",))
@each_batching
def test_training_does_not_notice_the_held_out_loss_and_a_resumed_run_logs_what_a_whole_one_does(
    batches, pipeline_dir, apart, tmp_path: Path
) -> None:
    folder, validation = apart
    settings = {**batches, "ema_decay": 0.5, "gradient_accumulation_steps": 2, "checkpointing_steps": 2,
                "max_train_steps": 3, "flip_probability": 0.5, "gradient_checkpointing": True}  # fmt: skip
    held_out = {"validation_dataset_dir": str(validation), "validation_loss_steps": 2, "validation_noise_levels": 1}

    def trained(name: str, **more: Any) -> list[float]:
        AcceleratorState._reset_state(reset_partial_state=True)
        return run(in_process(pipeline_dir, folder, tmp_path / name, **settings, **more))

    assert trained("with", **held_out) == trained("without")
    for log in ("samples-0.jsonl", "plans.jsonl"):
        assert (tmp_path / "with" / "logs" / log).read_text() == (tmp_path / "without" / "logs" / log).read_text()
    saved = "transformer/diffusion_pytorch_model.safetensors"
    weights, expected = (load_file(tmp_path / name / saved) for name in ("with", "without"))
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert not (tmp_path / "without" / "logs" / "validation.jsonl").exists()
    whole = logged(tmp_path / "with")
    assert [entry["global_step"] for entry in whole] == [0, 2, 3], "before the first step and after the last"
    if "batching" in batches:
        return
    trained("with", **held_out, resume_from_checkpoint="checkpoint-2")
    assert logged(tmp_path / "with") == whole
    averaged = in_process(tmp_path / "with", folder, tmp_path / "again", **batches, **held_out)
    entry = computed(averaged)
    assert entry["validation_loss"] == pytest.approx(whole[-1]["validation_loss"], rel=1e-6)


@pytest.mark.slow
def test_two_processes_have_the_loss_of_one_also_on_rows_they_cannot_share_evenly(
    pipeline_dir, prepared_dir, cached_dir, tmp_path: Path
) -> None:
    split = {"validation_split": 0.15, "validation_loss_steps": 1, "max_train_steps": 2, "learning_rate": 0.0}
    cases = {"bucket": BUCKET, "pack": PACK, "cached": BUCKET | {"dataset_dir": str(cached_dir)}}
    runs = {name: (DDP, None, {**settings, **split}) for name, settings in cases.items()}
    train_all(runs, tmp_path, pipeline_dir, prepared_dir, num_processes=2)
    for name, settings in cases.items():
        first, *later = logged(tmp_path / name)
        assert later == [{**first, "global_step": step} for step in (1, 2)], "the weights have not changed"
        folder = settings.get("dataset_dir", prepared_dir)
        entry = computed(in_process(pipeline_dir, folder, tmp_path / "one", **{**settings, **split}))
        assert (first["samples"], first["unreadable"]) == (entry["samples"], []) == (3, [])
        assert first["validation_loss"] == pytest.approx(entry["validation_loss"], rel=1e-6)
        for part in ("by_bucket", "by_noise"):
            for counted, again in zip(first[part], entry[part], strict=True):
                assert counted.keys() == again.keys()
                assert counted["samples"] == again["samples"]
                assert counted["loss"] == pytest.approx(again["loss"], rel=1e-6)
        logs = [tmp_path / name / "logs" / f"samples-{process}.jsonl" for process in range(2)]
        drawn = {index for log in logs for line in log.read_text().splitlines() for index in json.loads(line)["index"]}
        assert not drawn & set(indices(split_rows(PreparedDataset.load(folder), 0.15)[1]))
    files, cached = (logged(tmp_path / name)[0]["validation_loss"] for name in ("bucket", "cached"))
    assert cached == pytest.approx(files, rel=1e-4)


@pytest.fixture
def with_a_broken_file(prepared: PreparedDataset, media_dir: Path, tmp_path: Path) -> Path:
    """Three held-out rows, of which one breaks after they were prepared."""
    shutil.copytree(media_dir, tmp_path / "media")
    (row,) = (row for row, name in enumerate(prepared.dataset["file_name"]) if name.endswith("0004.mp4"))
    dataset = prepared.dataset.select([row, *(other for other in (1, 2, 3) if other != row)][:3])
    dataclasses.replace(prepared, dataset=dataset, root=str(tmp_path / "media")).save(tmp_path / "broken")
    (tmp_path / "media" / "videos" / "0004.mp4").write_bytes(b"broken")
    return tmp_path / "broken"


@pytest.mark.every
def test_an_unreadable_held_out_sample_is_an_error_or_does_not_count_and_is_named(
    pipeline_dir, prepared: PreparedDataset, with_a_broken_file, tmp_path: Path, caplog
) -> None:
    rows = [row for row, name in enumerate(prepared.dataset["file_name"]) if name.endswith("0000.mp4")]
    dataclasses.replace(prepared, dataset=prepared.dataset.select(rows)).save(tmp_path / "train")
    settings = {**BUCKET, "validation_dataset_dir": str(with_a_broken_file), "validation_noise_levels": 1}
    make = partial(in_process, pipeline_dir, tmp_path / "train", tmp_path / "out", max_train_steps=1)
    with pytest.raises(MediaError, match=r"0004\.mp4"):
        computed(make(**settings))
    settings |= {"on_error": "replace", "dataloader_num_workers": 1}
    run(make(**settings))
    _start, entry = logged(tmp_path / "out")
    broken = PreparedDataset.load(with_a_broken_file).dataset[0]
    assert (entry["samples"], entry["unreadable"]) == (2, [broken[ROW]])
    assert "0004.mp4" in caplog.text
    assert "1 held-out samples cannot be read and do not count" in caplog.text


def test_a_mean_over_other_samples_than_before_is_said() -> None:
    assert unreadable_message([], None) is None
    assert "different samples" not in unreadable_message([3], None)
    assert "different samples" not in unreadable_message([3], [3])
    assert "different samples" in unreadable_message([], [3])
    assert "different samples" in unreadable_message([4], [3])


def test_a_batch_that_cannot_be_read_holds_another_row_of_the_data_set() -> None:
    def collate(rows: list[dict]) -> dict[str, Any]:
        if unreadable := [row["index"] for row in rows if row["index"] in (0, 1, 3)]:
            raise MediaError(f"row {unreadable[0]} is broken")
        return {"index": [row["index"] for row in rows]}

    rows = [{"index": index} for index in range(5)]
    readable = ReadableRows(collate, rows)
    assert readable(rows[2:3]) == {"index": [2]}
    assert readable(rows[1:3]) == {"index": [2], "unreadable": ["row 1 is broken"]}
    assert readable(rows[:2]) == {"index": [2], "unreadable": ["row 0 is broken", "row 1 is broken"]}
    with pytest.raises(MediaError, match=r"None of the 2 held-out samples can be read\. row 0 is broken"):
        ReadableRows(collate, rows[:2])(rows[:2])


@pytest.mark.parametrize(("training", "validation", "message"), [
    ("model", None, "`dataset_dir` holds encoded samples and `validation_dataset_dir` does not"),
    (None, "model", "`validation_dataset_dir` holds encoded samples and `dataset_dir` does not"),
    ("model", "other", "made by different models .latents_model model and other."),
])  # fmt: skip
def test_caches_that_do_not_go_together_are_refused(training, validation, message: str, prepared) -> None:
    common = {"folder": "cache", "batching": "bucket", "text_model": "text", "empty_text_key": None, "views": {}}
    folders = [
        dataclasses.replace(prepared, cache=model and CacheInfo(latents_model=model, **common))
        for model in (training, validation)
    ]
    with pytest.raises(BucketingError, match=message):
        check_apart(*folders)


def test_a_report_shows_the_held_out_loss(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "losses.jsonl").write_text("{}\n" * 15)
    assert describe_held_out(Logs(tmp_path)) == []
    entries = [
        {
            "global_step": step,
            "validation_loss": loss,
            "samples": samples,
            "by_noise": [{"noise_level": 0.25, "loss": loss - 0.5}, {"noise_level": 0.75, "loss": loss + 0.5}],
            "by_bucket": [{"bucket_id": 3, "size": [9, 64, 96], "samples": samples, "loss": loss}],
        }
        for step, loss, samples in ((5, 3.0, 4), (10, 1.0, 4), (15, 2.0, 3))
    ]
    (tmp_path / "logs" / "validation.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    values, levels, changes, bucket = describe_held_out(Logs(tmp_path), by_bucket=True)
    assert changes.endswith("held-out loss since step 5: -33%, least learned all (-33%)")
    assert "of 3 to 4 samples, as some could not be read each time: 3.0000 first (step 5), 1.0000 lowest" in values
    assert values.endswith("2.0000 last (step 15)")
    assert "1.5000 at 0.25, 2.5000 at 0.75" in levels
    assert "bucket    3 (9x64x96),      3 held out, mean loss 2.0000" in bucket


def test_changes_are_those_of_sizes_and_sources_at_each_noise_level(tmp_path: Path) -> None:
    def entry(step: int, small: list[float], large: list[float]) -> dict[str, Any]:
        means = np.mean([small, large], axis=0).tolist()
        return {
            "global_step": step,
            "validation_loss": float(np.mean(means)),
            "samples": 2,
            "by_noise": [{"noise_level": noise, "loss": loss} for noise, loss in zip((0.3, 0.8), means, strict=True)],
            "by_bucket": [
                {"bucket_id": bucket, "size": size, "samples": 1, "loss": float(np.mean(losses)), "by_noise": losses}
                for bucket, size, losses in ((0, [9, 64, 96], large), (1, [1, 64, 64], small))
            ],
            "by_source": [{"source": "clips", "samples": 1, "loss": float(np.mean(large)), "by_noise": large}],
            "by_condition": [{"condition": "prefix", "samples": 1, "loss": float(np.mean(small)), "by_noise": small}],
        }

    entries = [entry(0, [1.0, 4.0], [2.0, 4.0]), entry(2, [0.5, 5.0], [2.0, 1.0])]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "losses.jsonl").write_text("{}\n" * 2)
    (tmp_path / "logs" / "validation.jsonl").write_text(json.dumps(entries[0]) + "\n")
    assert held_out_changes(Logs(tmp_path)) is None
    (tmp_path / "logs" / "validation.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    changes = held_out_changes(Logs(tmp_path))
    assert changes is not None
    assert changes.noise_levels == [0.3, 0.8]
    assert {row.name: row.changes for row in changes.rows} == {
        "all": pytest.approx([2.5 / 3 - 1, 6 / 8 - 1]),
        "64×64": [-0.5, 0.25],
        "9×64×96": [0.0, -0.75],
        "clips": [0.0, -0.75],
        "shown prefix": [-0.5, 0.25],
    }
    *_, said = describe_held_out(Logs(tmp_path))
    assert said.endswith("held-out loss since step 0: -23%, least learned 64×64 (+10%)")
