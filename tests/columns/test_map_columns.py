"""Columns by Dataset.map: media metadata, buckets, caches, streaming, prepared folders."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, Video, concatenate_datasets, load_dataset
from datasets.table import IndexedTableMixin

from hf_bucketing import (
    AssignmentRule,
    BucketingError,
    BucketTable,
    ColumnError,
    LatentSpec,
    MediaError,
    Size,
    open_table,
)
from hf_bucketing.buckets.arrays import column_values
from hf_bucketing.columns import BucketColumns, MediaMetadata, column_array, load_source, map_columns
from hf_bucketing.columns.arrays import column_batches
from hf_bucketing.synthetic.media import DEMO_CLIPS

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 64, 64), Size(9, 64, 96), Size(9, 96, 64)))


def expected_sizes(count: int) -> list[tuple[int, int, int]]:
    clips = [DEMO_CLIPS[number % len(DEMO_CLIPS)] for number in range(count)]
    return [(clip.width, clip.height, clip.frames) for clip in clips]


def sizes_of(dataset) -> list[tuple[int, int, int]]:
    return [(row["width"], row["height"], row["num_frames"]) for row in dataset]


def test_a_folder_of_images_and_videos_loads_with_its_sizes(media_dir: Path) -> None:
    loaded = load_source(str(media_dir))
    assert (loaded.column, loaded.root) == ("file_name", str(media_dir))
    dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, root=loaded.root))
    assert sizes_of(dataset) == expected_sizes(20)
    assert set(dataset["fps"]) == {0.0, 8.0, 16.0}
    assert all("a " in caption for caption in dataset["caption"])


def test_target_fps_counts_frames_at_that_rate_and_makes_none_up(media_dir: Path) -> None:
    loaded = load_source(str(media_dir))
    dataset = map_columns(loaded.dataset, MediaMetadata(loaded.column, root=loaded.root, target_fps=8))
    assert dataset["num_frames"][:9] == [17, 17, 9, 17, 25, 9, 1, 1, 1]
    assert dataset["fps"][:9] == [8.0] * 6 + [0.0] * 3


def test_videofolder_and_image_features_with_paths_or_bytes(media_dir: Path) -> None:
    videos = load_source(str(media_dir / "videos"))
    assert videos.column == "file_name", "it has a metadata.jsonl of its own"
    folder = load_dataset("videofolder", data_dir=str(media_dir / "videos"), split="train")
    assert isinstance(folder.features["video"], Video)
    mapped = map_columns(folder, MediaMetadata("video"))
    assert sorted(sizes_of(mapped)) == sorted(size for size in expected_sizes(20) if size[2] > 1)
    assert mapped.features["video"].decode is False
    pictures = sorted((media_dir / "images").iterdir())
    cells = [{"path": str(pictures[0])}, {"path": None, "bytes": pictures[1].read_bytes()}]
    images = Dataset.from_dict({"image": cells}, features=Features(image=Image()))
    assert sizes_of(map_columns(images, MediaMetadata("image"))) == [(128, 192, 1), (160, 160, 1)]


def test_unreadable_files_stop_the_map_by_name_or_become_rejections(tmp_path: Path, media_dir: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"nonsense")
    (tmp_path / "empty.mp4").write_bytes(b"")
    shutil.copy(next((media_dir / "videos").glob("*.mp4")), tmp_path / "good.mp4")
    dataset = Dataset.from_dict({"path": ["good.mp4", "broken.mp4", "empty.mp4", "gone.mp4"]})
    with pytest.raises(MediaError, match=r"broken\.mp4"):
        map_columns(dataset, MediaMetadata("path", root=str(tmp_path)))
    mapped = map_columns(dataset, MediaMetadata("path", root=str(tmp_path), on_error="reject"))
    mapped = map_columns(mapped, BucketColumns(open_table(WAN), WAN))
    unreadable = "unreadable"
    assert mapped["rejection"] == ["none", unreadable, unreadable, unreadable]
    assert mapped["num_tokens"][1:] == [0, 0, 0]


def sized(**columns) -> Dataset:
    return Dataset.from_dict({"width": [96, 64, 640], "height": [64, 96, 64], "num_frames": [9, 12, 1], **columns})


def test_bucket_columns_hold_bucket_tokens_ratio_and_rejection() -> None:
    mapped = map_columns(sized(), BucketColumns(TABLE, WAN))
    assert mapped["bucket_id"] == [1, 2, -1]
    assert mapped["num_tokens"] == [3 * 4 * 6, 3 * 6 * 4, 0]
    assert mapped["rejection"] == ["none", "none", "aspect"]
    assert mapped["aspect_ratio"] == pytest.approx([1.5, 2 / 3, 10])
    with pytest.raises(BucketingError, match="whole tokens"):
        map_columns(sized(), BucketColumns(BucketTable.parse("60,60"), WAN))


def test_rows_without_frames_are_images_and_rows_without_a_size_unreadable() -> None:
    images = Dataset.from_dict({"width": [100, None, 640], "height": [100, 96, 64]})
    mapped = map_columns(images, BucketColumns(TABLE, WAN))
    assert mapped["bucket_id"] == [0, -1, -1]
    assert mapped["rejection"] == ["none", "unreadable", "aspect"]
    plain = images.map(BucketColumns(TABLE, WAN), batched=True)
    assert plain["rejection"] == mapped["rejection"]
    assert (
        images.with_format("numpy").map(BucketColumns(TABLE, WAN), batched=True)["rejection"][:].tolist()
        == plain["rejection"][:]
    )


def test_the_rule_reaches_the_assignment_and_the_cache_key() -> None:
    rule = AssignmentRule(max_aspect_error=3.0)
    assert map_columns(sized(), BucketColumns(TABLE, WAN, rule=rule))["bucket_id"] == [1, 2, 0]
    with pytest.raises(BucketingError, match="no effect"):
        BucketColumns(open_table(WAN), WAN, rule=rule)


def test_only_the_new_columns_are_written(tmp_path: Path) -> None:
    payload = [bytes([number]) * 1_000_000 for number in range(3)]
    sized(payload=payload).save_to_disk(str(tmp_path / "data"))
    mapped = map_columns(Dataset.load_from_disk(str(tmp_path / "data")), BucketColumns(TABLE, WAN))
    assert mapped[1]["payload"] == payload[1]
    written = list((tmp_path / "data").glob("cache-*.arrow"))
    assert written
    assert sum(path.stat().st_size for path in written) < 20_000


@pytest.mark.parametrize("choose", [
    lambda dataset: dataset.shuffle(seed=1), lambda dataset: dataset.select([5, 1, 1, 30]),
    lambda dataset: dataset.train_test_split(0.25, seed=0)["train"],
], ids=["shuffled", "selected", "split"])  # fmt: skip
def test_the_media_of_chosen_rows_are_not_copied(choose, tmp_path: Path) -> None:
    media = [{"bytes": bytes([number]) * 100_000, "path": None} for number in range(40)]
    numbers = list(range(64, 144, 2))
    whole = sized(width=numbers, height=numbers[::-1], num_frames=[9] * 40).add_column("image", media)
    whole.save_to_disk(tmp_path / "whole")
    chosen = choose(Dataset.load_from_disk(tmp_path / "whole"))
    before = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    mapped = map_columns(chosen, BucketColumns(TABLE, WAN))
    again = map_columns(mapped, BucketColumns(TABLE, WAN), overwrite=True)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) - before < 100_000
    expected = map_columns(chosen.flatten_indices(), BucketColumns(TABLE, WAN))
    for dataset in (mapped, again):
        assert dataset.features == expected.features
        assert dataset.with_format(None)[:] == expected.with_format(None)[:]
        assert dataset.select([2, 0])[:] == expected.select([2, 0])[:]
    assert mapped._fingerprint == map_columns(chosen, BucketColumns(TABLE, WAN))._fingerprint


def test_columns_upon_columns_survive_processes_and_pickling(media_dir: Path) -> None:
    """The second callable reads only what the first one wrote; the table is joined of parts."""
    dataset = load_source(str(media_dir)).dataset
    sizes = map_columns(dataset, MediaMetadata("file_name", root=str(media_dir), target_fps=8), num_proc=2)
    buckets = map_columns(sizes, BucketColumns(open_table(WAN), WAN), num_proc=2)
    again = map_columns(buckets, BucketColumns(TABLE, WAN), num_proc=2, overwrite=True)
    for mapped, table in ((buckets, open_table(WAN)), (again, TABLE)):
        assert pickle.loads(pickle.dumps(mapped))[:] == mapped[:]
        alone = map_columns(sizes, BucketColumns(table, WAN))
        assert mapped["bucket_id"] == alone["bucket_id"][:]


def test_a_selection_of_rows_keeps_its_order() -> None:
    mapped = map_columns(sized(name=list("abc")).select([2, 0]), BucketColumns(TABLE, WAN))
    assert list(zip(mapped["name"], mapped["bucket_id"], strict=True)) == [("c", -1), ("a", 1)]


def test_the_callables_are_plain_batch_functions_also_for_streams(media_dir: Path) -> None:
    loaded = load_source(str(media_dir))
    metadata, columns = MediaMetadata("file_name", root=str(media_dir)), BucketColumns(open_table(WAN), WAN)
    wanted = map_columns(map_columns(loaded.dataset, metadata), columns)
    plain = loaded.dataset.map(metadata, batched=True).map(columns, batched=True)
    stream = map_columns(map_columns(loaded.dataset.to_iterable_dataset(), metadata), columns)
    assert plain[:] == wanted[:]
    assert list(stream) == list(wanted)


def test_a_second_call_comes_from_the_cache_and_another_table_does_not(tmp_path: Path) -> None:
    sized().save_to_disk(str(tmp_path / "data"))
    dataset = Dataset.load_from_disk(str(tmp_path / "data"))
    fingerprints = [
        map_columns(dataset, BucketColumns(table, WAN))._fingerprint
        for table in (TABLE, BucketTable(sizes=TABLE.sizes), BucketTable(sizes=TABLE.sizes[::-1]))
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    changed = BucketColumns(TABLE, WAN)
    object.__setattr__(changed, "rule_version", 99)
    assert map_columns(dataset, changed)._fingerprint != fingerprints[0]


def test_the_format_of_the_caller_stays() -> None:
    numpy_rows = map_columns(sized(caption=["a", "b", "c"]).with_format("numpy"), BucketColumns(TABLE, WAN))
    assert numpy_rows.format["type"] == "numpy"
    assert isinstance(numpy_rows["bucket_id"][:], np.ndarray)
    narrow = map_columns(
        sized(caption=["a", "b", "c"]).with_format("numpy", columns=["caption"]), BucketColumns(TABLE, WAN)
    )
    assert set(narrow[0]) == {"caption", "aspect_ratio", "bucket_id", "num_tokens", "rejection"}
    assert map_columns(sized(), BucketColumns(TABLE, WAN)).format["type"] is None


def test_num_proc_gives_the_same_rows(media_dir: Path) -> None:
    loaded = load_source(str(media_dir))
    metadata = MediaMetadata("file_name", root=str(media_dir))
    assert map_columns(loaded.dataset, metadata, num_proc=2)[:] == map_columns(loaded.dataset, metadata)[:]


def test_missing_and_existing_columns_and_empty_data_sets_are_errors_by_name() -> None:
    with pytest.raises(ColumnError, match=r"MediaMetadata reads \['clip'\].*width"):
        map_columns(sized(), MediaMetadata("clip"))
    mapped = map_columns(sized(), BucketColumns(TABLE, WAN))
    with pytest.raises(ColumnError, match="overwrite=True"):
        map_columns(mapped, BucketColumns(TABLE, WAN))
    again = map_columns(mapped, BucketColumns(open_table(WAN), WAN), overwrite=True)
    assert again["num_tokens"] == [3 * 4 * 6, 3 * 6 * 4, 4 * 40]
    with pytest.raises(ColumnError, match="empty"):
        map_columns(sized().select([]), BucketColumns(TABLE, WAN))
    for options in ({"target_fps": 0}, {"on_error": "ignore"}):
        with pytest.raises(ColumnError):
            MediaMetadata("video", **options)


def test_loading_says_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="does not exist"):
        load_source(str(tmp_path / "nowhere"))
    (tmp_path / "metadata.jsonl").write_text("")
    with pytest.raises(MediaError, match="is empty"):
        load_source(str(tmp_path))
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"name": "x", "caption": "y"}) + "\n")
    with pytest.raises(ColumnError, match="no media column"):
        load_source(str(tmp_path))
    assert load_source(str(tmp_path), media_column="name").column == "name"


def test_a_whole_column_is_an_array_of_the_rows_as_they_are_chosen_and_formatted() -> None:
    dataset = sized(file_name=list("abc")).select([2, 0])
    for rows in (dataset, dataset.with_format("pandas"), concatenate_datasets([dataset, dataset])):
        for name in ("width", "file_name"):
            column = column_array(rows, name)
            assert isinstance(column, np.ndarray)
            assert column.tolist() == rows.with_format(None)[name][:]
    with pytest.raises(ColumnError, match="no column 'depth', only"):
        column_array(dataset, "depth")


def test_rows_that_indices_choose_are_not_gathered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    count = 2000
    sides = {name: rng.integers(64, 900, count) for name in ("width", "height")}
    rows = sized(**sides, num_frames=[9] * count, file_name=["a"] * count)
    gathered, gather = [], IndexedTableMixin.fast_gather
    monkeypatch.setattr(
        IndexedTableMixin, "fast_gather", lambda table, rows: gathered.append(len(rows)) or gather(table, rows)
    )
    chosen = rows.shuffle(seed=0).select(range(0, count, 2))
    mapped, plain = (
        map_columns(chosen, BucketColumns(TABLE, WAN)),
        map_columns(chosen.flatten_indices(), BucketColumns(TABLE, WAN)),
    )
    gathered.clear()  # by `flatten_indices`
    for name in mapped.column_names:
        assert column_array(mapped, name).tolist() == column_array(plain, name).tolist()
        assert [*itertools.chain(*(cells.to_pylist() for cells in column_batches(mapped, name)))] == plain[name][:]
    assert column_values(mapped["bucket_id"]).tolist() == plain["bucket_id"][:]
    assert not gathered


def test_a_column_with_missing_values_is_no_column_of_whole_numbers() -> None:
    dataset = Dataset.from_dict({"bucket_id": [0, None, 1]})
    with pytest.raises(TypeError):
        column_values(dataset["bucket_id"], np.int64)
