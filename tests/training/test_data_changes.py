"""What a run says of data that changed: since it was cached, and since the run began."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_bucketing import LatentSpec
from hf_bucketing.columns import CacheInfo, PreparedDataset
from hf_bucketing.columns.apply import with_columns
from hf_bucketing.columns.data_lock import LOCK_FILE, read_lock
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.data_changes import describe_changes, describe_edited_texts, keep_lock
from hf_bucketing.training.loop import Trainer
from tests.columns.test_data_lock import NAMES, prepared_of
from tests.conftest import run_script_here
from tests.training.training_cases import in_process


@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., TrainingConfig]:
    """Save a prepared folder, and one of a cache of its rows; return a run's settings."""
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode())
    data = prepared_of(tmp_path)
    data.save(tmp_path / "prepared")
    info = CacheInfo(
        folder=str(tmp_path / "cache"),
        batching="bucket",
        latents_model="",
        text_model=None,
        empty_text_key=None,
        views={},
        prepared=str(tmp_path / "prepared"),
    )
    keys = with_columns(data.dataset, {"latents_key": np.array(["k", "k", "k", ""])})
    replace(data, dataset=keys, cache=info).save(tmp_path / "cached")
    return in_process(tmp_path / "model", tmp_path / "cached", tmp_path / "out")


def said(config: TrainingConfig, *, resumed: bool = False) -> list[str]:
    return describe_changes(config, PreparedDataset.load(config.dataset_dir), resumed=resumed)


def test_a_cache_of_rows_that_were_prepared_again_is_named(cached: TrainingConfig, tmp_path: Path) -> None:
    assert said(cached) == []
    prepared_of(tmp_path, caption=["a", "b", "c", "D"]).save(tmp_path / "prepared")
    assert said(cached) == [], "the row that changed could not be encoded"
    prepared_of(tmp_path, caption=["a", "B", "c", "d"]).save(tmp_path / "prepared")
    (sentence,) = said(cached)
    assert "prepared was prepared again since" in sentence
    assert "1 changed (1 in caption; row 1). Run hf_bucketing cache again" in sentence


def test_a_cache_of_files_that_were_replaced_is_named(cached: TrainingConfig, tmp_path: Path) -> None:
    os.utime(tmp_path / "c.mp4", ns=(0, 1))
    (sentence,) = said(cached)
    assert sentence.startswith("Of 3 samples looked at, the files of 1 are not those that")
    assert ": c.mp4. Run" in sentence


def test_folders_of_before_locks_and_moved_ones_say_nothing(cached: TrainingConfig, tmp_path: Path) -> None:
    (tmp_path / "prepared").rename(tmp_path / "elsewhere")
    assert said(cached) == []
    (tmp_path / "cached" / LOCK_FILE).unlink()
    os.utime(tmp_path / "c.mp4", ns=(0, 1))
    assert said(cached) == []
    assert describe_changes(cached, None, resumed=True) == []


def test_a_resumed_run_says_what_changed_since_it_began(cached: TrainingConfig, tmp_path: Path) -> None:
    keep_lock(cached)
    assert said(cached, resumed=True) == []
    data = PreparedDataset.load(tmp_path / "cached")
    captions = with_columns(data.dataset, {"caption": np.array(["a", "b", "C", "d"])})
    replace(data, dataset=captions).save(tmp_path / "cached")
    assert [line.partition(". ")[2] for line in said(cached, resumed=True)][:1] == [
        "Rows: 1 changed (1 in caption; row 2)."
    ]
    (tmp_path / "cached" / LOCK_FILE).unlink()
    keep_lock(cached)
    assert read_lock(cached.output_dir) is None, "that of an earlier run is not kept"


def test_a_run_keeps_the_lock_of_its_data_with_which_a_script_compares_folders(
    prepared_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    Trainer(in_process(pipeline_dir, prepared_dir, tmp_path / "out", max_train_steps=1)).run()
    lock = read_lock(prepared_dir)
    assert lock is not None
    assert f"{tmp_path / 'out'}: 20 rows, digest {lock.digest}" in compared(tmp_path / "out", prepared_dir)
    data = PreparedDataset.load(prepared_dir)
    captions = [*data.dataset["caption"]]
    captions[4] = "another <b>"
    rows = with_columns(data.dataset, {"caption": np.array(captions)}).select(range(19))
    replace(data, dataset=rows).save(tmp_path / "again")
    name = data.file_names([4])[0]
    assert f"changed row 4 {name}: caption\n" in compared(tmp_path / "out", tmp_path / "again")
    output = compared(prepared_dir, tmp_path / "again", "--json", tmp_path / "differences.json")
    assert f"changed row 4 {name}: caption: {data.dataset['caption'][4]} → another <b>\n" in output
    assert f"removed row 19 {data.file_names([19])[0]}\n" in output
    differences = json.loads((tmp_path / "differences.json").read_text())
    assert differences == {"added": [], "removed": [19], "changed": [{"was": 4, "now": 4, "fields": ["caption"]}]}
    assert "removed row" not in compared(prepared_dir, tmp_path / "again", "--max_rows", 0)


def compared(was: Path, now: Path, *flags: object) -> str:
    return run_script_here("compare_data.py", was, now, *flags).stdout


def test_captions_that_were_edited_after_preparing_are_named(tmp_path: Path) -> None:
    """In every layout of local files, also of several sources, and where all was moved since."""
    names = ["a.png", "b.png"]
    texts = {
        "beside/a.TXT": "red",
        "beside/b.txt": "blue",
        "csv/metadata.csv": "file_name,text\na.png,red\nb.png,blue\n",
        "jsonl/metadata.jsonl": '{"file_name": "a.png", "text": "red"}\n{"file_name": "b.png", "text": "blue"}\n',
        "mapping/captions.json": '{"a.png": "red", "b.png": "blue"}',
        "lines/images.txt": "a.png\nb.png\n",
        "lines/prompts.txt": "red\nblue\n",
    }
    for file, text in texts.items():
        (tmp_path / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / file).write_text(text)
    layouts = sorted({file.partition("/")[0] for file in texts})
    for layout in layouts:
        for name in names:
            Image.new("RGB", (64, 64)).save(tmp_path / "data" / layout / name)
    table = TableConfig(buckets="64,64", bucket_frames=[1])
    sources = [SourceConfig(dataset=str(tmp_path / "data" / layout), table=table) for layout in layouts]
    spec = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
    prepare(sources, spec=spec, say=lambda sentence: None).save(tmp_path / "data" / "prepared")
    (tmp_path / "data").rename(tmp_path / "moved")
    folder = tmp_path / "moved" / "prepared"
    prepared = PreparedDataset.load(folder)
    assert describe_edited_texts(prepared, "prepared") == []
    (tmp_path / "moved" / "csv" / "a.txt").write_text("of no caption")
    ahead = max(texts.newest for texts in prepared.texts) + 10**9
    for edited in ("beside/b.txt", "csv/metadata.csv", "jsonl/metadata.jsonl", "mapping/captions.json", "csv/a.txt"):
        os.utime(tmp_path / "moved" / edited, ns=(ahead, ahead))
    os.utime(tmp_path / "moved" / "lines" / "prompts.txt", ns=(ahead, ahead))
    (sentence,) = describe_edited_texts(prepared, "prepared")
    assert sentence.startswith(
        "Of 6 files of captions looked at, 5 were edited after prepared was prepared from them: "
    )
    assert str(tmp_path / "moved" / "beside" / "b.txt") in sentence
    assert sentence.endswith("run hf_bucketing prepare again to use others.")
    manifest = json.loads((folder / "bucketing.json").read_text())
    del manifest["texts"]
    (folder / "bucketing.json").write_text(json.dumps(manifest))
    assert describe_edited_texts(PreparedDataset.load(folder), "prepared") == [], "an earlier version did not say"
