"""References in a cache: tuples of latents per sample, and texts that see the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Sequence as Cells, Value

from hf_bucketing import BucketingError
from hf_bucketing.batching.drawing import media_of, text_of
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.caching import CacheConfig, CachedCollator, cache_dataset
from hf_bucketing.caching.columns import NULL_TEXT_KEY
from hf_bucketing.caching.store import TensorCache, entry_key
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.references import REFERENCE_SIZES, ReferenceRule
from hf_bucketing.media import write_image
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import REFERENCES
from hf_bucketing.models.texts import TextEmbeddings
from tests.training.training_cases import in_process

pytestmark = pytest.mark.usefixtures("files_anywhere")


def test_several_tensors_of_one_name_are_read_back_as_they_were(tmp_path: Path) -> None:
    cache, key = TensorCache(tmp_path), entry_key(sample="a")
    references = (torch.randn(4, 1, 2, 3), torch.randn(4, 1, 3, 2, dtype=torch.bfloat16))
    cache.write(key, {"latents": torch.ones(2), REFERENCES: references, "none": ()}, about={"fps": 8.0})
    back, about = cache.read(key)
    assert back.keys() == {"latents", REFERENCES, "none"}
    assert back["none"] == ()
    assert all(torch.equal(*pair) for pair in zip(back[REFERENCES], references, strict=True))
    assert back[REFERENCES][1].dtype == torch.bfloat16
    assert about == {"fps": 8.0}


class SeeingRecipe:
    """Mix into a recipe: the model takes any references, and its text encoder sees them."""

    conditions = (ReferenceRule(most=9, in_text=True),)

    def encode_text(
        self, captions: list[str], *, references: Sequence[tuple[torch.Tensor, ...]] | None = None
    ) -> TextEmbeddings:
        """Add the mean colour of a caption's pictures to its embeddings."""
        text: TextEmbeddings = super().encode_text(captions)  # type: ignore[misc]
        means = [
            sum((float(picture.mean()) for picture in pictures), 0.0)
            for pictures in references or [()] * len(captions)
        ]
        return text._replace(values=text.values + torch.tensor(means)[:, None, None])


@pytest.fixture(scope="module")
def referenced(prepared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Six samples of the prepared media, each with a reference of a colour and size of its own."""
    folder = tmp_path_factory.mktemp("references")
    prepared = PreparedDataset.load(prepared_dir)
    sizes = [[1, 32 + 16 * row, 48] for row in range(6)]
    for row, (_, *sides) in enumerate(sizes):
        write_image(folder / f"{row}.png", np.full((*sides, 3), 40 * row, np.uint8))
    dataset = prepared.dataset.select(range(6))
    dataset = dataset.add_column("ref", [str(folder / f"{row}.png") for row in range(6)])
    dataset = dataset.add_column(REFERENCE_SIZES, sizes, feature=Cells(Value("int32")))
    rule = ReferenceRule(multiples=prepared.spec.multiples)
    return replace(prepared, dataset=dataset, conditions={"reference": "ref"}, references=rule)


def load_seeing(folder: Path) -> Any:
    kind: Any = type("SeeingRecipe", (SeeingRecipe, recipe_of(str(folder))), {})
    return kind.load(str(folder), max_sequence_length=32)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_cached_references_and_texts_are_those_of_the_files(
    batching: str, referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    recipe = load_seeing(pipeline_dir)
    config = CacheConfig(folder=str(tmp_path / "cache"), batching=batching)
    cached, counts = cache_dataset(referenced, recipe, config)
    assert cached is not None
    assert counts["captions encoded"] == 12, "a caption and the empty one beside each reference"
    again, counts = cache_dataset(referenced, recipe, config)
    assert counts["encoded"] == counts["captions encoded"] == 0
    assert again is not None
    assert again.dataset["text_key"] == cached.dataset["text_key"]
    referenced.save(tmp_path / "files")
    cached.save(tmp_path / "cached")
    settings = {"batching": batching, "train_batch_size": 1, "caption_dropout": 0.5, "random_crop": False}
    settings |= {"max_tokens": 640, "train_batch_size": 1} if batching == "pack" else {}
    batches = {}
    for name in ("files", "cached"):
        given = {key: value for key, value in settings.items() if name == "files" or key != "random_crop"}
        data = make_data(
            in_process(pipeline_dir, tmp_path / name, tmp_path, **given), recipe.spec, ModelTokens(width=96)
        )
        row = data.dataset[2]
        batches[name] = data.loader.collate_fn([row])
    media = {name: media_of(recipe, batch) for name, batch in batches.items()}
    assert [len(own) for own in media["cached"][REFERENCES]] == [1]
    for pair in zip(media["files"][REFERENCES][0], media["cached"][REFERENCES][0], strict=True):
        assert torch.equal(*pair)
    for captions in (None, [""]):
        texts = [text_of(recipe, batch, captions=captions, texts={}) for batch in batches.values()]
        assert torch.equal(texts[0].values, texts[1].values)
    null = recipe.encode_text([""], references=[()])
    assert not torch.equal(texts[0].values, null.values), "the pictures stay where the caption is dropped"


def test_what_a_cache_of_seeing_texts_cannot_hold_is_refused(
    referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    recipe = load_seeing(pipeline_dir)
    config = CacheConfig(folder=str(tmp_path / "cache"))
    with pytest.raises(BucketingError, match="Omit `more_captions`"):
        cache_dataset(referenced, recipe, replace(config, more_captions=["a cat"]))
    cached, _ = cache_dataset(referenced, recipe, config)
    assert cached is not None
    assert NULL_TEXT_KEY in cached.dataset.column_names
    cached.save(tmp_path / "cached")

    def make(**settings: Any) -> None:
        make_data(
            in_process(pipeline_dir, tmp_path / "cached", tmp_path, **settings), recipe.spec, ModelTokens(width=96)
        )

    with pytest.raises(BucketingError, match="Omit `reference_dropout`: this model's cached texts"):
        make(reference_dropout=0.1)
    with pytest.raises(BucketingError, match="Omit `reference` in `condition`: this model's cached texts"):
        make(condition="reference:0.8,none:0.2")
    with pytest.raises(BucketingError, match="No cache holds the captions `a cat`"):
        make(lora_rank=2, preservation="class", preservation_caption="a cat", preservation_share=0.5)


def test_texts_of_samples_without_references_are_cached_by_their_captions(
    referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    plain, config = replace(referenced, conditions={}), CacheConfig(folder=str(tmp_path), more_captions=["a cat"])
    cached, counts = cache_dataset(plain, load_seeing(pipeline_dir), config)
    assert cached is not None
    assert counts["captions encoded"] == len({*plain.dataset["caption"], "a cat", ""})
    assert NULL_TEXT_KEY not in cached.dataset.column_names


def test_a_batch_without_null_texts_reads_none(
    referenced: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    cached, _ = cache_dataset(referenced, load_seeing(pipeline_dir), CacheConfig(folder=str(tmp_path)))
    assert cached is not None
    assert cached.cache is not None
    assert "null_text" not in CachedCollator(cached.cache)([cached.dataset[0]])
