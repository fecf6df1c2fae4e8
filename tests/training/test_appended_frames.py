"""Runs that append frames of their samples: what plans, streams and memory count, and runs from files and caches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from hf_bucketing import BucketingError, Size
from hf_bucketing.batching.drawing import latent_frames_of
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.appended import AppendedFrames
from hf_bucketing.conditions.condition import Condition
from hf_bucketing.conditions.names import KEYFRAMES
from hf_bucketing.conditions.shares import Drawn, read_conditions
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import KEYFRAME_PLACES
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.gpus import TimeConfig
from hf_bucketing.planner.memory import sample_shape
from hf_bucketing.planner.rows import DataRows
from hf_bucketing.planner.settings import MachineConfig, PlanConfig
from hf_bucketing.planner.suggestion import Suggester
from hf_bucketing.planner.time import Speed
from hf_bucketing.planner.ways import ways_of
from hf_bucketing.randomness import ROW
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from tests.batching.test_drawing import step_of
from tests.conftest import run_script_here
from tests.training.condition_runs import ConditionRuns, each_mode, loader_of
from tests.training.training_cases import run

PIPELINE = "ltx-condition"
CONDITION = "first_frame+appended_keyframes@2:0.5,none:0.5"
CLIPS = (Clip(9, 64, 96, 8), Clip(5, 64, 64, 8), Clip(1, 64, 64))
TOKENS = {9: (3 + 2) * 8 * 12, 5: (2 + 1) * 8 * 8, 1: 8 * 8}
"""Tokens of a sample by its frames, with those of the most frames that are appended: 2, but 1 of 2 latent frames."""


@pytest.fixture(scope="module")
def runs(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> ConditionRuns:
    """Videos and images, and a cache of one entry at a time, as packs are encoded."""
    folder = tmp_path_factory.mktemp("appended")
    made = ConditionRuns(
        folder=folder,
        pipeline=tiny_folder(PIPELINE),
        common={"lora_rank": 2, "max_sequence_length": 16, "condition": CONDITION},
        bucket={"max_tokens": 512, "train_batch_size": 4},
        pack={"max_tokens": 512},
    )
    make_media_dataset(folder / "clips", num_samples=6, clips=CLIPS)
    made.prepare([folder / "clips"])
    made.cache(condition=CONDITION, batch_size=1)
    return made


def load(runs: ConditionRuns) -> Recipe:
    return recipe_of(str(runs.pipeline)).load(str(runs.pipeline), max_sequence_length=16)


def draw(recipe: Recipe, batch: dict[str, Any], condition: str, *, epoch: int) -> list[Drawn]:
    shares, stride = read_conditions(condition).of(None), recipe.spec.temporal_stride
    counts = enumerate(latent_frames_of(batch, recipe.spec))
    return [shares.draw(0, epoch, row, latent_frames=count, stride=stride) for row, count in counts]


@each_mode
def test_appended_frames_count_in_limits_and_in_the_largest_step(mode: str, runs: ConditionRuns, tmp_path) -> None:
    data = runs.data(runs.settings(mode, tmp_path))
    if "stream" not in mode:
        assert {tuple(pair) for pair in zip(data.dataset["num_frames"], data.num_tokens.tolist(), strict=True)} == {
            *TOKENS.items()
        }
    loader = loader_of(data)
    for batch in loader:
        rows = data.rows_of(loader, batch, epoch=0)
        assert rows.tokens.tolist() == [TOKENS[size[0]] for size in batch["size"]]
        assert rows.tokens.sum() <= 512
    largest = data.largest_step()
    sizes, tokens = largest.sizes, largest.tokens
    assert tokens == sum(TOKENS[size.frames] for size in sizes)
    assert {*largest.references} == {()}
    for size, shown in zip(sizes, largest.conditions.sizes(sizes, spec=data.spec), strict=True):
        assert shown == (size._replace(frames=1),) * {9: 2, 5: 1, 1: 0}[size.frames]


def test_the_memory_of_a_sample_is_planned_with_the_most_appended_frames(runs: ConditionRuns) -> None:
    components = read_components(str(runs.pipeline))
    with_, without = (
        sample_shape(
            components,
            PlanConfig.from_flat(condition=condition, mixed_precision="bf16", train_batch_size=1),
            Size(9, 64, 96),
        )
        for condition in (CONDITION, None)
    )
    assert with_.tokens == TOKENS[9]
    assert with_.tokens - without.tokens == 2 * 8 * 12
    assert len(with_.references) == 2


@pytest.mark.slow
def test_a_report_counts_appended_frames_and_says_what_they_cost(runs: ConditionRuns, tmp_path: Path) -> None:
    files = {"json": tmp_path / "report.json", "html": tmp_path / "report.html"}
    flags = {"num_processes": 1, "max_area": "none", **files}
    printed = run_script_here("report_buckets.py", runs.folder / "prepared", **flags, condition=CONDITION).stdout
    counted = json.loads(files["json"].read_text())
    own, share = 2 * (3 * 8 * 12 + 2 * 8 * 8 + 8 * 8), 2 * (2 * 8 * 12 + 8 * 8) / (2 * sum(TOKENS.values()))
    assert counted["appended"] == {"most": 2, "token_share": pytest.approx(share)}
    said = f"at most 2, whatever is drawn; they are {share:.0%} of all tokens. Steps and the comparison count them;"
    assert said in " ".join(printed.split())
    assert said in files["html"].read_text()
    run_script_here("report_buckets.py", runs.folder / "prepared", **flags)
    without = json.loads(files["json"].read_text())
    assert without["appended"] is None
    for strategy, alone in zip(counted["strategies"], without["strategies"], strict=True):
        assert (alone["real_tokens"], strategy["real_tokens"]) == (own, 2 * sum(TOKENS.values()))


def test_the_page_of_the_data_says_what_the_first_epoch_shows(runs: ConditionRuns, tmp_path: Path) -> None:
    flags = {"html": tmp_path / "data.html", "max_thumbnails": 0, "seed": 3}
    run_script_here("report_data.py", runs.folder / "prepared", **flags, condition=CONDITION)
    (part,) = (tmp_path / "data_files").glob("*.js")
    shares, seen = read_conditions(CONDITION).of(None), set()
    for row in PreparedDataset.load(runs.folder / "prepared").dataset:
        latent_frames = (row["num_frames"] - 1) // 4 + 1
        drawn = shares.draw(3, 0, row[ROW], latent_frames=latent_frames, stride=4)
        said = drawn.name
        if drawn.appended:
            said += f"; frames of latent frames {', '.join(map(str, drawn.appended))} are appended"
            said += "; frames 0 are shown in place"
        assert said in part.read_text()
        seen.add(said)
    assert len(seen) > 2


@pytest.mark.every
def test_a_suggested_run_counts_appended_frames_in_plans_memory_time_and_cache(runs: ConditionRuns) -> None:
    components = read_components(str(runs.pipeline))
    rows = DataRows.of_prepared(PreparedDataset.load(runs.folder / "prepared"))
    table = PreparedDataset.load(runs.folder / "prepared").table
    machine, speed = MachineConfig(gpu_memory=1.0), Speed.of(TimeConfig(), gpu_memory=24)
    found = []
    for condition in ("first_frame", CONDITION):
        base = PlanConfig.from_flat(
            device="cpu", mixed_precision="no", max_sequence_length=16, lora_rank=4,
            condition=condition,
        )  # fmt: skip
        buckets = next(ways_of({"table": (None, table)}, rows.sizes, spec=components.spec))
        suggested = Suggester(components, rows, machine=machine, base=base, speed=speed).suggest([buckets])
        found.append(sorted(suggested.candidates, key=lambda run: run.config.run.batches.token_limit or 0))
    for alone, appending in zip(*found, strict=True):
        assert appending.way.targets.all_tokens.tolist() == [TOKENS[frames] for frames in rows.sizes.frames]
        assert appending.memory.shape.length == TOKENS[9] == alone.memory.shape.length + 2 * 8 * 12
        assert appending.config.samples.reference_sizes is None
        assert appending.time.seconds > alone.time.seconds
        assert appending.once.seconds > alone.once.seconds
        own, frames = 2 * (3 * 8 * 12 + 2 * 8 * 8 + 8 * 8), 2 * (2 * 8 * 12 + 8 * 8)
        values = 4 * components.vae.config["latent_channels"]
        assert appending.disk.cache - alone.disk.cache == values * frames
        assert alone.disk.cache > values * own


def test_a_cache_holds_the_frames_that_any_epoch_appends(runs: ConditionRuns, tmp_path: Path) -> None:
    """Bit for bit those that a step encodes of files; without the condition, a step is shown none of them."""
    recipe, appended = load(runs), 0
    step, batches = step_of(recipe, CONDITION), []
    for mode in ("pack", "cached"):
        data = runs.data(runs.settings(mode, tmp_path, **({"random_crop": False} if mode == "pack" else {})))
        batches.append(data.loader.collate_fn([data.dataset[row] for row in range(6)]))
    assert KEYFRAMES not in step_of(recipe, None).media(batches[1], [])
    for epoch in range(5):
        drawn = draw(recipe, batches[0], CONDITION, epoch=epoch)
        files, cached = (step.media(batch, drawn) for batch in batches)
        assert files.keys() == cached.keys()
        assert files.get(KEYFRAME_PLACES) == cached.get(KEYFRAME_PLACES)
        for own, held in zip(files.get(KEYFRAMES, []), cached.get(KEYFRAMES, []), strict=True):
            assert len(own) == len(held)
            assert all(torch.equal(*pair) for pair in zip(own, held, strict=True))
            appended += len(held)
    assert appended > 10


def test_a_cache_without_the_frames_that_a_run_appends_is_refused(runs: ConditionRuns, tmp_path: Path) -> None:
    runs.cache("last", condition="appended_last_frame:0.2,none:0.8", batch_size=1)
    ends, anywhere = "appended_last_frame:0.5,first_frame:0.5", "appended_last_frame:0.5,appended_keyframes:0.5"
    folders = {name: str(runs.folder / name) for name in ("last", "cached")}
    data = runs.data(runs.settings("cached", tmp_path, dataset_dir=folders["last"], condition=ends))
    batch, recipe = data.loader.collate_fn([data.dataset[row] for row in range(6)]), load(runs)
    held = step_of(recipe, ends).media(batch, draw(recipe, batch, ends, epoch=0))[KEYFRAMES]
    assert {len(of_sample) for of_sample in held} == {0, 1}
    assert read_conditions(f"{ends};stills=none").appended_frames == "all", "stills append as many in a stack"
    for condition in (ends, anywhere):
        runs.data(runs.settings("cached", tmp_path, dataset_dir=folders["cached"], condition=condition))
    with pytest.raises(
        BucketingError,
        match=r"does not hold all frames that may be drawn.* --condition appended_last_frame:0.5,appended_k",
    ):
        runs.data(runs.settings("cached", tmp_path, dataset_dir=folders["last"], condition=anywhere))


def test_a_cache_of_frames_that_the_model_is_not_shown_is_refused(pipeline_dir: Path, prepared_dir: Path, tmp_path):
    refused = run_script_here(
        "cache_latents.py", check=False, dataset_dir=prepared_dir, pretrained_model_name_or_path=pipeline_dir,
        cache_dir=tmp_path / "cache", output_dir=tmp_path / "cached", condition="appended_last_frame",
    )  # fmt: skip
    assert refused.returncode
    assert "`appended_last_frame`, but a WanPipeline" in refused.stderr
    assert not (tmp_path / "cached").exists()


def test_frames_that_the_text_encoder_sees_count_twice(tiny_folder: Callable[[str], Path]) -> None:
    """MiniMax-H3: a clip of 2 latent frames of 2×3 tokens, and its first and last frame, each also 6 + 118 of text."""
    components, size = read_components(str(tiny_folder("minimax-h3"))), Size(5, 64, 96)
    both = "appended_first_frame+appended_last_frame:0.1,none:0.9"
    shapes = {
        condition: sample_shape(
            components, PlanConfig.from_flat(condition=condition, mixed_precision="bf16", train_batch_size=1), size
        )
        for condition in (None, "appended_last_frame", both)
    }
    none, one, two = shapes.values()
    assert [shape.tokens for shape in shapes.values()] == [12, 12 + 6, 12 + 2 * 6]
    assert [shape.text_tokens - none.text_tokens for shape in (one, two)] == [6 + 118, 2 * (6 + 118)]
    frames = AppendedFrames(2, first=True, text=118)
    counted = frames.num_tokens([size, size._replace(frames=1), (0, 0, 0)], spec=components.spec)
    assert counted.tolist() == [2 * (6 + 6 + 118), 0, 0]


@pytest.mark.cases(slow=("bucket", "cached", "streamed-packs"))
@each_mode
def test_a_run_resumes_exactly(mode: str, runs: ConditionRuns, tmp_path: Path) -> None:
    settings = {"max_train_steps": 4, "checkpointing_steps": 2, "num_train_epochs": 4}
    whole = run(runs.settings(mode, tmp_path / "out", **settings))
    again = runs.settings(mode, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2")
    assert run(again) == whole
    without = {**settings, "condition": "first_frame:0.5,none:0.5"}
    assert run(runs.settings(mode, tmp_path / "without", **without)) != whole


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_run_from_a_cache_equals_the_run_from_files(batching: str, runs: ConditionRuns, tmp_path: Path) -> None:
    """Bit for bit: in all epochs where views are fixed, and in the first one where the cache holds its views."""
    views: dict[str, Any]
    for name, views, epochs in (("fixed", {}, 2), ("flipped", {"flip_probability": 0.5}, 1)):
        runs.cache(f"{batching}-{name}", batching=batching, condition=CONDITION, batch_size=1, **views)
        settings: dict[str, Any] = {"max_train_steps": None, "num_train_epochs": epochs, "train_batch_size": 1}
        settings |= {"max_tokens": None} if batching == "bucket" else {}
        files = run(runs.settings(batching, tmp_path / f"{name}-files", random_crop=False, **views, **settings))
        cached = str(runs.folder / f"{batching}-{name}")
        assert run(runs.settings(batching, tmp_path / name, dataset_dir=cached, **settings)) == files
        assert len(files) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pack", "cached"])
def test_tokens_that_fit_are_searched_with_appended_frames(mode: str, runs: ConditionRuns, tmp_path: Path) -> None:
    run(runs.settings(mode, tmp_path / "out", max_tokens="auto", max_train_steps=1))
    assert (tmp_path / "out" / "training_config.json").read_text().count('"max_tokens": "auto"') == 0


@pytest.mark.cases(slow=("streamed-packs",))
@pytest.mark.parametrize("mode", ["stream", "streamed-packs"])
def test_a_stream_counts_frames_that_texts_see_and_resumes_exactly(
    mode: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """MiniMax-H3: clips of 2×3 tokens in each of 2 latent frames are shown two frames at most, of 6 + 6 + 118 each."""
    shares = "appended_first_frame+appended_last_frame:0.6,appended_last_frame:0.2,none:0.2"
    made = ConditionRuns(
        folder=tmp_path,
        pipeline=tiny_folder("minimax-h3"),
        common={"max_sequence_length": 16, "condition": shares},
        bucket={"train_batch_size": 2},
        pack={"max_tokens": 900},
    )
    make_media_dataset(tmp_path / "clips", num_samples=6, clips=(Clip(5, 64, 96, 8), Clip(5, 64, 64, 8)))
    made.prepare([tmp_path / "clips"], bucket_frames="5")
    settings = {"max_train_steps": 4, "checkpointing_steps": 2, "num_train_epochs": 4}
    whole = run(made.settings(mode, tmp_path / "out", **settings))
    again = made.settings(mode, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2")
    assert run(again) == whole
    config, spec = (
        made.settings(mode, tmp_path / "counted"),
        recipe_of(str(made.pipeline)).read_spec(str(made.pipeline)),
    )
    tokens = ModelTokens(
        width=24, text_tokens=16, conditions=(Condition(name=KEYFRAMES, enters="tokens", text_tokens=118),)
    )
    data = make_streamed_data(config, spec, tokens, opened=open_stream(config, Accelerator(cpu=True)))
    loader = loader_of(data)
    for batch in itertools.islice(loader, 3):
        assert {*data.rows_of(loader, batch, epoch=0).tokens.tolist()} <= {
            16 + 12 + 2 * (6 + 6 + 118),
            16 + 8 + 2 * (4 + 4 + 118),
        }
