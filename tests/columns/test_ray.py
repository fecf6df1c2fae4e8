"""The same callables in Ray Data: row by row what Dataset.map computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_bucketing import LatentSpec, novelai_ladder, open_table
from hf_bucketing.columns import BucketColumns, MediaMetadata, load_source, map_columns
from hf_bucketing.columns.parquet import ParquetColumns

ray = pytest.importorskip("ray", reason="the ray extra is not installed")
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two workers on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


class Merged:
    """Ray replaces a batch by what is returned, so the new columns are joined to it."""

    def __init__(self, *functions) -> None:
        self.functions = functions

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for function in self.functions:
            batch = {**batch, **function(batch)}
        return batch


def in_ray(table: pa.Table, *functions) -> dict[str, list]:
    blocks = ray.data.from_arrow([table.slice(start, 7) for start in range(0, len(table), 7)])
    rows = blocks.map_batches(Merged(*functions), batch_size=5, concurrency=2).take_all()
    rows.sort(key=lambda row: row["row"])
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("table", [novelai_ladder(), open_table(WAN)], ids=["novelai", "open"])
def test_two_workers_compute_the_columns_of_dataset_map(cluster: None, table, media_dir: Path) -> None:
    spec = WAN if table != novelai_ladder() else LatentSpec(temporal_stride=1, spatial_stride=8)
    functions = (MediaMetadata("file_name", root=str(media_dir), target_fps=8), BucketColumns(table, spec))
    dataset = load_source(str(media_dir)).dataset
    dataset = dataset.add_column("row", list(range(len(dataset))))
    computed = in_ray(dataset.with_format("arrow")[:], *functions)
    wanted = dataset
    for function in functions:
        wanted = map_columns(wanted, function)
    assert computed.keys() == set(wanted.column_names)
    for name in wanted.column_names:
        assert computed[name] == wanted[name][:], name


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["raise", "reject"])
def test_two_workers_write_files_and_return_what_cannot_be_read(
    cluster: None, on_error, media_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name, paths in (("good.parquet", ["videos/0000.mp4"] * 3), ("bad.parquet", ["videos/0000.mp4", "gone.mp4"])):
        pq.write_table(pa.table({"file_name": paths}), tmp_path / "in" / name)
    columns = ParquetColumns(
        source=str(tmp_path / "in"),
        target=str(tmp_path / "out"),
        metadata=MediaMetadata("file_name", root=str(media_dir), target_fps=8, on_error=on_error),
        buckets=BucketColumns(novelai_ladder(), LatentSpec(temporal_stride=1, spatial_stride=8)),
    )
    files = ray.data.from_items([{"name": name} for name in columns.pending()], override_num_blocks=2)
    results = {row["name"]: row for row in files.map_batches(columns, batch_size=1).iter_rows()}
    assert (results["good.parquet"]["rows"], results["good.parquet"]["error"]) == (3, "")
    bad = results["bad.parquet"]
    if on_error == "raise":
        assert "bad.parquet, rows 0 to 1" in bad["error"]
        assert "gone.mp4 does not exist" in bad["error"]
        assert columns.pending() == ["bad.parquet"]
    else:
        assert (bad["rows"], bad["unreadable"], bad["error"]) == (2, 1, "")
        assert columns.pending() == []
