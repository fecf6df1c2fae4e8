"""Images at the sizes of videos: prepared folders, batches, caches and training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_bucketing import AssignmentRule, BucketingError, BucketTable, OpenTable, ViewRule, open_table
from hf_bucketing.batching.rows import make_data
from hf_bucketing.caching import CacheConfig, cache_dataset
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.loaders import PackCollator, RandomResize
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.randomness import ROW
from hf_bucketing.streaming import PackGrouping, StreamingBucketBatcher
from tests.buckets.test_image_sizes import WAN, shape_of
from tests.conftest import run_script_here
from tests.training.training_cases import TINY_WAN, in_process, run

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16}


@pytest.fixture(scope="module")
def video_dir(media_dir: Path, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo media, prepared with images at the sizes of videos."""
    folder = tmp_path_factory.mktemp("images") / "prepared"
    prepare(media_dir, pipeline_dir, folder, *TOKENS)
    return folder


TOKENS = ("--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25", "--image_sizes", "video")


def prepare(media: Path, pipeline: Path, output: Path, *flags: object, **options):
    return run_script_here(
        "prepare_dataset.py",
        *flags,
        dataset=media,
        pretrained_model_name_or_path=pipeline,
        output_dir=output,
        target_fps=8,
        **options,
    )


def test_a_prepared_folder_keeps_the_choice(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"width": [96, 200], "height": [64, 100], "num_frames": [9, 1], "file": ["a", "b"]})
    table = BucketTable(sizes=((9, 64, 96),)).images_at_video_sizes()
    sizes = open_table(WAN).images_at_video_sizes([9], [64], [96], rule=AssignmentRule(max_upscale=1.5)).image_sizes
    prepared = PreparedDataset(dataset=map_columns(rows, BucketColumns(table, WAN)), table=table, column="file",
                               open_table=OpenTable(spec=WAN, image_sizes=sizes), caption_column=None)  # fmt: skip
    prepared.save(tmp_path / "data")
    back = PreparedDataset.load(tmp_path / "data")
    assert (back.table, back.open_table) == (table, prepared.open_table)
    assert back.open_table.fingerprint == prepared.open_table.fingerprint


def test_preparing_puts_images_into_buckets_of_video_sizes_and_leaves_videos(
    video_dir: Path, prepared_dir: Path
) -> None:
    own, data = PreparedDataset.load(prepared_dir), PreparedDataset.load(video_dir)
    assert own.open_table.image_sizes is None
    shapes = {shape_of(size) for size in data.table.sizes if size.frames > 1}
    images = 0
    for before, after in zip(own.dataset, data.dataset, strict=True):
        size = data.table.size(after["bucket_id"])
        assert shape_of(size) in shapes
        assert after["num_tokens"] == data.spec.num_tokens(size)
        assert after["num_frames"] == 1 or size == own.table.size(before["bucket_id"])
        images += size.frames == 1
    assert images == 6


def test_preparing_counts_rejected_images_and_needs_videos(media_dir, pipeline_dir, tmp_path: Path) -> None:
    table = ("--buckets", "96,96;80,160;176,80", "--bucket_frames", "9", "--image_sizes", "video")
    limits = ("--max_aspect_error", 0.3, "--max_upscale", 0.75)
    result = prepare(media_dir, pipeline_dir, tmp_path / "near", *table, *limits)
    reasons = PreparedDataset.load(tmp_path / "near").dataset["rejection"]
    assert reasons[6:9] == ["aspect", "none", "none"]
    assert re.search(rf"\b{reasons[:].count('aspect')} rows? rejected: aspect", result.stdout)
    data = PreparedDataset.load(tmp_path / "near")
    assert data.open_table.image_sizes.rule == AssignmentRule(max_aspect_error=0.3, max_upscale=0.75)
    larger = prepare(media_dir, pipeline_dir, tmp_path / "small", *table, "--max_upscale", 0.5)
    assert PreparedDataset.load(tmp_path / "small").dataset["rejection"][7:9] == ["too_small"] * 2
    assert "rows rejected: too_small" in larger.stdout
    for flags, message in (
        (("--bucket_frames", "1"), "buckets of several frames"),
        (("--split", "train[6:9]"), "no readable video"),
    ):
        result = prepare(media_dir, pipeline_dir, tmp_path / "no", *TOKENS, *flags, check=False)
        assert result.returncode == 1
        assert message in result.stderr.strip().splitlines()[-1]
        assert not (tmp_path / "no").exists()


def test_packs_decode_images_at_the_sizes_of_the_data_sets_videos(video_dir, pipeline_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    config = in_process(pipeline_dir, video_dir, tmp_path, **PACK)
    data = make_data(config, prepared.spec, TINY_WAN)
    sizes = data.sizes(np.arange(20))
    videos = {shape_of(size) for size, row in zip(sizes, prepared.dataset, strict=True) if row["num_frames"] > 1}
    seen = {}
    for batch in data.loader:
        for index, size, pixels in zip(batch["index"], batch["size"], batch["pixel_values"], strict=True):
            assert pixels.shape == (3, *size)
            assert size == sizes[index]
            assert data.num_tokens[index] == prepared.spec.num_tokens(size)
            seen[index] = size
    assert sorted(seen) == list(range(20))
    assert {shape_of(size) for size in sizes} == videos
    assert [shape_of(sizes[index]) for index in (6, 7, 8)] == [(128, 80), (96, 96), (64, 112)]


def test_streams_pack_images_at_the_sizes_of_videos(video_dir: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    rows = prepared.dataset.remove_columns(["bucket_id", "num_tokens", "aspect_ratio", "rejection"])
    stream = map_columns(rows.to_iterable_dataset(), BucketColumns(prepared.open_table, prepared.spec))
    collator = PackCollator(prepared.open_table, column=prepared.column,
                            root=prepared.root, views=ViewRule(random_crop=False))  # fmt: skip
    loader = StreamingBucketBatcher(stream, PackGrouping(max_tokens=640), collate_fn=collator).make_loader()
    shapes = set()
    for message in loader:
        if message.ended:
            break
        if message.batch is not None:
            assert sum(map(prepared.spec.num_tokens, message.batch["size"])) <= 640
            shapes |= {shape_of(size) for size in message.batch["size"]}
    assert shapes == set(prepared.open_table.image_sizes.sizes)


def test_sizes_drawn_at_random_and_rejected_rows_are_refused(video_dir, pipeline_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    with pytest.raises(BucketingError, match=r"`resize`.*--image_sizes own"):
        make_data(
            in_process(pipeline_dir, video_dir, tmp_path, **PACK, random_resize=32),
            prepared.spec,
            TINY_WAN,
        )
    with pytest.raises(BucketingError, match="`resize`"):
        PackCollator(prepared.open_table, resize=RandomResize(spec=WAN))
    collator = PackCollator(prepared.open_table)
    with pytest.raises(BucketingError, match=r"rejected as too_small; .*num_tokens is 0"):
        collator.target([{"num_frames": 1, "height": 20, "width": 30}])


@pytest.mark.parametrize(
    "flags", [pytest.param({"batching": "bucket"}, id="bucket"), pytest.param(PACK, id="pack", marks=pytest.mark.slow)]
)
def test_training_runs_with_images_at_the_sizes_of_videos(flags, video_dir, pipeline_dir, tmp_path: Path) -> None:
    losses = run(in_process(pipeline_dir, video_dir, tmp_path, **flags))
    assert len(losses) == 3
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_caches_hold_images_at_the_sizes_of_videos(batching, video_dir, pipeline_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    prepared = replace(prepared, dataset=prepared.dataset.select(range(5, 9)))
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    config = CacheConfig(folder=str(tmp_path / "cache"), batching=batching)
    cached, counts = cache_dataset(prepared, recipe, config)
    assert counts["encoded"] == 4
    cached.save(tmp_path / "cached")
    settings = {"train_batch_size": 1} if batching == "bucket" else PACK
    data = make_data(in_process(pipeline_dir, tmp_path / "cached", tmp_path, **settings), prepared.spec, TINY_WAN)
    expected = dict(zip(cached.dataset[ROW], data.sizes(np.arange(4)), strict=True))
    seen = {index: size for batch in data.loader for index, size in zip(batch["index"], batch["size"], strict=True)}
    assert seen == expected
    allowed = prepared.open_table.image_sizes.sizes if batching == "pack" else map(shape_of, prepared.table.sizes)
    assert {shape_of(seen[index]) for index in (6, 7, 8)} <= set(allowed)
