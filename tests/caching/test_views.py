"""Several views of each sample in a cache: what is encoded, which of them an epoch holds, and runs on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from hf_bucketing import (
    BucketBatchSampler,
    BucketCollator,
    BucketingError,
    BucketTable,
    ColumnError,
    MediaError,
    Size,
    ViewRule,
)
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.caching.store import TensorCache
from hf_bucketing.caching.views import describe_latents, has_latents
from hf_bucketing.columns import CacheInfo, PreparedDataset, map_columns
from hf_bucketing.loaders import NumberedRows
from hf_bucketing.loaders.occurrences import OCCURRENCE
from hf_bucketing.media.rows import FileSample
from hf_bucketing.media.sample import LoadedSample, load
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.recount import recount
from hf_bucketing.units import format_bytes
from tests.caching.test_caching import cached, first, flags, prepared
from tests.caching.test_latents import TABLE, Encoder, columns, media, rows_of
from tests.caching.test_references import load_seeing, referenced
from tests.conftest import run_script_here
from tests.training.training_cases import TINY_WAN, in_process, run

__all__ = ["media", "prepared", "referenced"]

RANDOM = ViewRule(flip_probability=0.5)
CENTRED = ViewRule(random_crop=False)
VIEWS = 4


def test_the_first_view_is_not_random_and_the_others_are_those_of_training_from_files(media: Path) -> None:
    rows = map_columns(rows_of(media), columns(media, Encoder(), views=RANDOM, seed=5, views_per_sample=VIEWS))
    rows = rows.add_column("caption", [""] * len(rows))
    cache = TensorCache(media / "cache")
    drawn = BucketCollator(TABLE, column="file", root=str(media), views=RANDOM, seed=5)
    centred = replace(drawn, views=CENTRED)
    encode = Encoder()
    different = 0
    for row in rows:
        for view, key in enumerate(row["latents_key"]):
            collator = drawn if view else centred
            collator.set_epoch(max(0, view - 1))
            files = collator([row])
            tensors, about = cache.read(key)
            assert torch.equal(tensors["latents"], encode(files["pixel_values"], {})["latents"][0])
            assert about == {name: [*files[name][0]] for name in ("size", "crop")} | {
                name: files[name][0] for name in ("flip", "fps")
            }
        different += len({*row["latents_key"]})
    assert different > 3 * len(rows), "views differ"


def test_caches_of_one_view_and_of_several_share_entries(media: Path) -> None:
    options: dict[str, Any] = {"views": RANDOM, "seed": 5}
    one, several = (columns(media, Encoder(), **options, views_per_sample=views) for views in (1, 2))
    drawn = map_columns(rows_of(media), one)["latents_key"][:]
    centred = map_columns(rows_of(media), columns(media, Encoder(), views=CENTRED))["latents_key"][:]
    assert map_columns(rows_of(media), several)["latents_key"][:] == [
        [*pair] for pair in zip(centred, drawn, strict=True)
    ]
    assert several.counts == {"found": len(drawn)}


def test_a_row_is_rejected_whole_if_one_view_cannot_be_read(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_some(sample: FileSample) -> LoadedSample:
        if sample.source.path.endswith("1.png") and sample.view.flip:
            raise MediaError("broken")
        return load(sample)

    monkeypatch.setattr("hf_bucketing.caching.columns.load", load_some)
    rows, flipped = rows_of(media), replace(CENTRED, flip_probability=1.0)
    latents = columns(media, Encoder(), views=flipped, views_per_sample=2, on_error="reject")
    rows = map_columns(rows, latents)
    keys = rows["latents_key"][:]
    assert np.flatnonzero(~has_latents(rows)).tolist() == [1]
    assert [row for row, views in enumerate(keys) if "" in views] == [1]
    assert keys[1] == ["", ""]
    assert latents.counts == {"unreadable": 1, "encoded": len(rows) - 1}


def test_views_that_would_be_equal_are_refused() -> None:
    with pytest.raises(BucketingError, match=r"`views_per_sample=3` would encode equal views"):
        CacheConfig(folder="cache", views_per_sample=3)
    with pytest.raises(BucketingError, match="views_per_sample"):
        CacheConfig(folder="cache", views_per_sample=0)
    assert CacheConfig(folder="cache", views=ViewRule(random_crop=False, flip_probability=0.5), views_per_sample=3)


ROWS = 60


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[CacheInfo, list[dict[str, Any]]]:
    """Rows of a cache whose latents are the numbers of their views."""
    cache = TensorCache(tmp_path_factory.mktemp("cache"))
    for view in range(VIEWS):
        about = {"size": Size(1, 8, 8), "crop": (0, 0, 8, 8), "flip": False, "fps": 0.0}
        cache.write(f"{view}", {"latents": torch.full((1, 1, 1, 1), view)}, about=about)
    info = CacheInfo(
        folder=str(cache.folder), batching="bucket", latents_model="m", text_model=None, empty_text_key=None, views={},
        views_per_sample=VIEWS,
    )  # fmt: skip
    keys = [f"{view}" for view in range(VIEWS)]
    return info, [{"latents_key": keys, "bucket_id": 0, ROW: row} for row in range(ROWS)]


def views_of(collator: CachedCollator, rows: list[dict[str, Any]], *, epoch: int = 0) -> list[int]:
    collator.set_epoch(epoch)
    batch: list[int] = collator(rows)["latents"].flatten().tolist()
    return batch


def test_each_view_is_drawn_equally_often_by_seed_epoch_and_index(numbered) -> None:
    info, rows = numbered
    collator = CachedCollator(info, caption_column=None, seed=3)
    epochs = [views_of(collator, rows, epoch=epoch) for epoch in range(40)]
    counts = np.bincount(np.ravel(epochs), minlength=VIEWS)
    assert np.abs(counts - 600).max() < 4 * np.sqrt(600 * 0.75), "four standard deviations"
    assert np.abs(np.bincount([epoch[7] for epoch in epochs], minlength=VIEWS) - 10).max() < 4 * np.sqrt(10 * 0.75)
    again = CachedCollator(info, caption_column=None, seed=3)
    assert views_of(again, rows[::-1], epoch=7)[::-1] == epochs[7], "whatever batch a row is in"
    assert views_of(CachedCollator(info, caption_column=None, seed=4), rows, epoch=7) != epochs[7]
    assert views_of(CachedCollator(info, caption_column=None, seed=3, first_view=True), rows, epoch=7) == [0] * ROWS
    unseeded = CachedCollator(info, caption_column=None)
    assert len({*views_of(unseeded, rows)}) == VIEWS
    with pytest.raises(ColumnError, match="drawn by the number of a row"):
        views_of(collator, [{name: cell for name, cell in rows[0].items() if name != ROW}])


def test_occurrences_of_a_row_take_all_views_in_turn(numbered) -> None:
    info, rows = numbered
    collator = CachedCollator(info, caption_column=None, seed=3)
    for row in rows[:5]:
        occurrences = views_of(collator, [{**row, OCCURRENCE: number} for number in range(2 * VIEWS)])
        assert sorted(occurrences[:VIEWS]) == [*range(VIEWS)]
        assert occurrences[VIEWS:] == occurrences[:VIEWS]
        assert occurrences[0] == views_of(collator, [row])[0]


def test_an_epoch_of_all_views_holds_each_once_also_resumed_on_other_processes(numbered) -> None:
    info, rows = numbered
    collator = CachedCollator(info, caption_column=None, seed=3)
    dataset = NumberedRows(_Rows(rows))  # type: ignore[arg-type]

    def sampler(num_processes: int) -> BucketBatchSampler:
        table = BucketTable(sizes=(Size(1, 8, 8),))
        weights = np.full(ROWS, VIEWS)
        return BucketBatchSampler([0] * ROWS, table=table, batch_size=5, weights=weights, num_processes=num_processes)

    def read(batches: list[list[int]]) -> list[tuple[int, int]]:
        samples = [row for batch in batches for row in dataset.__getitems__(batch)]
        return [*zip([row[ROW] for row in samples], views_of(collator, samples), strict=True)]

    started = sampler(2)
    done = read([*started][: 2 * 6])
    for num_processes in (1, 2, 3):
        later = sampler(num_processes)
        later.load_state_dict(started.state_dict(step=6))
        epoch = Counter(done + read([*later]))
        assert epoch == dict.fromkeys([(row, view) for row in range(ROWS) for view in range(VIEWS)], 1)


class _Rows(list[dict[str, Any]]):
    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        return [self[row] for row in rows]


@pytest.fixture(scope="module")
def several_dir(prepared: PreparedDataset, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rows of the prepared media in a cache of two views each."""
    folder = tmp_path_factory.mktemp("several")
    first(prepared, 6).save(folder / "prepared")
    run_script_here(
        "cache_latents.py", *flags(folder / "prepared", pipeline_dir, folder), "--random_crop", True,
        "--flip_probability", 0.5, "--views_per_sample", 2, "--max_sequence_length", 32,
    )  # fmt: skip
    return folder / "cached"


def test_the_script_names_the_views_and_a_run_plans_them(several_dir: Path, pipeline_dir: Path, tmp_path) -> None:
    prepared = PreparedDataset.load(several_dir)
    assert prepared.cache is not None
    assert prepared.cache.views_per_sample == 2
    size = sum(
        path.stat().st_size for path in several_dir.parent.rglob("cache/*/*") if b"latents" in path.read_bytes()
    )
    assert describe_latents(prepared) == f"6 rows in 2 views, about {format_bytes(size)}"
    run_script_here("report_data.py", several_dir, "--html", tmp_path / "data.html", "--max_thumbnails", 0)
    assert describe_latents(prepared) in (tmp_path / "data.html").read_text()
    spec = recipe_of(str(pipeline_dir)).read_spec(str(pipeline_dir))

    def data_of(make: Any = make_data, folder: Path = several_dir, **settings: Any) -> Any:
        return make(in_process(pipeline_dir, folder, tmp_path / "out", **settings), spec, TINY_WAN)

    assert len(data_of().sampler.plan().indices) == 6
    assert len(data_of(cached_views="all").sampler.plan().indices) == 12
    assert not data_of().loader.collate_fn.first_view
    assert data_of(cached_views="first").loader.collate_fn.first_view
    held_out = data_of(make_held_out_data, cached_views="all", validation_split=0.4)
    assert held_out.loader.collate_fn.first_view
    assert len(held_out.sampler.plan().indices) == len(held_out.dataset)
    with pytest.raises(BucketingError, match=r"Omit `cached_views`: .* caches no views"):
        data_of(folder=several_dir.parent / "prepared", cached_views="all")


@pytest.mark.slow
@pytest.mark.usefixtures("files_anywhere")
def test_texts_that_see_references_are_those_of_the_view(
    referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    recipe = load_seeing(pipeline_dir)
    options: dict[str, Any] = {"views": replace(RANDOM, flip_references=True), "views_per_sample": 2}
    keyed = cached(referenced, recipe, tmp_path, **options)
    assert keyed.cache is not None
    row = keyed.dataset[2]
    collator = CachedCollator(keyed.cache, seed=0, null_texts=True)
    rows = [{**row, OCCURRENCE: number} for number in (0, 1)]
    batch = collator(rows)
    references = [reference_of(referenced, row)] * 2
    texts, null = (recipe.encode_text([text] * 2, references=references).values for text in (row["caption"], ""))
    assert torch.allclose(batch["text_values"], texts, atol=1e-6)
    assert torch.allclose(batch["null_text"]["text_values"], null, atol=1e-6)
    again, counts = cache_dataset(referenced, recipe, CacheConfig(folder=str(tmp_path), **options))
    assert counts["encoded"] == counts["captions encoded"] == 0
    assert again is not None
    assert again.dataset["text_key"][:] == keyed.dataset["text_key"][:]
    for view in range(2):
        about = {"size": Size(1, 8, 8), "crop": (0, 0, 8, 8), "flip": False, "fps": 0.0, "length": 1}
        number = torch.full((1, 1), view)
        collator.cache.write(row["latents_key"][view], {"latents": number}, about=about)
        for name in ("text_key", "null_text_key"):
            collator.cache.write(row[name][view], {"values": number}, about=about)
    batch = collator(rows)
    read = [batch["latents"], batch["text_values"], batch["null_text"]["text_values"]]
    assert sorted(batch["latents"].flatten().tolist()) == [0, 1]
    assert all(torch.equal(values.flatten(), batch["latents"].flatten()) for values in read)


def reference_of(prepared: PreparedDataset, row: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    size = prepared.table.size(row["bucket_id"])
    sample = prepared.files.sample(row, size, views=CENTRED, draws=np.zeros(0), name="")
    references: tuple[torch.Tensor, ...] = load(sample).conditions["reference"]
    return references


@pytest.mark.cases(slow=("draw",))
@pytest.mark.parametrize("views", ["draw", "all"])
def test_a_resumed_run_repeats_the_views_and_losses_of_a_whole_one(
    views: str, several_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[tuple[int, float]]] = []
    call = CachedCollator.__call__

    def record(self: CachedCollator, rows: Any) -> dict[str, Any]:
        batch = call(self, rows)
        read.append([(row[ROW], float(latents.sum())) for row, latents in zip(rows, batch["latents"], strict=True)])
        return batch

    monkeypatch.setattr(CachedCollator, "__call__", record)
    settings = {
        "cached_views": views, "train_batch_size": 1, "checkpointing_steps": 4, "max_train_steps": None,
        "num_train_epochs": 2,
    }  # fmt: skip
    whole = run(in_process(pipeline_dir, several_dir, tmp_path / "out", **settings))
    samples = [sample for batch in read[-len(whole) :] for sample in batch]
    AcceleratorState._reset_state(reset_partial_state=True)
    read.clear()
    resumed = run(
        in_process(pipeline_dir, several_dir, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-4")
    )
    assert resumed == whole
    assert [sample for batch in read for sample in batch][-len(whole) + 4 :] == samples[4:]
    assert not recount(Logs(tmp_path / "out")).faults
    epoch = samples[: len(samples) // 2]
    assert len(epoch) == (12 if views == "all" else 6)
    assert max(Counter(index for index, _ in epoch).values()) == (2 if views == "all" else 1)
