"""The caption of a sample: one of several per epoch, its tags in random order; from files and from a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import List, Value
from torch.utils.data import DataLoader

from hf_bucketing import BucketingError, ColumnError
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.apply import with_columns
from hf_bucketing.configuration.run import TrainingConfig
from hf_bucketing.loaders import BucketCollator, CaptionRule, PackCollator
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW

NAMES = ["a", "b", "c", "d"]


def drawn(rule: CaptionRule, cell, *, index: int = 0, epoch: int = 0, seed: int | None = 0) -> str:
    return rule.caption({"text": cell, ROW: index}, "text", seed=seed, epoch=epoch)


def test_one_of_several_captions_is_drawn_by_seed_epoch_and_index() -> None:
    rule = CaptionRule()
    keys = [
        {"index": index, "epoch": epoch, "seed": seed} for index in range(9) for epoch in range(9) for seed in (0, 1)
    ]
    texts = [drawn(rule, NAMES, **key) for key in keys]
    assert texts == [drawn(rule, NAMES, **key) for key in keys]
    assert set(texts) == set(NAMES)
    for name in ("index", "epoch", "seed"):
        others = [drawn(rule, NAMES, **{**key, name: key[name] + 100}) for key in keys]
        assert 0.5 < np.mean([text != other for text, other in zip(texts, others, strict=True)]) < 0.95
    assert [drawn(rule, NAMES, epoch=epoch) for epoch in range(6)] == ["d", "b", "b", "d", "d", "c"]
    assert drawn(rule, NAMES, seed=None) in NAMES


def test_tags_are_shuffled_behind_those_that_are_kept() -> None:
    rule = CaptionRule(shuffle_tags=True, keep_tags=1)
    texts = {drawn(rule, "1girl,red, blue,  long hair", epoch=epoch) for epoch in range(30)}
    assert len(texts) == 6
    assert all(text.startswith("1girl, ") for text in texts)
    assert {tuple(sorted(text.split(", "))) for text in texts} == {("1girl", "blue", "long hair", "red")}
    assert drawn(CaptionRule(shuffle_tags=True, tag_separator="|", keep_tags=9), "a|b") == "a| b"
    assert drawn(CaptionRule(shuffle_tags=True), "") == ""


@pytest.mark.parametrize("cell", [None, {"a": 1}, [], [["a"]], ["a", None], 3], ids=str)
def test_what_is_no_text_never_becomes_a_caption(cell) -> None:
    with pytest.raises(ColumnError, match=r"caption of row 7 .column text. must be a text or a list of texts, got"):
        drawn(CaptionRule(), cell, index=7)


def test_mistakes_in_calling_are_said() -> None:
    with pytest.raises(ColumnError, match="no column hf_bucketing_row; add one"):
        CaptionRule().caption({"text": ["a", "b"]}, "text", seed=0, epoch=0)
    assert CaptionRule().caption({"text": ["a"]}, "text", seed=0, epoch=0) == "a", "nothing is drawn"
    with pytest.raises(BucketingError, match="Omit `keep_tags`: no effect without `shuffle_tags`"):
        CaptionRule(keep_tags=1)
    with pytest.raises(BucketingError, match="`tag_separator` must hold"):
        CaptionRule(shuffle_tags=True, tag_separator=" ")


@pytest.fixture
def several(prepared_dir: Path) -> PreparedDataset:
    """Four rows of one bucket; the second has one caption, the others have four."""
    data = PreparedDataset.load(prepared_dir)
    ids = data.dataset["bucket_id"][:]
    rows = [row for row, bucket in enumerate(ids) if bucket == max(ids, key=ids.count)][:4]
    captions = [[f"{row} {name}" for name in NAMES][: 1 if place == 1 else 4] for place, row in enumerate(rows)]
    dataset = with_columns(data.dataset.select(rows), {"caption": captions})
    assert dataset.features["caption"] == List(Value("string"))
    return replace(data, dataset=dataset)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_every_collator_draws_the_same_captions_on_any_workers_and_caches_hold_all(
    several: PreparedDataset, pipeline_dir: Path, tmp_path: Path, num_workers: int
) -> None:
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    cached, counts = cache_dataset(several, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    assert cached is not None
    assert cached.cache is not None
    assert counts["captions encoded"] == 3 * 4 + 1 + 1, "each once, and the empty one"
    assert [len(keys) for keys in cached.dataset["text_key"]] == [4, 1, 4, 4]
    media = {"column": several.column, "root": several.root, "seed": 3}
    collators = [
        (several.dataset, BucketCollator(several.table, **media)),
        (several.dataset, PackCollator(several.open_table, **media)),
        (cached.dataset, CachedCollator(cached.cache, seed=3)),
    ]
    seen = []
    for dataset, collator in collators:
        workers = num_workers if isinstance(collator, CachedCollator) else 0
        loader = DataLoader(
            dataset, batch_size=2, collate_fn=collator, num_workers=workers, persistent_workers=workers > 0
        )
        epochs = []
        for epoch in range(4):
            collator.set_epoch(epoch)
            batches = list(loader)
            epochs.append([caption for batch in batches for caption in batch["caption"]])
        seen.append(epochs)
        if isinstance(collator, CachedCollator):
            for batch in batches:
                expected = recipe.encode_text(batch["caption"]).values
                assert (batch["text_values"] - expected).abs().max() < 1e-5
    assert all(epochs == seen[0] for epochs in seen)
    assert len({tuple(epoch) for epoch in seen[0]}) > 1
    assert all(isinstance(caption, str) for epoch in seen[0] for caption in epoch)


def test_tags_reach_training_and_are_refused_with_cached_texts(
    several: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    tagged = replace(several, dataset=with_columns(several.dataset, {"caption": ["x, a, b, c, d"] * 4}))
    tagged.save(tmp_path / "tagged")
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    cached, _ = cache_dataset(tagged, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    assert cached is not None
    cached.save(tmp_path / "cached")

    def data_of(folder: str):
        config = TrainingConfig.from_flat(
            pretrained_model_name_or_path=str(pipeline_dir),
            dataset_dir=str(tmp_path / folder),
            output_dir=str(tmp_path / "out"),
            dataloader_num_workers=0,
            shuffle_tags=True,
            keep_tags=1,
        )
        return make_data(config, several.spec, ModelTokens(width=32))

    captions = next(iter(data_of("tagged").loader))["caption"]
    assert len({*captions, "x, a, b, c, d"}) > 2
    assert all(caption.startswith("x, ") for caption in captions)
    with pytest.raises(BucketingError, match=r"Omit `shuffle_tags`, `keep_tags`: .* holds encoded captions"):
        data_of("cached")
