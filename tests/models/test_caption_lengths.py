"""Captions that are longer than the text encoder takes are counted, with the longest and its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_bucketing import BucketTable, LatentSpec, Size, open_table
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.models import caption_lengths as module
from hf_bucketing.models.caption_lengths import caption_lengths, describe_caption_lengths
from hf_bucketing.models.registry import recipes

WORDS = Tokenizer(WordLevel({"[UNK]": 0, "</s>": 1, "red": 2}, unk_token="[UNK]"))
WORDS.pre_tokenizer = Whitespace()  # type: ignore[assignment]
WORDS.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])  # type: ignore[assignment]


def pipeline(folder: Path, name: str, *tokenizers: str) -> Path:
    """Write the index of a pipeline with tokenizers of words, and the configuration of its transformer."""
    folder.mkdir()
    entries = {tokenizer: ["transformers", "PreTrainedTokenizerFast"] for tokenizer in tokenizers}
    for tokenizer in tokenizers:
        PreTrainedTokenizerFast(tokenizer_object=WORDS, unk_token="[UNK]").save_pretrained(folder / tokenizer)
    entries["transformer"] = ["diffusers", "Transformer"]
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, **entries}))
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps({"max_text_seq_length": 20}))
    return folder


def prepared_of(captions: list[Any], bucket_ids: list[int] | None = None) -> PreparedDataset:
    files = [f"{row}.png" for row in range(len(captions))]
    columns = {"image": files, "caption": captions, "bucket_id": bucket_ids or [0] * len(captions)}
    return PreparedDataset(
        dataset=Dataset.from_dict(columns),
        table=BucketTable(sizes=(Size(1, 64, 64),)),
        open_table=open_table(LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))),
        column="image",
        caption_column="caption",
    )


def test_captions_are_counted_by_the_tokens_that_max_sequence_length_counts(tmp_path: Path) -> None:
    red = "red "
    texts = [red * 600, red * 100, red * 512, red * 511, "é" * 300, red * 900, ""]
    wan = pipeline(tmp_path / "wan", "WanPipeline", "tokenizer")
    flux = pipeline(tmp_path / "flux", "FluxPipeline", "tokenizer_2")
    cog = pipeline(tmp_path / "cog", "CogVideoXPipeline", "tokenizer")
    for folder, name, captions, given, expected in (
        (wan, "WanPipeline", texts, None, (512, 7, 3, 901, 5)),
        (flux, "FluxPipeline", texts, None, (512, 7, 3, 901, 5)),
        (flux, "FluxPipeline", texts, 601, (601, 7, 1, 901, 5)),
        (wan, "WanPipeline", [[red * 900, red * 5], [red * 600]], None, (512, 3, 2, 901, 0)),
        (cog, "CogVideoXPipeline", [red * 19, red * 20], None, (20, 2, 1, 21, 1)),
    ):
        prepared = prepared_of(captions)
        lengths = caption_lengths(prepared, recipes()[name], str(folder), rows=10, max_sequence_length=given)
        found = (lengths.most, lengths.looked_at, lengths.longer, lengths.longest, lengths.row)
        assert found == expected, (name, given)
    rejected = prepared_of(texts, [0, 0, 0, 0, 0, -1, 0])
    assert describe_caption_lengths(rejected, recipes()["WanPipeline"], str(wan)) == [
        "Of 6 captions looked at, 2 have more than the 512 tokens (max_sequence_length) that the text encoder reads "
        "of each, from the beginning; the longest, of row 0 (0.png), has 601."
    ]
    spread = caption_lengths(prepared_of(texts), recipes()["WanPipeline"], str(wan), rows=2)
    assert (spread.looked_at, spread.longer, spread.row) == (2, 1, 0)


def test_captions_that_cannot_be_longer_load_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wan = pipeline(tmp_path / "wan", "WanPipeline")
    recipe, long = recipes()["WanPipeline"], prepared_of(["red " * 600])
    assert describe_caption_lengths(long, recipe, str(wan)) == [], "the pipeline comes without a tokenizer"
    monkeypatch.setattr(module, "load_tokenizer", lambda *_: pytest.fail("it was loaded"))
    assert describe_caption_lengths(prepared_of(["r" * 504, "é" * 252]), recipe, str(wan)) == []


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    wan = pipeline(tmp_path / "wan", "WanPipeline", "tokenizer")
    for file in (wan / "tokenizer").iterdir():
        file.unlink()
    (sentence,) = describe_caption_lengths(prepared_of(["red " * 600]), recipes()["WanPipeline"], str(wan))
    assert sentence.startswith("Captions that are longer than the text encoder takes were not counted: ")
