"""Cached views of several sizes: in packs, what an epoch holds, its tokens, and its resume; in buckets, as sources."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from PIL import Image

from hf_bucketing import BucketingError, PackBatchSampler, Size, ViewRule
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.buckets.assignment import AssignmentRule
from hf_bucketing.buckets.open_table import ImageSizes
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.caching.views import CACHED_VIEW, OF_VIEWS, views_as_rows, views_in_turn
from hf_bucketing.columns import PreparedDataset, column_array
from hf_bucketing.columns.apply import with_columns
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.columns.prepared_stream import prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.errors import FlagError
from hf_bucketing.loaders import RandomResize
from hf_bucketing.loaders.collators import PackCollator
from hf_bucketing.loaders.occurrences import OCCURRENCE
from hf_bucketing.models.samples import REFERENCES
from hf_bucketing.randomness import ROW
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.recount import recount
from tests.caching.test_caching import cached, first, load_recipe, prepared
from tests.caching.test_references import load_seeing, referenced
from tests.conftest import as_flags, run_script_here
from tests.training.training_cases import TINY_WAN, in_process, run

__all__ = ["prepared", "referenced"]

VIEWS, SIDE, SEED = 3, 32, 5
CENTRED = ViewRule(random_crop=False)


@pytest.fixture(scope="module")
def folder(prepared: PreparedDataset, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine rows in a cache of three views each, of which two have drawn sizes."""
    place = tmp_path_factory.mktemp("sizes")
    options: dict[str, Any] = {"batching": "pack", "views": CENTRED, "seed": SEED}
    recipe = replace(load_recipe(pipeline_dir), max_sequence_length=32)
    data = cached(prepared, recipe, place / "cache", views_per_sample=VIEWS, random_resize=SIDE, **options)
    data.save(place / "cached")
    return place / "cached"


def data_of(folder: Path, pipeline: Path, make: Any = make_data, **settings: Any) -> Any:
    packs = {"batching": "pack", "max_tokens": 600, "strip_length": 1, "train_batch_size": None, **settings}
    config = in_process(pipeline, folder, folder.parent / "out", **packs)
    return make(config, PreparedDataset.load(folder).spec, TINY_WAN)


def samples_of(data: Any, epoch: int) -> list[list[tuple[int, Size]]]:
    """Return the index and size of each sample of each batch of an epoch."""
    data.sampler.set_epoch(epoch)
    data.loader.collate_fn.set_epoch(epoch)
    return [list(zip(batch["index"], batch["size"], strict=True)) for batch in data.loader]


def test_sizes_are_those_of_training_from_files_and_plans_count_their_tokens(folder: Path, pipeline_dir: Path) -> None:
    data, spec = data_of(folder, pipeline_dir), PreparedDataset.load(folder).spec
    rows = list(data.dataset)
    from_files = PackCollator(spec, column="file", resize=RandomResize(spec=spec, min_side=SIDE, seed=SEED))
    drawn = {0: PackCollator(spec, column="file").target(rows)}
    for view in range(1, VIEWS):
        from_files.set_epoch(view - 1)
        drawn[view] = from_files.target(rows)
    seen = defaultdict(Counter)
    for epoch in range(2 * VIEWS):
        views = views_in_turn([row[ROW] for row in rows], count=VIEWS, seed=0, epoch=epoch)
        position = {row[ROW]: number for number, row in enumerate(rows)}
        batches = samples_of(data, epoch)
        assert sorted(index for batch in batches for index, _ in batch) == sorted(position)
        for batch, of_plan in zip(batches, data.sampler, strict=True):
            tokens = data.sampler.tokens_in(epoch)[of_plan]
            assert tokens.tolist() == [spec.num_tokens(size) for _, size in batch]
        for index, size in (sample for batch in batches for sample in batch):
            view = int(views[position[index]])
            assert size == drawn[view][position[index]]
            seen[index][view] += 1
    assert all(counts == dict.fromkeys(range(VIEWS), 2) for counts in seen.values()), "each once in as many epochs"
    assert len({size for view in range(VIEWS) for size in drawn[view]}) > len({*drawn[0]})


def test_a_resumed_epoch_holds_what_is_left_also_on_other_processes(folder: Path, pipeline_dir: Path) -> None:
    data, epoch = data_of(folder, pipeline_dir), 1
    tokens, config = data.sampler._num_tokens, replace(data.sampler.config, max_tokens=200)

    def sampler(num_processes: int) -> PackBatchSampler:
        made = PackBatchSampler(tokens, config=config, rejection=data.rejections, num_processes=num_processes)
        made.set_epoch(epoch)
        return made

    started = sampler(1)
    assert started.plan().num_steps > 2
    done = [row for batch in [*started][:2] for row in batch]
    for num_processes in (1, 2):
        later = sampler(num_processes)
        later.load_state_dict(started.state_dict(step=2))
        left = [row for batch in later for row in batch]
        assert sorted(done + left) == [*range(len(data.dataset))]


def test_an_epoch_of_all_views_holds_each_once_at_its_own_size_also_resumed_on_other_processes(
    folder: Path, pipeline_dir: Path
) -> None:
    data = data_of(folder, pipeline_dir, cached_views="all", max_tokens=200)
    whole = [(index, view) for index in data.dataset[ROW][:9] for view in range(VIEWS)]
    batches = read(data, [*data.sampler])
    assert sorted((index, view) for batch in batches for index, view, *_ in batch) == sorted(whole)
    for of_plan, batch in zip(data.sampler, batches, strict=True):
        tokens = [data.spec.num_tokens(size) for _, _, size, _ in batch]
        assert data.tokens_of(np.array(of_plan), epoch=0).tolist() == tokens
        assert sum(tokens) <= 200
    assert any(len({view for _, view, *_ in batch}) > 1 for batch in batches), "packs mix views"
    occurrences = {(index, view): before for batch in batches for index, view, _, before in batch}
    assert len({(index, before) for (index, _), before in occurrences.items()}) == len(whole), "noise of their own"
    for before, after in [(1, 2), (2, 3), (3, 1), (2, 2)]:
        started, resumed = (sampler_of(data, num_processes) for num_processes in (before, after))
        done = [*started][: 2 * before]
        resumed.load_state_dict(started.state_dict(step=2))
        rest = read(data, [*resumed])
        seen = [(index, view) for batch in [*read(data, done), *rest] for index, view, *_ in batch]
        assert sorted(seen) == sorted(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("files_anywhere")
@pytest.mark.parametrize("views", ["draw", "all"])
def test_references_count_beside_each_view_in_the_size_that_is_cached(
    views: str, referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    data = cached(
        first(referenced, 3), load_seeing(pipeline_dir), tmp_path / "cache", views_per_sample=2, random_resize=SIDE,
        batching="pack", views=CENTRED,
    )  # fmt: skip
    data.save(tmp_path / "cached")
    planned = data_of(tmp_path / "cached", pipeline_dir, cached_views=views)
    assert len(planned.dataset) == (3 if views == "draw" else 6)
    for row in range(len(planned.dataset)):
        batch = planned.loader.collate_fn([planned.dataset[row]])
        latents = [*batch["latents"], *batch["conditions"][REFERENCES][0]]
        tokens = sum(math.prod(part.shape[1:]) // math.prod(data.spec.patch) for part in latents)
        assert planned.tokens_of(np.array([row]), epoch=0).tolist() == [tokens]


def sampler_of(data: Any, num_processes: int) -> PackBatchSampler:
    return PackBatchSampler(data.sampler._num_tokens, config=data.sampler.config, num_processes=num_processes)


def read(data: Any, batches: list[list[int]]) -> list[list[tuple[int, int, Size, int]]]:
    """Return the index, view, size and occurrence of each sample of batches."""
    names = ("index", CACHED_VIEW, "size", OCCURRENCE)
    made = (data.loader.collate_fn(data.dataset.__getitems__(batch)) for batch in batches)
    return [list(zip(*(batch[name] for name in names), strict=True)) for batch in made]


def test_rows_of_views_keep_rejections_and_weights_and_workers_are_sent_no_sizes(
    folder: Path, pipeline_dir: Path
) -> None:
    prepared = PreparedDataset.load(folder)
    width, weights = column_array(prepared.dataset, "width").copy(), np.arange(1.0, 10.0)
    width[4] = -1
    dataset = with_columns(prepared.dataset, {"width": width, ROW_WEIGHT: weights})
    rows = views_as_rows(replace(prepared, dataset=dataset.select([*range(1, 9)]))).dataset
    assert [row for row, tokens in enumerate(rows["num_tokens"]) if not tokens] == [3, 11, 19]
    assert [row for row, bucket in enumerate(rows["bucket_id"]) if bucket < 0] == [3, 11, 19]
    assert rows[ROW_WEIGHT][:] == [*weights[1:]] * VIEWS
    assert rows[CACHED_VIEW][:] == [0] * 8 + [1] * 8 + [2] * 8
    data = data_of(folder, pipeline_dir, cached_views="all")
    assert {*data.dataset.column_names} - {*data.loader.dataset.column_names} == {*OF_VIEWS}


@pytest.mark.slow
@pytest.mark.parametrize("views", ["draw", "all"])
def test_a_resumed_run_repeats_the_losses_of_a_whole_one(
    views: str, folder: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    epochs = 2 if views == "draw" else 1
    settings = {
        "batching": "pack", "max_tokens": 400, "train_batch_size": None, "checkpointing_steps": 3,
        "max_train_steps": None, "num_train_epochs": epochs, "cached_views": views,
    }  # fmt: skip
    whole = run(in_process(pipeline_dir, folder, tmp_path, **settings))
    AcceleratorState._reset_state(reset_partial_state=True)
    resumed = run(in_process(pipeline_dir, folder, tmp_path, **settings, resume_from_checkpoint="checkpoint-3"))
    assert resumed == whole
    assert len(whole) > 5
    counted = recount(Logs(tmp_path))
    assert not counted.faults
    each = 9 if views == "draw" else 9 * VIEWS
    assert [(leg.different, leg.samples, leg.plan["kept"]) for (leg,) in counted.epochs.values()] == [
        (each,) * 3
    ] * epochs


@pytest.mark.slow
def test_tokens_that_fit_are_searched_for_with_the_first_views(
    folder: Path, pipeline_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packs = {"batching": "pack", "max_tokens": "auto", "train_batch_size": None, "max_train_steps": 1}
    with caplog.at_level("INFO"):
        losses = run(in_process(pipeline_dir, folder, tmp_path, **packs))
    assert len(losses) == 1
    assert "of several sizes, each once in as many epochs" in caplog.text


def test_one_size_remains_for_the_first_view_and_for_held_out_rows(folder: Path, pipeline_dir: Path) -> None:
    whole = data_of(folder, pipeline_dir, cached_views="first")
    own = [PackCollator(whole.spec, column="file").target([row])[0] for row in whole.dataset]
    for epoch in (0, 1):
        assert Counter(size for batch in samples_of(whole, epoch) for _, size in batch) == Counter(own)
    held_out = data_of(folder, pipeline_dir, make_held_out_data, validation_split=0.4)
    assert held_out.loader.collate_fn.first_view
    assert len(
        data_of(folder, pipeline_dir, make_held_out_data, validation_split=0.4, cached_views="all").dataset
    ) == (len(held_out.dataset))


def test_what_has_no_such_sizes_is_refused_by_name(
    prepared: PreparedDataset, pipeline_dir: Path, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BucketingError, match="give `views_per_sample` too"):
        CacheConfig(folder="cache", batching="pack", random_resize=32)
    with pytest.raises(BucketingError, match="Prepare with `each_budget`"):
        CacheConfig(folder="cache", random_resize=32, views_per_sample=2)
    images = ImageSizes(sizes=((32, 32),), rule=AssignmentRule())
    at_videos = replace(first(prepared, 1), open_table=replace(prepared.open_table, image_sizes=images))
    with pytest.raises(BucketingError, match="images cannot take both sizes"):
        cached(at_videos, load_recipe(pipeline_dir), tmp_path, batching="pack", views_per_sample=2, random_resize=32)
    info = PreparedDataset.load(folder).cache
    assert info is not None
    with pytest.raises(BucketingError, match="need a `seed`"):
        CachedCollator(info)


BUDGETS = {"bucket_tokens": [6, 24], "bucket_frames": [1], "each_budget": True}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures with captions, the last of them too small for the larger of `BUDGETS`."""
    media = tmp_path / "media"
    media.mkdir()
    for number, (height, width) in enumerate([(96, 64), (64, 96), (48, 32)]):
        Image.new("RGB", (width, height), (40 * number, 90, 30)).save(media / f"{number}.png")
        (media / f"{number}.txt").write_text("a picture")
    return media


def test_in_buckets_each_sample_is_prepared_and_cached_at_every_budget(
    pictures: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    source = SourceConfig(dataset=str(pictures), table=TableConfig(**BUDGETS), weight=3.0)
    recipe, said = load_recipe(pipeline_dir), list[str]()
    rows = prepare(source, spec=recipe.spec, native_sizes=[(32, 32)], say=said.append)
    assert rows.sources == ("media-6", "media-24")
    assert len(said) == 4, "files are read once"
    assert rows.dataset["rejection"][:] == ["none"] * 5 + ["too_small"]
    rows = replace(rows, dataset=rows.dataset.add_column(ROW, range(6)))
    data, counts = cache_dataset(rows, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    assert data is not None
    assert (counts["encoded"], counts["captions encoded"]) == (5, 2), "the caption of all, and the empty one"
    sizes = [CachedCollator(data.cache)([data.dataset[row]])["size"][0][1:] for row in range(5)]  # type: ignore[arg-type]
    assert sizes == [(48, 32), (32, 48), (48, 32), (96, 64), (64, 96)]
    assert rows.dataset[ROW_WEIGHT][:] == pytest.approx([2.5 / 3] * 3 + [2.5 / 2] * 3)
    stream, _ = prepare_stream(source, spec=recipe.spec, say=said.append)
    assert [(part.source.name, part.source.weight) for part in stream.parts] == [("media-6", 1.5), ("media-24", 1.5)]
    with pytest.raises(FlagError, match="--each_budget goes with --bucket_tokens"):
        TableConfig(buckets="32,32", each_budget=True)


@pytest.mark.slow
def test_a_run_from_a_cache_of_every_budget_holds_each_sample_at_each_once(
    pictures: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    prepared_dir, model = tmp_path / "prepared", ("--pretrained_model_name_or_path", pipeline_dir)
    flags = as_flags(dataset=pictures, bucket_tokens="6,24", bucket_frames=1, output_dir=prepared_dir)
    run_script_here("prepare_dataset.py", *flags, *model, "--each_budget", "--bucket_sizes", "none")
    folders = as_flags(dataset_dir=prepared_dir, cache_dir=tmp_path / "cache", output_dir=tmp_path / "cached")
    run_script_here("cache_latents.py", *folders, *model, max_sequence_length=32)
    settings = {"max_train_steps": None, "num_train_epochs": 2, "train_batch_size": 1, "checkpointing_steps": 3}
    whole = run(in_process(pipeline_dir, tmp_path / "cached", tmp_path / "out", **settings))
    AcceleratorState._reset_state(reset_partial_state=True)
    settings["resume_from_checkpoint"] = "checkpoint-3"
    assert run(in_process(pipeline_dir, tmp_path / "cached", tmp_path / "out", **settings)) == whole
    logs = Logs(tmp_path / "out")
    assert not recount(logs).faults
    seen = Counter((line["epoch"], source) for line in logs.batches for source in line["sources"])
    assert seen == {(epoch, source): 3 - source for epoch in (0, 1) for source in (0, 1)}


def test_views_in_turn_begin_evenly_and_do_not_depend_on_other_rows() -> None:
    views = views_in_turn(np.arange(9000), count=3, seed=1, epoch=4)
    assert np.abs(np.bincount(views) - 3000).max() < 4 * np.sqrt(9000 * 2 / 9)
    assert views_in_turn([8000, 17], count=3, seed=1, epoch=4).tolist() == views[[8000, 17]].tolist()
