"""Cached views of several sizes in packs: their sizes, the tokens of plans, and resumed epochs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from PIL import Image

from hf_bucketing import BucketBatchSampler, BucketingError, PackBatchSampler, Size, ViewRule
from hf_bucketing.buckets.assignment import AssignmentRule
from hf_bucketing.buckets.open_table import ImageSizes
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.caching.view_sizes import views_in_turn
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.loaders import RandomResize
from hf_bucketing.loaders.collators import PackCollator
from hf_bucketing.training.data import make_data, make_held_out_data
from hf_bucketing.training.logs import Logs
from hf_bucketing.training.recount import recount
from tests.caching.test_caching import cached, first, load_recipe, prepared
from tests.training.training_cases import TINY_WAN, in_process, run

__all__ = ["prepared"]

VIEWS, SIDE, SEED = 3, 32, 5
CENTRED = ViewRule(random_crop=False)


@pytest.fixture(scope="module")
def folder(prepared: PreparedDataset, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine rows in a cache of three views each, of which two have drawn sizes."""
    place = tmp_path_factory.mktemp("sizes")
    options: dict[str, Any] = {"batching": "pack", "views": CENTRED, "seed": SEED}
    data = cached(
        prepared, load_recipe(pipeline_dir), place / "cache", views_per_sample=VIEWS, random_resize=SIDE, **options
    )
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
        views = views_in_turn([row["index"] for row in rows], count=VIEWS, seed=0, epoch=epoch)
        position = {row["index"]: number for number, row in enumerate(rows)}
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


@pytest.mark.slow
def test_a_resumed_run_repeats_the_losses_of_a_whole_one(folder: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    settings = {
        "batching": "pack", "max_tokens": 400, "train_batch_size": None, "checkpointing_steps": 3,
        "max_train_steps": None, "num_train_epochs": 3,
    }  # fmt: skip
    whole = run(in_process(pipeline_dir, folder, tmp_path, **settings))
    AcceleratorState._reset_state(reset_partial_state=True)
    resumed = run(in_process(pipeline_dir, folder, tmp_path, **settings, resume_from_checkpoint="checkpoint-3"))
    assert resumed == whole
    assert len(whole) > 5
    assert not recount(Logs(tmp_path)).faults


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
    with pytest.raises(BucketingError, match=r"several sizes, .* one for each row. Without it, 3 epochs hold each"):
        data_of(folder, pipeline_dir, cached_views="all")


def test_what_has_no_such_sizes_is_refused_by_name(
    prepared: PreparedDataset, pipeline_dir: Path, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BucketingError, match="give `views_per_sample` too"):
        CacheConfig(folder="cache", batching="pack", random_resize=32)
    with pytest.raises(BucketingError, match="List a source once for each"):
        CacheConfig(folder="cache", random_resize=32, views_per_sample=2)
    images = ImageSizes(sizes=((32, 32),), rule=AssignmentRule())
    at_videos = replace(first(prepared, 1), open_table=replace(prepared.open_table, image_sizes=images))
    with pytest.raises(BucketingError, match="images cannot take both sizes"):
        cached(at_videos, load_recipe(pipeline_dir), tmp_path, batching="pack", views_per_sample=2, random_resize=32)
    info = PreparedDataset.load(folder).cache
    assert info is not None
    with pytest.raises(BucketingError, match="need a `seed`"):
        CachedCollator(info)


def test_in_buckets_a_source_that_is_listed_twice_is_cached_at_two_sizes(pipeline_dir: Path, tmp_path: Path) -> None:
    media = tmp_path / "media"
    media.mkdir()
    for number, (height, width) in enumerate([(96, 64), (64, 96), (64, 64)]):
        Image.new("RGB", (width, height), (40 * number, 90, 30)).save(media / f"{number}.png")
        (media / f"{number}.txt").write_text("a picture")
    sources = [
        SourceConfig(dataset=str(media), name=name, table=TableConfig(buckets=buckets))
        for name, buckets in {"small": "32,32;48,32;32,48", "large": "64,64;96,64;64,96"}.items()
    ]
    recipe = load_recipe(pipeline_dir)
    both = prepare(sources, spec=recipe.spec, say=lambda text: None)
    both = replace(both, dataset=both.dataset.add_column("index", range(6)))
    data, counts = cache_dataset(both, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    assert data is not None
    assert (counts["encoded"], counts["captions encoded"]) == (6, 2), "the caption of all, and the empty one"
    sampler = BucketBatchSampler(data.dataset["bucket_id"], table=data.table, batch_size=1)
    assert sorted(row for (row,) in sampler) == [*range(6)]
    sizes = [CachedCollator(data.cache)([data.dataset[row]])["size"][0][1:] for row in range(6)]  # type: ignore[arg-type]
    assert sizes == [(48, 32), (32, 48), (32, 32), (96, 64), (64, 96), (64, 64)]


def test_views_in_turn_begin_evenly_and_do_not_depend_on_other_rows() -> None:
    views = views_in_turn(np.arange(9000), count=3, seed=1, epoch=4)
    assert np.abs(np.bincount(views) - 3000).max() < 4 * np.sqrt(9000 * 2 / 9)
    assert views_in_turn([8000, 17], count=3, seed=1, epoch=4).tolist() == views[[8000, 17]].tolist()
