"""Training from streams: what each step weighs, resumed runs, equal steps, shards, and what a stream cannot do."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from hf_bucketing import BucketingError, MediaError, PlanError
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.batching.run_data import StepRows
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.columns.prepared_stream import PreparedStream, prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.loaders import collators, resume
from hf_bucketing.losses import global_mean
from hf_bucketing.media.sample import load
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of, review_run, review_sources
from hf_bucketing.settings import changed
from hf_bucketing.streaming.config import warn_of_shards
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.optimizer_steps import LossWindow
from tests.columns.stream_cases import samples_of, write_parquet, write_tars
from tests.training.training_cases import BATCHING, TINY_WAN, count_samples, in_process, run, train

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 4}


def describe(dataset: Path, pipeline: Path, folder: Path) -> Path:
    table = TableConfig(bucket_tokens=[60, 110, 150], bucket_frames=[1, 9, 17, 25])
    config = SourceConfig(dataset=str(dataset), table=table, target_fps=8.0)
    spec = recipe_of(str(pipeline)).read_spec(str(pipeline))
    prepare_stream(config, spec=spec, say=lambda sentence: None)[0].save(folder)
    return folder


@pytest.fixture(scope="module")
def stream_dir(media_dir: Path, pipeline_dir: Path, tmp_path_factory) -> Path:
    """Four tars of mp4 and json, described as a stream."""
    folder = tmp_path_factory.mktemp("stream")
    return describe(write_tars(folder / "tars", media_dir, shards=4), pipeline_dir, folder / "prepared")


@pytest.fixture(scope="module")
def parquet_dir(media_dir: Path, pipeline_dir: Path, tmp_path_factory) -> Path:
    """Four parquet files of bytes, described as a stream."""
    folder = tmp_path_factory.mktemp("stream")
    return describe(write_parquet(folder / "parquet", media_dir, shards=4), pipeline_dir, folder / "prepared")


def streamed(pipeline: Path, prepared: Path, output: Path, **settings) -> TrainingConfig:
    return in_process(pipeline, prepared, output, **{"streaming": True, **settings})


def fresh_run(config: TrainingConfig) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return run(config)


def samples(output: Path, process: int = 0) -> list[dict]:
    return [json.loads(line) for line in (output / "logs" / f"samples-{process}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("shards", "processes", "workers", "said"), [
    (8, 2, 4, None), (4, 1, 0, None), (12, 2, 3, None),
    (3, 2, 1, r"3 shards do not divide among 2 processes, .* 2 times as long\. Run 1 process, or make 4 shards"),
    (6, 4, 2, r"6 shards do not divide among 4 processes, .* 4 times as long\. Run 3 processes, or make 8 shards"),
    (4, 2, 4, r"2 of the 4 workers .* no shard to read: give `dataloader_num_workers=2`, or make 8 shards"),
    (10, 2, 2, r"5 shards of each .* 1 of them read 2 .* which read 3\. Give `dataloader_num_workers=1`, or make 12"),
])  # fmt: skip
def test_shards_that_do_not_divide_are_said_with_what_to_change(shards, processes, workers, said) -> None:
    warnings = warn_of_shards(shards, num_processes=processes, num_workers=workers)
    assert len(warnings) == (said is not None)
    if said is not None:
        assert re.search(said, warnings[0])


@pytest.mark.parametrize("known", [True, False], ids=["plan", "stream"])
def test_a_window_has_the_gradient_of_one_mean_whether_its_weights_are_known_before(known: bool) -> None:
    """The last window is shorter, and a batch of weight 0 changes nothing."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    window = LossWindow(accelerator)
    for lengths in ([[3, 5], [1], [2, 2, 4]], [[7], [0, 0], [6, 1]], [[4, 4]]):
        weights = [torch.tensor(part, dtype=torch.float64) for part in lengths]
        inputs = [torch.arange(1.0, 1 + len(part), dtype=torch.float64) ** 2 for part in weights]
        total = float(sum(part.sum() for part in weights)) if known else None
        parameter, logged = torch.nn.Parameter(torch.ones((), dtype=torch.float64)), 0.0
        for part, values in zip(weights, inputs, strict=True):
            weighed = window.weigh(StepRows(tokens=part.long().numpy(), weights=part, total=total))
            losses = parameter * values
            logged += float((losses * weighed).sum().detach())
            (global_mean(losses, weighed, accelerator=accelerator, total=1.0) / 3).backward()
        factor = window.finish([parameter])
        mean = float(torch.cat(inputs) @ torch.cat(weights) / torch.cat(weights).sum())
        assert float(parameter.grad) == pytest.approx(mean, rel=1e-12)
        assert logged * factor == pytest.approx(mean, rel=1e-12)
        assert (factor == 1.0) == known


@pytest.mark.parametrize(("settings", "message"), [
    ({"shuffle_buffer": 5, "streaming": False}, "Omit `shuffle_buffer`: no effect without `streaming`"),
    ({"max_train_steps": None}, "no known length: give `max_train_steps`, or `steps_per_epoch`"),
    ({"remainder": "drop"}, r"Omit `remainder` with `streaming=True`: .* smaller batches"),
    ({"longest_first": True, "remainder": "drop"}, "Omit `remainder`, `longest_first`"),
    ({**PACK, "balance": "cost"}, "Omit `balance`"),
    ({**PACK, "pack_strategy": "sequential"}, "Omit `pack_strategy`"),
    ({**PACK, "random_resize": 32}, "Omit `random_resize`"),
    ({**PACK, "max_tokens": "auto"}, '`max_tokens="auto"` searches'),
    ({"validation_split": 0.1}, "Omit `validation_split`.* give `validation_dataset_dir`"),
    ({"context_parallel_degree": 2}, "Omit `context_parallel_degree`"),
    ({"shuffle_buffer": -1}, "`shuffle_buffer` must be at least 0"),
    ({"steps_per_epoch": 0}, "`steps_per_epoch` must be at least 1"),
])  # fmt: skip
def test_settings_that_need_a_plan_are_refused_by_name(settings, message: str, tmp_path: Path) -> None:
    with pytest.raises(BucketingError, match=message):
        streamed(tmp_path, tmp_path, tmp_path, **settings)


@pytest.mark.slow
def test_a_dry_run_says_the_limits_and_the_shards_before_weights_are_loaded(
    pipeline_dir, stream_dir, tmp_path: Path, caplog, capsys, monkeypatch
) -> None:
    settings = {"dry_run": True, "dataloader_num_workers": 3, "shuffle_buffer": 50, "steps_per_epoch": 5}
    config = streamed(pipeline_dir, stream_dir, tmp_path / "out", **settings, max_train_steps=None, num_train_epochs=2)
    recipe = recipe_of(str(pipeline_dir))
    load = recipe.load
    at_load: list[str] = []
    monkeypatch.setattr(
        recipe, "load", lambda *args, **options: at_load.extend(caplog.messages) or load(*args, **options)
    )
    trainer = Trainer(config)
    lines = "\n".join(trainer.describe())
    trainer.release()
    assert lines.startswith("***** Dry run: nothing is trained *****\n  Num processes = 1\n")
    assert any("do not divide among its 3 workers" in line for line in at_load)
    assert "Stream = 4 shards, 4 per process; rows shuffled among 50 in each worker, about" in lines
    assert "Samples per epoch = not known before they come; of the first 14, 14 have a bucket" in lines
    assert "Steps per epoch = 5 on each process" in lines
    assert "Optimizer steps = 10" in lines
    assert "resuming, and each further epoch, reads all rows since the start of the pass again" in lines
    assert "Memory per process = weights" in lines


@pytest.mark.cases(slow=("settings1-parquet-2",))
@pytest.mark.parametrize(("settings", "source", "step"), [
    ({"loss_reduction": "token", "shuffle_buffer": 6}, "tars", 1), ({**PACK, "steps_per_epoch": 3}, "parquet", 2),
])  # fmt: skip
def test_a_resumed_stream_repeats_the_losses_and_samples_of_an_uninterrupted_run(
    settings, source: str, step: int, pipeline_dir, stream_dir, parquet_dir, tmp_path: Path
) -> None:
    prepared = {"tars": stream_dir, "parquet": parquet_dir}[source]
    settings = {**settings, "gradient_accumulation_steps": 2, "max_train_steps": 3, "ema_decay": 0.9}
    config = streamed(pipeline_dir, prepared, tmp_path, **settings, checkpointing_steps=1)
    whole, drawn = fresh_run(config), samples(tmp_path)
    resumed = changed(config, resume_from_checkpoint=f"checkpoint-{step}", checkpointing_steps=None)
    assert fresh_run(resumed) == whole
    assert samples(tmp_path) == drawn
    with pytest.raises(PlanError, match="max_buffered was 1024 and is 9"):
        fresh_run(changed(resumed, max_buffered=9))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"loss_reduction": "token"}, PACK], ids=["bucket", "pack"])
def test_losses_are_the_mean_over_the_samples_of_a_window_by_hand(
    settings, pipeline_dir, stream_dir, tmp_path: Path, monkeypatch
) -> None:
    config = streamed(pipeline_dir, stream_dir, tmp_path, **settings, gradient_accumulation_steps=2, max_train_steps=3)
    trainer = Trainer(config)
    spec, step, seen = trainer.recipe.spec, type(trainer.step).__call__, []

    def recorded(self, transformer, batch, *, epoch):
        losses = step(self, transformer, batch, epoch=epoch)
        tokens = [int(np.prod(spec.grid(size))) for size in batch["size"]]
        seen.append((losses.values.detach().double().numpy(), tokens, trainer.loader.end_of_dataloader))
        return losses

    monkeypatch.setattr(type(trainer.step), "__call__", recorded)
    trainer.run()
    wanted, window = [], []
    for batch in seen:
        window.append(batch)
        if len(window) == 2 or batch[2]:
            values = np.concatenate([values for values, *_ in window])
            tokens = np.concatenate([tokens for _, tokens, _ in window])
            by_token = config.objective.loss_reduction == "token"
            wanted.append(np.average(values, weights=tokens if by_token else None))
            window = []
    assert losses_of(tmp_path) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_two_processes_see_each_row_of_a_stream_once_per_epoch(
    media_dir, pipeline_dir, stream_dir, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = train(pipeline_dir, stream_dir, out, *BATCHING["bucket"], "--streaming", "--max_train_steps", 10)
    assert "Stream = 4 shards, 2 per process" in result.stderr
    rows = {row[ROW] for row in PreparedStream.load(stream_dir).open()}
    assert len(rows) == len(samples_of(media_dir))
    first = count_samples(out)[0]
    assert (first.seen, first.repeated) == (len(rows), 0)
    assert len(set(first.steps)) == 1, "in equal steps"
    by_process = [samples(out, process) for process in range(2)]
    assert {index for lines in by_process for line in lines for index in line["index"]} == rows
    assert len(losses_of(out)) == 10
    logged = [json.loads(line) for line in (out / "logs" / "losses.jsonl").read_text().splitlines()]
    counted = Counter(line["batch"] for lines in by_process for line in lines for _ in line["index"])
    assert [entry["samples"] for entry in logged] == [counted[batch] for batch in range(10)]
    review = review_run(Logs(out), min_fall=-1)
    assert review.passed, str(review)
    assert "10 of 10 optimizer steps, finished" in str(review)
    assert "none twice in a pass" in str(review)


def loaded(pipeline: Path, prepared: Path, output: Path, *, text_tokens: int = 0, **settings):
    """Make the data of a run, and the loader that its loop draws from."""
    config = streamed(pipeline, prepared, output, **settings)
    accelerator = Accelerator(cpu=True)
    spec = recipe_of(str(pipeline)).read_spec(str(pipeline))
    opened = open_stream(config, accelerator)
    data = make_streamed_data(config, spec, ModelTokens(width=96, text_tokens=text_tokens), opened=opened)
    return data, resume(accelerator, data.loader)


@pytest.mark.parametrize("settings", [
    {"text_tokens": 50, "loss_reduction": "token"}, {**PACK, "text_tokens": 50}, {**PACK, "token_drop_rate": 0.5},
], ids=["bucket", "pack", "kept tokens"])  # fmt: skip
def test_the_rows_of_a_prepared_folder_stream_once_with_the_tokens_of_a_plan(
    settings, pipeline_dir, prepared_dir, tmp_path: Path
) -> None:
    text_tokens = settings.get("text_tokens", 0)
    settings = {"max_tokens": 640, **settings}
    data, loader = loaded(pipeline_dir, prepared_dir, tmp_path, **settings)
    new: list[int] = []
    data.check_buckets(new.extend)
    new.clear()
    planned = {name: value for name, value in settings.items() if name != "text_tokens"}
    config = in_process(pipeline_dir, prepared_dir, tmp_path, **planned)
    plan = make_data(config, data.spec, ModelTokens(width=96, text_tokens=text_tokens))
    seen: list[int] = []
    for batch in loader:
        rows = data.rows_of(loader, batch, epoch=0)
        assert rows.tokens.tolist() == plan.lengths_of(np.array(batch["index"]), epoch=0).tolist()
        assert rows.weights.tolist() == plan.loss_weights(np.array(batch["index"]), epoch=0).tolist()
        assert rows.total is None
        strips = -(-(rows.tokens - text_tokens) // 16) * 16 if "batching" in settings else rows.tokens - text_tokens
        assert (strips + text_tokens).sum() <= 640
        seen += batch["index"]
    assert sorted(seen) == list(range(len(PreparedDataset.load(prepared_dir).dataset)))
    assert len(new) == len(set(new)) == len(set(plan.bucket_ids.tolist())), (
        "each bucket is checked when it first comes"
    )
    assert data.largest_step().tokens <= 640


def test_the_largest_step_of_packs_has_as_many_samples_as_whole_strips_fit(
    pipeline_dir, stream_dir, tmp_path: Path
) -> None:
    data, _ = loaded(pipeline_dir, stream_dir, tmp_path, **{**PACK, "max_tokens": 320, "strip_length": 160})
    largest = data.largest_step()
    assert len(largest.sizes) == 2, "a sample of up to 160 tokens takes one strip"
    assert largest.tokens < 320


@pytest.fixture
def two_sources(media_dir: Path, pipeline_dir: Path, tmp_path: Path) -> Path:
    """Videos of two folders described as a stream, after the file of one broke."""
    sources = []
    for number, name in enumerate(("clips", "more")):
        folder = tmp_path / name
        shutil.copytree(media_dir, folder)
        (folder / "metadata.jsonl").write_text("".join(map(json_line, samples_of(media_dir)[number::2])))
        table = TableConfig(bucket_tokens=[60, 110, 150], bucket_frames=[1, 9, 17, 25])
        sources.append(SourceConfig(dataset=str(folder), table=table, target_fps=8.0))
    spec = recipe_of(str(pipeline_dir)).read_spec(str(pipeline_dir))
    prepare_stream(sources, spec=spec, say=lambda sentence: None)[0].save(tmp_path / "prepared")
    (tmp_path / "more" / samples_of(media_dir)[3]["file_name"]).write_bytes(b"broken")
    return tmp_path / "prepared"


def json_line(row: dict) -> str:
    return json.dumps(row) + "\n"


@pytest.fixture
def undecodable(media_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a video of the first source that fails while it is decoded."""
    name = samples_of(media_dir)[2]["file_name"]

    def failing(sample):
        if sample.source.path.endswith(f"clips/{name}"):
            raise MediaError(f"{name} cannot be decoded.")
        return load(sample)

    monkeypatch.setattr(collators, "load", failing)
    return name


@pytest.mark.slow
def test_unreadable_rows_of_a_stream_end_it_or_are_replaced_and_sources_are_known(
    media_dir, pipeline_dir, two_sources, undecodable: str, tmp_path: Path
) -> None:
    for settings in ({}, PACK):
        with pytest.raises(BucketingError, match=r"cannot be (read|decoded)"):
            list(loaded(pipeline_dir, two_sources, tmp_path / "out", **settings)[1])
        raising, _ = loaded(pipeline_dir, two_sources, tmp_path / "out", **settings)
        data, loader = loaded(pipeline_dir, two_sources, tmp_path / "out", **settings, on_error="replace")
        assert data.stream.fingerprint() == raising.stream.fingerprint(), "so that such a run can be resumed"
        assert data.sources == ("clips", "more")
        assert data.epoch_summary(loader)["sources"] == {"clips": {}, "more": {}}
        seen: Counter[int] = Counter()
        indices: list[int] = []
        replaced = 0
        for batch in loader:
            sources = data.rows_of(loader, batch, epoch=0).sources.tolist()
            seen.update(sources)
            indices += batch["index"]
            replaced += sum(new != old for new, old in zip(batch["index"], batch["planned_index"], strict=True))
        assert len(indices) == len(set(indices)) == len(samples_of(media_dir)) - 2
        assert seen == {0: len(samples_of(media_dir)[::2]) - 1, 1: len(samples_of(media_dir)[1::2]) - 1}
        assert replaced <= 1
        (line,) = data.after_epoch(loader, Accelerator(cpu=True), num_batches=1)
        assert line == "2 rows of the stream could not be read so far in this pass"
        lines = [json.loads(line) for line in (tmp_path / "out/logs/unreadable.jsonl").read_text().splitlines()]
        assert {undecodable in line["reason"] for line in lines} == {True, False}
        assert len({line["index"] for line in lines}) == 2


@pytest.mark.slow
def test_a_run_that_replaces_rows_of_a_stream_is_recounted_with_its_sources_and_resumes_exactly(
    media_dir, pipeline_dir, two_sources, undecodable: str, tmp_path: Path
) -> None:
    out, settings = tmp_path / "out", {"max_train_steps": 16, "num_train_epochs": 2, "checkpointing_steps": 1}
    config = streamed(pipeline_dir, two_sources, out, **settings, train_batch_size=1, on_error="replace")
    whole, drawn = fresh_run(config), samples(out)
    assert fresh_run(changed(config, resume_from_checkpoint="checkpoint-7")) == whole
    assert samples(out) == drawn
    review = review_run(Logs(out), min_fall=-9)
    assert review.passed, str(review)
    assert "in 2 passes over it, none twice in a pass" in str(review)
    named = review_sources(Logs(out))
    assert [line.split(": ")[1] for line in named] == ["source clips", "source more"]
    counts = Counter(source for line in drawn for source in line["sources"])
    assert [f"{counts[source]} samples" in line for source, line in enumerate(named)] == [True, True]
    losses = [json.loads(line) for line in (out / "logs" / "losses.jsonl").read_text().splitlines()]
    assert {name for line in losses for name in line} >= {"loss_by_source/clips", "loss_by_source/more"}


def test_a_stream_of_files_has_held_out_rows_of_a_prepared_folder(
    pipeline_dir, stream_dir, prepared_dir, tmp_path: Path
) -> None:
    config = streamed(pipeline_dir, stream_dir, tmp_path, validation_dataset_dir=str(prepared_dir))
    spec = recipe_of(str(pipeline_dir)).read_spec(str(pipeline_dir))
    held_out = make_held_out_data(config, spec, TINY_WAN)
    assert held_out is not None
    assert sum(held_out.bucket_counts().values()) == len(PreparedDataset.load(prepared_dir).dataset)


def test_what_only_a_plan_can_draw_does_not_stream(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(prepared_dir)
    weighted = dataclasses.replace(prepared, dataset=prepared.dataset.add_column(ROW_WEIGHT, [2.0] * 20))
    weighted.save(tmp_path / "weighted")
    with pytest.raises(BucketingError, match=r"rows that occur other than once per epoch, .* omit `streaming`"):
        loaded(pipeline_dir, tmp_path / "weighted", tmp_path)
    with pytest.raises(BucketingError, match=r"takes [0-9]+ tokens and exceeds `max_tokens=100`"):
        loaded(pipeline_dir, prepared_dir, tmp_path, max_tokens=100)
