"""Several sources in one prepared folder: columns of one name and type, one table, names, repeats and weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Value

from hf_bucketing import BucketingError, LatentSpec
from hf_bucketing.columns import MediaDataset, PreparedDataset
from hf_bucketing.columns.merge import merge_sources
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared import ROW_WEIGHT
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.columns.source_lists import (
    make_sources,
    name_sources,
    row_weights,
    settings_of_sources,
    sources_from,
)
from hf_bucketing.errors import ColumnError, MediaError
from hf_bucketing.media import MediaColumns, probe
from hf_bucketing.media.rows import SOURCE_COLUMN
from hf_bucketing.randomness import ROW

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = TableConfig(bucket_tokens=[60, 110, 150], bucket_frames=[1, 9, 17, 25])
SMALL = TableConfig(bucket_tokens=[60], bucket_frames=[1, 9])


def folder_with_texts(media: Path, folder: Path, rows: Iterable[int]) -> Path:
    """Write clips with a .txt caption beside each."""
    folder.mkdir(parents=True)
    lines = [json.loads(line) for line in (media / "metadata.jsonl").read_text().splitlines()]
    for row in rows:
        name = Path(lines[row]["file_name"]).name
        shutil.copy(media / lines[row]["file_name"], folder / name)
        (folder / name).with_suffix(".txt").write_text(lines[row]["caption"])
    return folder


def parquet_with_bytes(media: Path, path: Path, rows: Iterable[int]) -> Path:
    """Write a table with the bytes of clips, and captions under another name."""
    lines = [json.loads(line) for line in (media / "metadata.jsonl").read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"video": (media / lines[row]["file_name"]).read_bytes(), "text": lines[row]["caption"]} for row in rows]
    Dataset.from_list(cells).to_parquet(path)
    return path


@pytest.fixture(scope="module")
def sources(media_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {
        "clips": folder_with_texts(media_dir, root / "own" / "clips", range(9)),
        "faces": parquet_with_bytes(media_dir, root / "faces.parquet", range(9, 20)),
        "old": folder_with_texts(media_dir, root / "old", range(9, 15)),
    }


def config(path: Path, **settings) -> SourceConfig:
    return SourceConfig(**{"dataset": str(path), "target_fps": 8.0, "table": TABLE, **settings})


def prepared(*configs: SourceConfig) -> PreparedDataset:
    return prepare(list(configs), spec=SPEC, say=lambda _: None)


def test_files_and_bytes_become_one_data_set_with_one_table(sources: dict[str, Path], tmp_path: Path) -> None:
    parts = [config(sources["clips"]), config(sources["faces"], target_fps=4.0, table=SMALL, repeats=2.0)]
    alone = [prepared(part) for part in parts]
    prepared(*parts).save(tmp_path / "out")
    both = PreparedDataset.load(tmp_path / "out")
    assert both.sources
    assert both.sources == ("clips", "faces")
    assert both.dataset[ROW][:] == list(range(20))
    assert both.dataset[ROW_WEIGHT][:] == [1.0] * 9 + [2.0] * 11
    assert both.dataset["caption"][:] == alone[0].dataset["caption"][:] + alone[1].dataset["text"][:]
    for number, source in enumerate(alone):
        rows = np.flatnonzero(both.source_ids == number)
        assert len(rows) == len(source.dataset)
        for name in ("num_frames", "fps", "width", "num_tokens", "rejection"):
            assert [both.dataset[name][int(row)] for row in rows] == source.dataset[name][:]
        for row, bucket in zip(rows.tolist(), source.dataset["bucket_id"][:], strict=True):
            own = both.dataset["bucket_id"][row]
            assert (own < 0 and bucket < 0) or both.table.size(own) == source.table.size(bucket)
    assert both.dataset.features["bucket_id"].id == both.table.ids_mark
    # Every file is found, and it is the one whose size the row has.
    for row in both.dataset.select(range(0, 20, 3)):
        info = probe(both.files.source(row[both.column], name="row"))
        assert (info.width, info.height) == (row["width"], row["height"])


def test_paths_start_from_the_folder_of_the_first_source(sources: dict[str, Path], tmp_path: Path) -> None:
    both = prepared(config(sources["clips"]), config(sources["old"]))
    assert (both.root, both.other_roots) == (str(sources["clips"]), (str(sources["old"]),))
    assert both.dataset.features[both.column] == Value("string")
    names = both.dataset[both.column][:]
    assert {name.rpartition("/")[0] for name in names} == {"", "../../old"}
    both.save(tmp_path / "out")
    files = PreparedDataset.load(tmp_path / "out").files
    assert all(Path(files.source(name, name="row").path).is_file() for name in names)
    assert ROW_WEIGHT not in both.dataset.column_names


def merged(*roots: str, cells: list[object]) -> tuple[MediaDataset, MediaColumns]:
    """Return sources of the same rows in other places, merged, and what opens their files."""
    rows = Dataset.from_dict({"file": cells})
    shared = {"dataset": rows, "column": "file", "caption_column": None, "layout": ""}
    both = merge_sources({root: MediaDataset(root=root, **shared) for root in roots})
    return both, MediaColumns(column="file", root=both.root, other_roots=both.other_roots)


def test_merged_sources_name_files_of_their_own_folders_and_none_beside_them(tmp_path: Path) -> None:
    for name in ("a/x.mp4", "b/x.mp4", "b/z.mp4", "secret/x.mp4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    secret = str(tmp_path / "secret" / "x.mp4")
    cells = ["x.mp4", "../secret/x.mp4", secret, None, "c/../z.mp4"]
    both, files = merged(str(tmp_path / "a"), str(tmp_path / "b"), cells=cells)
    assert both.root == str(tmp_path / "a")
    of_second = both.dataset["file"][5:]
    assert of_second == ["../b/x.mp4", "../b/../secret/x.mp4", secret, None, "../b/c/../z.mp4"]
    paths = [files.source(of_second[number], name="row").path for number in (0, 4)]
    assert paths == [str(tmp_path / "b" / name) for name in ("x.mp4", "z.mp4")]
    for cell in [*both.dataset["file"][1:3], *of_second[1:3]]:
        with pytest.raises(MediaError, match=r"leaves its root|lies outside"):
            files.source(cell, name="row")


@pytest.mark.parametrize("first", ["FOLDER", "memory://one"])
def test_a_merged_source_of_urls_names_files_below_its_own(first: str, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"x")
    both, files = merged(first.replace("FOLDER", str(tmp_path)), "memory://two", cells=["a.mp4", "/etc/passwd"])
    cells = both.dataset["file"][:]
    assert files.source(cells[2], name="row").path == "memory://two/a.mp4"
    assert files.source(cells[0], name="row").path == f"{both.root}/a.mp4"
    for cell in (cells[1], "memory://three/a.mp4"):
        with pytest.raises(MediaError, match="HF_BUCKETING_ALLOWED_PATHS"):
            files.source(cell, name="row")


def test_relative_paths_in_dictionaries_lead_to_the_file_of_their_own_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.mp4").write_bytes(name.encode())
    cells = [{"bytes": None, "path": "x.mp4"}, {"bytes": b"y", "path": "x.mp4"}]
    both, files = merged(str(tmp_path / "a"), str(tmp_path / "b"), cells=cells)
    read = [files.source(cell, name="row").open_binary().read() for cell in both.dataset["file"]]
    assert read == [b"a", b"y", b"b", b"y"]


def test_columns_get_the_names_of_the_first_source_and_a_common_type(tmp_path: Path) -> None:
    said: list[str] = []
    first = Dataset.from_dict({"video": ["a.mp4"], "text": ["A"], "fps": [8.0], "other": [1], "index": [7], "n": [1]})
    second = Dataset.from_dict(
        {"text": ["b.mp4"], "video": [["B", "C"]], "fps": [8], "other": ["x"], "index": [7], "mask": ["m.png"]}
    )
    shared = {"root": str(tmp_path), "layout": ""}
    merged = merge_sources(
        {
            "a": MediaDataset(dataset=first, column="video", caption_column="text", **shared),
            "b": MediaDataset(
                dataset=second.select([0]),
                column="text",
                caption_column="video",
                conditions={"mask": "mask"},
                **{**shared, "root": str(tmp_path / "deep")},
            ),
        },
        say=said.append,
    )
    assert (merged.column, merged.caption_column, merged.conditions) == ("video", "text", {"mask": "mask"})
    assert merged.dataset[:] == {
        "video": ["a.mp4", "deep/b.mp4"],
        "text": [["A"], ["B", "C"]],
        "fps": [8.0, 8.0],
        "index": [7, 7],
        "n": [1, None],
        "mask": [None, "deep/m.png"],
    }
    assert said == ["Columns whose types differ between the sources are dropped: other."]
    wrong = MediaDataset(dataset=Dataset.from_dict({"video": [3]}), column="video", caption_column=None, **shared)
    with pytest.raises(ColumnError, match="video has different types in the sources: string and int64"):
        merge_sources({"a": MediaDataset(dataset=first, column="video", caption_column=None, **shared), "b": wrong})


def test_sources_are_named_by_their_paths_and_no_two_alike() -> None:
    assert name_sources([("a/clips", None), ("b/clips", None), ("c.jsonl", None), ("x", "y")]) == [
        "a/clips",
        "b/clips",
        "c",
        "y",
    ]
    assert name_sources([("a", "fast"), ("a", "slow")]) == ["fast", "slow"]
    for same in ([("a/clips", None)] * 2, [("a", "x"), ("b", "x")], [("x", None), ("b", "x")]):
        with pytest.raises(BucketingError, match="Two sources are named"):
            name_sources(same)
    with pytest.raises(BucketingError, match="at least one source"):
        name_sources([])


def test_weights_are_shares_of_an_epoch_and_multiply_those_of_rows() -> None:
    def rows(buckets: list[int], **columns) -> Dataset:
        return Dataset.from_dict({"bucket_id": buckets, **columns})

    data = [rows([0, 0, 0, -1, 0, 0]), rows([1, 1, 1])]
    weigh = partial(row_weights, columns=[None, None])
    assert weigh(data, repeats=[1.0, 1.0], shares=[None, None]) is None
    assert weigh(data, repeats=[1.0, 0.5], shares=[None, None]).tolist() == [1.0] * 6 + [0.5] * 3
    # Eight usable rows: six samples of the first source and two of the second.
    weights = weigh(data, repeats=[1.0, 1.0], shares=[3.0, 1.0])
    assert weights.tolist() == pytest.approx([6 / 5] * 6 + [2 / 3] * 3)
    own = partial(row_weights, [data[0], rows([1, 1, -1], kg=[1, 2, 5])], columns=[None, "kg"])
    assert own(repeats=[1.0, 2.0], shares=[None, None]).tolist() == [1.0] * 6 + [2.0, 4.0, 10.0]
    weights = own(repeats=[1.0, 1.0], shares=[1.0, 1.0])
    assert weights[:5].sum() - weights[3] + weights[5] == pytest.approx(weights[6:8].sum())
    with pytest.raises(BucketingError, match="all sources a `weight`, or none"):
        weigh(data, repeats=[1.0, 1.0], shares=[3.0, None])
    with pytest.raises(BucketingError, match="source 1 are rejected"):
        weigh([data[0], rows([-1])], repeats=[1.0, 1.0], shares=[1.0, 1.0])
    with pytest.raises(ColumnError, match="must hold numbers"):
        row_weights([rows([0], kg=["12 kg"])], columns=["kg"], repeats=[1.0], shares=[None])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0.0}, "`repeats` must be above 0"),
        ({"weight": -1.0}, "`weight` must be above 0"),
        ({"weight": float("nan")}, "`weight` must be above 0"),
        ({"weight": 1.0, "repeats": 2.0}, "give one of them"),
    ],
    ids=str,
)
def test_impossible_repeats_are_refused(settings, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        config(Path("a"), **settings)


def test_sources_that_cannot_go_together_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    video = TableConfig(bucket_tokens=[60], bucket_frames=[1, 9], image_sizes="video")
    with pytest.raises(BucketingError, match="`image_sizes` must be the same"):
        prepared(config(sources["clips"]), config(sources["old"], table=video))
    with pytest.raises(BucketingError, match="Two sources are named clips"):
        prepared(config(sources["clips"]), config(sources["clips"]))
    (tmp_path / "none.csv").write_text("file_name,caption\n")
    with pytest.raises(BucketingError, match="none"):
        prepared(config(sources["clips"]), config(tmp_path / "none.csv"))


def test_one_source_has_neither_a_source_nor_a_weight_column(sources: dict[str, Path]) -> None:
    one = prepare(config(sources["clips"]), spec=SPEC, say=lambda _: None)
    assert one.sources == ()
    assert not {SOURCE_COLUMN, ROW_WEIGHT} & set(one.dataset.column_names)
    half = prepare(config(sources["clips"], repeats=0.5), spec=SPEC, say=lambda _: None)
    assert half.dataset[ROW_WEIGHT][:] == [0.5] * 9


COMMON = {"bucket_tokens": [60], "target_fps": 8.0, "caption_column": "text"}


def test_a_source_takes_what_it_does_not_give_from_the_rest(tmp_path: Path) -> None:
    own = [{"dataset": "a"}, {"dataset": "b", "buckets": "64,96", "target_fps": 4.0, "caption_column": None}]
    first, second = make_sources(COMMON, own)
    assert (first.target_fps, first.table.bucket_tokens, first.caption_column) == (8.0, [60], "text")
    assert (second.target_fps, second.table.bucket_tokens, second.table.buckets) == (4.0, None, "64,96")
    (tmp_path / "x").mkdir()
    (tmp_path / "k.toml").write_text('[[datasets]]\nvideo_directory = "x"\nnum_repeats = 3\nseed = 1\n')
    said: list[str] = []
    (found,) = make_sources(COMMON, [{"dataset": str(tmp_path / "k.toml"), "target_fps": 16.0}], say=said.append)
    assert (found.dataset, found.repeats, found.target_fps) == (str(tmp_path / "x"), 3.0, 16.0)
    assert len(said) == 1
    assert "seed = 1 has no effect" in said[0]


def test_saved_settings_of_sources_give_the_same_sources_again() -> None:
    given = make_sources(
        COMMON, [{"dataset": "a", "repeats": 0.5}, {"dataset": "b", "table": "t.json", "weight": None}]
    )
    again = make_sources({}, settings_of_sources(given))
    assert [source.name for source in again] == ["a", "b"]
    assert settings_of_sources(again) == settings_of_sources(given)


def test_a_script_without_a_source_says_what_to_give() -> None:
    with pytest.raises(BucketingError, match="Give --dataset, or a file with `sources`"):
        sources_from({"dataset": None, **COMMON})
