"""Columns of parquet files, file by file: the same values as without, complete files, and what a second run does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Value, Video, load_dataset

from hf_bucketing import BucketTable, LatentSpec
from hf_bucketing.columns import (
    BucketColumns,
    ExistingMetadata,
    MediaMetadata,
    PreparedDataset,
    add_sizes,
    load_source,
    map_columns,
)
from hf_bucketing.columns.parquet import ParquetColumns, remove_partial
from hf_bucketing.errors import ColumnError, MediaError
from tests.conftest import ROOT, run_script_here

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable.parse("64,96;96,64;64,64", frames=[1, 9, 17])
SIZES = ("width", "height", "num_frames", "fps", "num_frames_estimated")


@pytest.fixture
def rows(media_dir: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (media_dir / "metadata.jsonl").read_text().splitlines()]


def write(folder: Path, name: str, rows: list[dict], **options) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / name, **options)


def columns_of(tmp_path: Path, root: Path | str | None, *, table: BucketTable = TABLE, overwrite=False, **options):
    return ParquetColumns(
        source=str(tmp_path / "in"),
        target=str(tmp_path / "out"),
        metadata=MediaMetadata("file_name", root=None if root is None else str(root), target_fps=8.0, **options),
        buckets=BucketColumns(table, SPEC),
        overwrite=overwrite,
    )


def without_files(rows: list[dict], root: Path) -> Dataset:
    """Compute what the files must hold with `map_columns`."""
    dataset = Dataset.from_list(rows)
    sized = map_columns(dataset, MediaMetadata("file_name", root=str(root)))
    at_rate = ExistingMetadata("width", "height", num_frames="num_frames", fps="fps", target_fps=8.0)
    buckets = map_columns(map_columns(sized, at_rate, overwrite=True), BucketColumns(TABLE, SPEC))
    for name in ("num_frames", "fps"):
        buckets = buckets.remove_columns([name]).add_column(name, sized[name][:])
    return buckets


def test_a_file_gets_the_columns_that_map_columns_adds(rows, media_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", "a/part.parquet", rows, row_group_size=7)
    columns = columns_of(tmp_path, media_dir)
    assert columns.pending() == ["a/part.parquet"]
    assert columns.write("a/part.parquet") == ("a/part.parquet", 20, 0, "")
    table = pq.read_table(tmp_path / "out" / "a" / "part.parquet")
    assert pq.read_metadata(tmp_path / "out" / "a" / "part.parquet").num_row_groups == 3
    wanted = without_files(rows, media_dir)
    assert table.column_names == ["file_name", "caption", *columns.output_columns]
    for name in ("caption", *columns.output_columns):
        assert table[name].to_pylist() == wanted[name][:], name
    assert table["file_name"].to_pylist() == [str(media_dir / row["file_name"]) for row in rows]
    types = Features.from_arrow_schema(table.schema)
    assert [types[name].dtype for name in SIZES] == ["int64", "int64", "int64", "float64", "bool"]


def test_only_what_is_missing_or_has_changed_is_pending(rows, media_dir: Path, tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / "in", name, rows[:2])
    columns = columns_of(tmp_path, media_dir)
    assert columns.pending() == ["a.parquet", "b.parquet"]
    assert columns({"name": ["a.parquet"]})["rows"].tolist() == [2]
    assert columns.pending() == ["b.parquet"]
    columns.write("b.parquet")
    assert columns.pending() == []
    write(tmp_path / "in", "a.parquet", rows[:3])
    assert columns.pending() == ["a.parquet"]
    assert columns_of(tmp_path, media_dir, table=BucketTable.parse("64,96")).pending() == ["a.parquet", "b.parquet"]
    (tmp_path / "in" / "a.parquet").unlink()
    with pytest.raises(MediaError, match=r"holds 1 files that .* does not have \(any more\), such as a\.parquet"):
        columns.pending()


def test_an_unreadable_file_is_an_error_that_names_file_and_rows_or_is_counted(rows, media_dir, tmp_path) -> None:
    bad = [*rows, {"file_name": "gone.mp4", "caption": "nothing"}]
    write(tmp_path / "in", "part.parquet", bad, row_group_size=6)
    result = columns_of(tmp_path, media_dir)({"name": ["part.parquet"]})
    assert "part.parquet, rows 18 to 20" in result["error"][0]
    assert "gone.mp4 does not exist" in result["error"][0]
    assert not list((tmp_path / "out").rglob("*.parquet*"))
    result = columns_of(tmp_path, media_dir, on_error="reject")({"name": ["part.parquet"]})
    assert (result["rows"][0], result["unreadable"][0], result["error"][0]) == (21, 1, "")
    assert pq.read_table(tmp_path / "out" / "part.parquet")["rejection"].to_pylist()[-1] == "unreadable"


def test_bytes_and_typed_columns_are_kept_with_their_type(rows, media_dir: Path, tmp_path: Path) -> None:
    paths = [row["file_name"] for row in rows if row["file_name"].endswith(".mp4")][:2]
    cells = [{"bytes": (media_dir / paths[0]).read_bytes(), "path": "first.mp4"}, {"bytes": None, "path": paths[1]}]
    features = Features(file_name=Video(), caption=Value("string"))
    (tmp_path / "in").mkdir()
    typed = pa.table({"file_name": cells, "caption": ["a", "b"]}, schema=features.arrow_schema)
    pq.write_table(typed, tmp_path / "in" / "part.parquet")
    columns_of(tmp_path, media_dir).write("part.parquet")
    made = load_dataset("parquet", data_files=str(tmp_path / "out" / "part.parquet"), split="train")
    assert made.features["file_name"] == Video()
    cells = made.cast_column("file_name", Video(decode=False))["file_name"][:]
    assert [cell["path"] for cell in cells] == ["first.mp4", str(media_dir / paths[1])]
    assert made["num_frames"][:] == without_files([{"file_name": path} for path in paths], media_dir)["num_frames"][:]


def test_paths_below_a_url_become_urls(rows, media_dir: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(media_dir / "images"), "/bucket/images", recursive=True)
    images = [row for row in rows if row["file_name"].startswith("images")]
    write(tmp_path / "in", "a.parquet", images)
    columns = columns_of(tmp_path, "memory://bucket")
    assert columns.write("a.parquet") == ("a.parquet", len(images), 0, "")
    table = pq.read_table(tmp_path / "out" / "a.parquet")
    assert table["file_name"].to_pylist() == [f"memory://bucket/{row['file_name']}" for row in images]


def test_paths_that_leave_their_root_stay_refused(media_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "in", "part.parquet", [{"file_name": "../secret.mp4"}])
    columns_of(tmp_path, media_dir, on_error="reject").write("part.parquet")
    assert pq.read_table(tmp_path / "out" / "part.parquet")["file_name"].to_pylist() == ["../secret.mp4"]


def test_what_cannot_be_done_is_said_before_anything_is_written(rows, media_dir: Path, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, media_dir)
    with pytest.raises(MediaError, match="holds no parquet file"):
        columns.pending()
    write(tmp_path / "in", "part.parquet", [{"video": "a.mp4"}])
    with pytest.raises(ColumnError, match=r"part\.parquet has no media column 'file_name'"):
        columns.pending()
    write(tmp_path / "in", "part.parquet", [{**rows[0], "width": 8}])
    with pytest.raises(ColumnError, match=r"already has \['width'\].*`overwrite=True`"):
        columns.pending()
    assert columns_of(tmp_path, media_dir, overwrite=True).write("part.parquet").rows == 1
    (tmp_path / "in" / "part.parquet").write_bytes(b"nonsense")
    with pytest.raises(MediaError, match="cannot be read as parquet"):
        columns.pending()
    with pytest.raises(ColumnError, match="must be folders apart"):
        ParquetColumns(source=str(tmp_path), target=str(tmp_path / "out"), metadata=columns.metadata,
                       buckets=columns.buckets)  # fmt: skip


def test_sizes_of_files_that_could_not_be_read_are_used_where_these_are_rejected(rows, media_dir, tmp_path) -> None:
    write(tmp_path / "in", "part.parquet", [*rows, {"file_name": "gone.mp4", "caption": "nothing"}])
    columns_of(tmp_path, media_dir, on_error="reject").write("part.parquet")
    dataset = load_source(str(tmp_path / "out")).dataset
    sized = add_sizes(dataset, MediaMetadata("file_name", on_error="reject"))
    assert sized.origin.startswith("Sizes are the columns width, height, num_frames, fps")
    assert sized.dataset["width"][-1] == -1
    with pytest.raises(MediaError, match=r"gone\.mp4 does not exist"):
        add_sizes(dataset, MediaMetadata("file_name"))
    nothing = dataset.remove_columns(["width"]).add_column("width", [*dataset["width"][:20], None])
    assert "1 rows lack a size" in add_sizes(nothing, MediaMetadata("file_name", on_error="reject")).origin


FLAGS = ("--target_fps", 8, "--buckets", "64,96;96,64;64,64", "--bucket_frames", "1,9,17", "--on_error", "reject")


@pytest.mark.every
@pytest.mark.slow
def test_a_run_on_two_ray_workers_that_was_killed_continues_and_preparing_reads_no_header_again(
    rows, media_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    pytest.importorskip("ray", reason="the ray extra is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    source, target, names = tmp_path / "in", tmp_path / "out", [f"part-{number}.parquet" for number in range(6)]
    all_rows = []
    for name in names:
        part = [{**row, "caption": f"{row['caption']}, {name}"} for row in rows * 50]
        write(source, name, part)
        all_rows += part
    part[7]["file_name"] = "gone.mp4"
    write(source, name, part)
    common = ("--pretrained_model_name_or_path", pipeline_dir, *FLAGS)
    command = ("--input_dir", source, "--output_dir", target, "--media_dir", media_dir, "--num_workers", 2, *common)
    kill_when_a_file_is_there([ROOT / "scripts" / "prepare_with_ray.py", *command], target)
    done = {path.name: path.stat().st_mtime_ns for path in target.glob("*.parquet")}
    assert 0 < len(done) < 6
    assert all(pq.read_metadata(target / name).num_rows == 1000 for name in done)

    result = run_script_here("prepare_with_ray.py", *command)
    assert f"6 files: {len(done)} are done, {6 - len(done)} are missing or have changed" in result.stdout
    assert sorted(path.name for path in target.iterdir()) == names  # nothing partial either
    assert {name: (target / name).stat().st_mtime_ns for name in done} == done
    assert "6 are done, 0 are missing" in run_script_here("prepare_with_ray.py", *command).stdout

    assert f"HF_BUCKETING_ALLOWED_PATHS={media_dir} to prepare" in result.stdout
    monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", str(media_dir))
    result = run_script_here(
        "prepare_dataset.py", "--dataset", target, "--overwrite", *common, "--output_dir", tmp_path / "with"
    )
    assert "Sizes are the columns width, height, num_frames, fps; the headers of 16 files agree." in result.stdout
    (media_dir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in all_rows))
    run_script_here(
        "prepare_dataset.py", "--dataset", media_dir / "rows.jsonl", *common, "--output_dir", tmp_path / "without"
    )
    (media_dir / "rows.jsonl").unlink()
    made, wanted = (PreparedDataset.load(tmp_path / name).dataset for name in ("with", "without"))
    for name in ("caption", "width", "height", "num_frames", "fps", "bucket_id", "num_tokens", "rejection"):
        assert made[name][:] == wanted[name][:], name


def kill_when_a_file_is_there(command: list[object], folder: Path) -> None:
    """Start a script, and kill it and all that it started as soon as a folder holds a complete file."""
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(folder.glob("*.parquet")):
        assert process.poll() is None, "the script ended before it could be killed"
        assert time.monotonic() < deadline, "no file was written"
        time.sleep(0.02)
    for running in [tree := psutil.Process(process.pid), *tree.children(recursive=True)]:
        running.send_signal(signal.SIGKILL)
    process.wait()


def test_parts_of_unfinished_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".part.parquet.0123.partial").touch()
    (tmp_path / "part.parquet").touch()
    remove_partial(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["part.parquet"]
