"""Tables that `num_buckets` chooses while preparing: from which rows, and with which other settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketingError, LatentSpec, Size, fitted_ladder
from hf_bucketing.columns import PreparedDataset, column_array
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
SIZES = [(96, 160), (96, 160), (160, 96), (128, 128), (112, 144)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of pictures of five sizes, in the second turned by a right angle."""
    root = tmp_path_factory.mktemp("pictures")
    for name, turned in (("upright", False), ("turned", True)):
        (root / name).mkdir()
        for number, (height, width) in enumerate(SIZES):
            shape = (height, width) if turned else (width, height)
            Image.new("RGB", shape).save(root / name / f"{number}.png")
            (root / name / f"{number}.txt").write_text("A picture.")
    return root


def prepared(*folders: Path, tables: list[TableConfig] | None = None, **settings) -> PreparedDataset:
    tables = tables or [TableConfig(bucket_tokens=[60], bucket_frames=[1], **settings)] * len(folders)
    sources = [SourceConfig(dataset=str(path), table=table) for path, table in zip(folders, tables, strict=True)]
    return prepare(sources, spec=SPEC, say=lambda _: None)


def sizes_of(dataset: Dataset) -> list[np.ndarray]:
    return [column_array(dataset, name) for name in ("num_frames", "height", "width")]


def test_the_table_is_that_of_the_rows_and_is_kept(pictures: Path, tmp_path: Path) -> None:
    made = prepared(pictures / "upright", num_buckets=3)
    made.save(tmp_path / "out")
    loaded = PreparedDataset.load(tmp_path / "out")
    expected = fitted_ladder(SPEC, [60], tuple(sizes_of(loaded.dataset)), num_buckets=3, max_aspect_ratio=2.5)
    assert made.table == loaded.table == expected
    assert Size(1, 96, 160) in expected.sizes
    assigned = expected.assign(*sizes_of(loaded.dataset)).bucket_id
    assert loaded.dataset["bucket_id"][:] == assigned.tolist()
    assert min(assigned) >= 0


def test_sources_of_one_table_share_their_buckets(pictures: Path) -> None:
    folders = pictures / "upright", pictures / "turned"
    both = prepared(*folders, num_buckets=2)
    samples = tuple(sizes_of(both.dataset))
    assert len(both.table) == 2
    assert both.table == fitted_ladder(SPEC, [60], samples, num_buckets=2, max_aspect_ratio=2.5)
    tables = [TableConfig(bucket_tokens=[60], bucket_frames=[1], num_buckets=number) for number in (1, 2)]
    apart = [prepared(folder, tables=[table]) for folder, table in zip(folders, tables, strict=True)]
    assert set(prepared(*folders, tables=tables).table.sizes) == {size for one in apart for size in one.table.sizes}


def test_each_budget_has_so_many_buckets(pictures: Path) -> None:
    table = TableConfig(bucket_tokens=[30, 60], bucket_frames=[1], num_buckets=2, each_budget=True)
    made = prepared(pictures / "upright", tables=[table])
    tokens = made.table.num_tokens(np.arange(len(made.table)), spec=SPEC)
    assert sorted((tokens > 40).tolist()) == [False, False, True, True]


def test_clips_are_as_long_as_the_longest_of_the_numbers_of_frames(media_dir: Path) -> None:
    settings = {"bucket_tokens": [60], "bucket_frames": [1, 9], "max_frames": "none"}
    rows = {}
    for number in (None, 4):
        table = TableConfig(**settings, num_buckets=number)
        source = SourceConfig(dataset=str(media_dir), target_fps=8.0, clips="all", table=table)
        rows[number] = prepare(source, spec=SPEC, say=lambda _: None)
    assert sizes_of(rows[4].dataset)[0].tolist() == sizes_of(rows[None].dataset)[0].tolist()
    assert max(rows[4].dataset["num_frames"]) == rows[4].table.max_frames == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": "64,64"}, "--num_buckets goes with --bucket_tokens"),
        ({"table": Path("table.json")}, "--num_buckets goes with --bucket_tokens"),
        ({"bucket_tokens": [60], "bucket_sizes": [(64, 96)]}, "`bucket_sizes` names some"),
        ({"bucket_tokens": [60], "aspect_step": 0.16}, "Omit `aspect_step`"),
        ({"bucket_tokens": [60], "image_sizes": "video"}, "Omit `image_sizes`"),
        ({"bucket_tokens": [60], "num_buckets": 0}, "`num_buckets` must be at least 1, got 0"),
    ],
)
def test_settings_that_contradict_are_named(settings, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        TableConfig(**{"num_buckets": 4, **settings})


def test_own_sizes_of_the_model_are_chosen_only_where_rows_keep_more() -> None:
    rows = [1] * 3, [480] * 3, [832] * 3
    table = TableConfig(bucket_tokens=[1560], bucket_frames=[1], num_buckets=4)
    assert table.make(SPEC, native_sizes=[(480, 832), (512, 512)], samples=rows).sizes == (Size(1, 480, 832),)
    with pytest.raises(BucketingError, match="give them as `samples`"):
        table.make(SPEC)
    assert len(table.ladder.make(SPEC)) > 4


def test_rows_that_fit_no_bucket_are_an_error_that_names_what_to_change(pictures: Path) -> None:
    with pytest.raises(BucketingError, match="No sample fills a bucket"):
        prepared(pictures / "upright", tables=[TableConfig(bucket_tokens=[400], bucket_frames=[1], num_buckets=2)])
