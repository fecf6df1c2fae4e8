"""Columns of a data set keep their meaning: which are read, by settings or by name, and which are left alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, Features, Value, load_from_disk

from hf_bucketing import BucketingError, ColumnError, LatentSpec
from hf_bucketing.buckets.table import BucketTable
from hf_bucketing.columns import PreparedDataset, load_source
from hf_bucketing.columns.buckets import BucketColumns
from hf_bucketing.columns.conventions import CONVENTIONS
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.columns.prepared_stream import prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.loaders import BucketCollator
from hf_bucketing.media import ViewRule, write_image
from hf_bucketing.media.rows import REGULARIZATION, SOURCE_COLUMN
from hf_bucketing.randomness import ROW, check_rows
from tests.conftest import ROOT

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = TableConfig(buckets="32,48", bucket_frames=[1])
NUM_ROWS = 8


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (NUM_ROWS, 32, 64, 3), np.uint8)
    for row in range(NUM_ROWS):
        write_image(folder / f"{row}.png", pixels[row])
    return folder


def table_of(columns: Mapping[str, Sequence[Any]], rows: range = range(NUM_ROWS)) -> pd.DataFrame:
    files = {"file_name": [f"{row}.png" for row in rows], "caption": [f"caption {row}" for row in rows]}
    return pd.DataFrame({**files, **columns})


def write(folder: Path, columns: Mapping[str, Sequence[Any]]) -> SourceConfig:
    """Write a table of the images with further columns, and return how it is prepared."""
    table_of(columns).to_parquet(folder / "data.parquet")
    return SourceConfig(dataset=str(folder / "data.parquet"), table=TABLE)


def prepared(*sources: SourceConfig) -> tuple[PreparedDataset, list[str]]:
    said: list[str] = []
    return prepare(list(sources), spec=SPEC, say=said.append), said


def saved(data: PreparedDataset, folder: Path) -> PreparedDataset:
    data.save(folder)
    return PreparedDataset.load(folder)


def as_before(folder: Path, renamed: Mapping[str, str]) -> None:
    """Make of a prepared folder one of version 8, whose columns had other names."""
    rows = load_from_disk(str(folder))
    columns = {renamed.get(name, name): rows[name][:] for name in rows.column_names}
    features = Features({renamed.get(name, name): feature for name, feature in rows.features.items()})
    manifest = json.loads((folder / "bucketing.json").read_text())
    shutil.rmtree(folder)
    Dataset.from_dict(columns, features=features).save_to_disk(str(folder))
    (folder / "bucketing.json").write_text(json.dumps({**manifest, "version": 8}))


def test_rows_that_share_an_index_of_pandas_have_draws_of_their_own(images: Path, tmp_path: Path) -> None:
    for shard in (0, 1):
        rows = range(4 * shard, 4 * shard + 4)
        table_of({}, rows).reset_index().to_parquet(images / f"{shard}.parquet")
    source = SourceConfig(dataset=str(images / "*.parquet"), table=TABLE)
    data = saved(prepared(source)[0], tmp_path / "prepared")
    assert data.dataset["index"][:] == [0, 1, 2, 3] * 2, "that of the table"
    assert data.dataset[ROW][:] == list(range(NUM_ROWS))
    collator = BucketCollator(data.table, column=data.column, root=data.root, seed=0, views=ViewRule(random_crop=True))
    batch = collator([data.dataset[row] for row in range(NUM_ROWS)])
    assert batch["index"] == list(range(NUM_ROWS))
    lefts = [crop.left for crop in batch["crop"]]
    assert lefts[:4] != lefts[4:], "crops are drawn by row"


OF_THE_TABLE: dict[str, list[Any]] = {
    "index": [7] * NUM_ROWS,
    "weight": [70.5 + row for row in range(NUM_ROWS)],
    "repeats": [9] * NUM_ROWS,
    "source": ["web"] * NUM_ROWS,
    "mask": ["none"] * NUM_ROWS,
    "control": [3.5] * NUM_ROWS,
    "reference": ["a book"] * NUM_ROWS,
    "face": [1] * NUM_ROWS,
    "first_frame": [0] * NUM_ROWS,
    "start": [0.5] * NUM_ROWS,
    "latents_key": ["x"] * NUM_ROWS,
    "text_key": ["x"] * NUM_ROWS,
    "cached_view": [3] * NUM_ROWS,
    "has_audio": [True] * NUM_ROWS,
    "duration": [100.0] * NUM_ROWS,
}


def test_columns_of_other_names_change_nothing_and_are_kept(images: Path, tmp_path: Path) -> None:
    alone = saved(prepared(write(images, {}))[0], tmp_path / "alone")
    data, said = prepared(write(images, OF_THE_TABLE))
    data = saved(data, tmp_path / "prepared")
    assert {name: data.dataset[name][:] for name in OF_THE_TABLE} == OF_THE_TABLE
    names = alone.dataset.column_names
    assert data.dataset.select_columns(names)[:] == alone.dataset[:]
    assert data.weights is None
    assert data.sources == ()
    assert data.conditions == {}
    (line,) = [line for line in said if line.startswith("Columns read")]
    assert line.startswith("Columns read: file_name as media, caption as captions. Others have no effect: index, ")
    assert line.endswith(" and 3 more.")


def test_a_stream_leaves_columns_of_the_table_alone_too(images: Path) -> None:
    streams = []
    for columns in ({}, OF_THE_TABLE):
        stream, _ = prepare_stream(write(images, columns), spec=SPEC, say=lambda sentence: None)
        streams.append(list(stream.open()))
    assert streams[0] == streams[1]
    assert len({row[ROW] for row in streams[1]}) == NUM_ROWS


def test_a_column_of_weights_counts_where_it_is_named(images: Path, tmp_path: Path) -> None:
    weights = [0.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0]
    source = write(images, {"kg": weights})
    data, said = prepared(replace(source, weight_column="kg", repeats=2.0))
    assert saved(data, tmp_path / "out").weights.tolist() == [2 * weight for weight in weights]
    assert "8 usable rows occur 19 times per epoch, by their weights." in said
    assert any("kg as occurrences per epoch" in line for line in said)
    assert prepared(source)[0].weights is None
    nested = write(images, {"json": [{"kg": weight} for weight in weights]})
    assert prepared(replace(nested, weight_column="json.kg"))[0].weights.tolist() == weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 7 + [-1.0], "1 of 8 rows have no weight of 0 or more in the column kg, such as row 7, which has -1"),
        ([1.0] * 6 + [None, 1.0], "1 of 8 rows have no weight .* such as row 6, which has nan"),
        (["much"] * 8, "The column kg must hold numbers"),
    ],
)
def test_weights_that_are_none_are_refused_with_their_row(images: Path, weights: list[Any], message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        prepared(replace(write(images, {"kg": weights}), weight_column="kg"))


def test_a_missing_column_of_weights_and_one_of_a_stream_are_refused(images: Path) -> None:
    source = replace(write(images, {}), weight_column="kg")
    with pytest.raises(ColumnError, match="no column 'kg'"):
        prepared(source)
    with pytest.raises(BucketingError, match="Omit `weight_column`: a stream does not know how many rows"):
        prepare_stream(source, spec=SPEC, say=lambda sentence: None)


def test_ignored_columns_are_left_out_of_rows_and_streams(images: Path) -> None:
    columns = {"text": ["b"] * NUM_ROWS, REGULARIZATION: [True] * NUM_ROWS, "rejection": ["none"] * NUM_ROWS}
    source = write(images, columns)
    with pytest.raises(ColumnError, match="several caption columns: caption and text"):
        prepared(source)
    source = replace(source, ignore_columns=[*columns])
    data, said = prepared(source)
    assert data.caption_column == "caption"
    assert not {"text", REGULARIZATION} & set(data.dataset.column_names)
    assert not any("no effect" in line for line in said)
    stream, _ = prepare_stream(source, spec=SPEC, say=lambda sentence: None)
    assert [row["caption"] for row in stream.open()] == data.dataset["caption"][:]
    assert REGULARIZATION not in next(iter(stream.open()))
    with pytest.raises(ColumnError, match="has no kg to ignore"):
        prepared(replace(source, ignore_columns=["kg"]))


@pytest.mark.parametrize("name", [ROW, ROW_WEIGHT, SOURCE_COLUMN])
def test_a_table_with_a_name_of_ours_is_refused_by_name(name: str, images: Path) -> None:
    source = write(images, {name: [0] * NUM_ROWS})
    for streaming in (False, True):
        with pytest.raises(ColumnError, match=f"has the columns {name}, but preparing makes columns of such names"):
            load_source(source.dataset, streaming=streaming)
    assert prepared(replace(source, ignore_columns=[name]))[0].weights is None


def test_folders_of_earlier_releases_train_as_before(images: Path, tmp_path: Path) -> None:
    source = write(images, {})
    parts = (replace(source, name="a", repeats=2.0), replace(source, name="b"))
    data = saved(prepared(*parts)[0], tmp_path / "prepared")
    as_before(tmp_path / "prepared", {ROW: "index", ROW_WEIGHT: "weight", SOURCE_COLUMN: "source"})
    back = PreparedDataset.load(tmp_path / "prepared")
    assert back.dataset.features == data.dataset.features
    assert back.dataset[:] == data.dataset[:]
    assert back.sources == ("a", "b")
    assert back.weights.tolist() == [2.0] * NUM_ROWS + [1.0] * NUM_ROWS


def test_a_column_of_another_meaning_in_an_earlier_folder_stays(images: Path, tmp_path: Path) -> None:
    saved(prepared(write(images, {"source": ["web"] * NUM_ROWS}))[0], tmp_path / "prepared")
    as_before(tmp_path / "prepared", {ROW: "index"})
    back = PreparedDataset.load(tmp_path / "prepared")
    assert back.dataset["source"][:] == ["web"] * NUM_ROWS
    assert back.sources == ()


@pytest.mark.parametrize("index", [[0, 1, 2, 3] * 2, [-row for row in range(NUM_ROWS)], [row / 2 for row in range(8)]])
def test_an_earlier_folder_whose_rows_share_an_index_is_refused(
    index: list[float], images: Path, tmp_path: Path
) -> None:
    data = prepared(write(images, {"index": index}))[0]
    saved(data, tmp_path / "prepared")
    rows = load_from_disk(str(tmp_path / "prepared")).remove_columns(ROW)
    manifest = json.loads((tmp_path / "prepared" / "bucketing.json").read_text())
    rows.save_to_disk(str(tmp_path / "old"))
    (tmp_path / "old" / "bucketing.json").write_text(json.dumps({**manifest, "version": 8}))
    with pytest.raises(BucketingError, match=r"The column index of .*old does not name each row once.*prepare it"):
        PreparedDataset.load(tmp_path / "old")


def test_rows_that_are_removed_or_moved_leave_the_others_their_names(images: Path, tmp_path: Path) -> None:
    data = saved(prepared(write(images, {}))[0], tmp_path / "prepared")
    fewer = replace(data, dataset=data.dataset.select([6, 2, 5]))
    assert saved(fewer, tmp_path / "fewer").dataset[ROW][:] == [6, 2, 5]
    with pytest.raises(ColumnError, match="each once; remove it"):
        replace(data, dataset=data.dataset.select([6, 6])).save(tmp_path / "twice")


def test_names_of_rows_are_whole_numbers() -> None:
    assert check_rows(np.array([3, 0, 2**62])).tolist() == [3, 0, 2**62]
    assert check_rows(np.zeros(0, np.int64)).tolist() == []
    for rows in (np.array([0.0, 1.0]), np.array([0, 0]), np.array([-1, 0]), np.array(["a"])):
        with pytest.raises(ColumnError, match=ROW):
            check_rows(rows)


def test_a_class_label_named_source_is_no_source(images: Path, tmp_path: Path) -> None:
    source = write(images, {"source": [row % 2 for row in range(NUM_ROWS)]})
    data = prepared(source)[0]
    labelled = data.dataset.cast_column("source", ClassLabel(names=["cat", "dog"]))
    back = saved(replace(data, dataset=labelled), tmp_path / "prepared")
    assert back.sources == ()
    assert isinstance(data.dataset.features["source"], Value)
    both = prepared(replace(source, name="a"), replace(source, name="b"))[0]
    assert both.sources == ("a", "b")
    assert both.dataset["source"][:] == [row % 2 for row in range(NUM_ROWS)] * 2


def test_the_documentation_lists_the_names_that_have_an_effect() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    (table,) = re.findall(r"^\| columns named \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    written = [line.strip("| ").split(" | ") for line in table.splitlines()]
    expected = [[", ".join(f"`{name}`" for name in row.columns), row.effect, row.instead] for row in CONVENTIONS]
    assert written == expected


def test_the_names_that_preparing_makes_are_those_that_are_listed(images: Path) -> None:
    columns = BucketColumns(BucketTable.parse("32,48"), SPEC).output_columns
    assert columns in [row.columns for row in CONVENTIONS]
    for name in columns:
        with pytest.raises(BucketingError, match="already has"):
            prepared(write(images, {name: [0] * NUM_ROWS}))
