"""Images at the sizes of videos: in buckets, in packs, in caches and in training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from hf_bucketing import (
    AssignmentRule,
    BucketingError,
    BucketTable,
    ImageSizes,
    LatentSpec,
    OpenTable,
    Rejection,
    Size,
    open_table,
    token_ladder,
)
from hf_bucketing.loading import PackCollator, PackGrouping, RandomResize, StreamingBucketBatcher
from hf_bucketing.mapping import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.training.caching import CacheJob
from hf_bucketing.training.data import make_data
from hf_bucketing.training.recipes import recipe_of

from .conftest import run_script_here
from .test_training_settings import in_process, run

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
LADDER = token_ladder(WAN, [400, 1600], frames=[1, 9, 33])
PACK = {"batching": "pack", "capacity": 640, "strip_length": 16}
SIDES = st.integers(16, 1500)
SHAPES = st.tuples(SIDES, SIDES)


@pytest.fixture(autouse=True)
def fresh_accelerator():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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
        *("--dataset", media, "--pretrained_model_name_or_path", pipeline, "--output_dir", output),
        *("--target_fps", 8, *flags),
        **options,
    )


def shape_of(size: Size) -> tuple[int, int]:
    return size.height, size.width


def error(first: tuple[int, int], second: tuple[int, int]) -> float:
    return abs(math.log(first[1] / first[0]) - math.log(second[1] / second[0]))


def covers(larger: tuple[int, int], smaller: tuple[int, int]) -> bool:
    return larger[0] >= smaller[0] and larger[1] >= smaller[1]


def test_the_one_frame_buckets_become_the_sizes_of_the_videos_buckets() -> None:
    table = LADDER.images_at_video_sizes()
    images = [size for size in table.sizes if size.frames == 1]
    videos = [size for size in LADDER.sizes if size.frames > 1]
    assert {shape_of(size) for size in images} == {shape_of(size) for size in videos}
    assert [size for size in table.sizes if size.frames > 1] == videos
    assert table.tiers[len(images) :] == LADDER.tiers[-len(videos) :]
    assert BucketTable.from_json(table.to_json()) == table
    assert table.fingerprint != LADDER.fingerprint
    assert table.images_at_video_sizes() == table


def test_images_take_the_largest_videos_size_that_does_not_enlarge_them_and_the_nearest_ratio_of_those() -> None:
    sizes = ((1, 512, 512), (9, 256, 256), (9, 192, 320), (33, 128, 128), (33, 96, 160), (33, 160, 96))
    table = BucketTable(sizes=sizes, base=1).images_at_video_sizes()
    assert table.size(table.base) == (9, 256, 256)
    assert table.tiers == (1, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    cases = {(600, 600): (256, 256), (600, 900): (192, 320), (900, 600): (256, 256), (200, 200): (128, 128),
             (190, 110): (160, 96), (100, 100): Rejection.TOO_SMALL, (300, 3000): Rejection.ASPECT}  # fmt: skip
    result = table.assign(np.ones(len(cases)), *zip(*cases, strict=True))
    for image, expected, bucket, rejection in zip(*zip(*cases.items(), strict=True), result.bucket_id,
                                                  result.rejection, strict=True):  # fmt: skip
        assert expected == (rejection if bucket < 0 else shape_of(table.size(bucket))), image


def test_a_table_without_videos_or_with_a_base_of_images_is_refused() -> None:
    with pytest.raises(BucketingError, match="buckets of several frames"):
        BucketTable.parse("64,64").images_at_video_sizes()
    with pytest.raises(BucketingError, match=r"base bucket .* give the table another base"):
        BucketTable(sizes=((1, 64, 64), (9, 32, 32)), base=0).images_at_video_sizes()


@given(st.lists(st.tuples(st.integers(1, 60), SIDES, SIDES), min_size=1, max_size=30))
def test_in_buckets_videos_stay_and_images_transpose_with_the_table(samples) -> None:
    table = LADDER.images_at_video_sizes()
    frames, heights, widths = np.array(samples).T
    before, after, turned = (
        LADDER.assign(frames, heights, widths),
        table.assign(frames, heights, widths),
        table.assign(frames, widths, heights),
    )
    for row, count in enumerate(frames):
        assert after.rejection[row] == turned.rejection[row]
        if count > 1:
            assert before.rejection[row] == after.rejection[row]
        if after.bucket_id[row] >= 0:
            size, other = table.size(after.bucket_id[row]), table.size(turned.bucket_id[row])
            assert other == (size.frames, size.width, size.height) or heights[row] == widths[row]
            assert count == 1 or size == LADDER.size(before.bucket_id[row])


@given(st.lists(SHAPES, min_size=1, max_size=6), st.lists(SHAPES, min_size=1, max_size=20), st.booleans())
def test_in_packs_an_image_takes_the_nearest_video_size_that_does_not_enlarge_it(videos, images, linear) -> None:
    rule = AssignmentRule(metric="linear", max_aspect_error=0.7) if linear else AssignmentRule()
    frames = np.array([9] * len(videos) + [1] * len(images))
    heights, widths = np.array([*videos, *images]).T
    own, table = open_table(WAN), open_table(WAN).images_at_video_sizes(frames, heights, widths, rule=rule)
    before, after = own.assign(frames, heights, widths), table.assign(frames, heights, widths)
    count = len(videos)
    assert (before.bucket_id[:count] == after.bucket_id[:count]).all()
    allowed = {shape_of(table.size(bucket)) for bucket in after.bucket_id[:count]}
    assert set(table.image_sizes.sizes) == allowed

    def distance(size: tuple[int, int], image: tuple[int, int]) -> float:
        return abs(size[1] / size[0] - image[1] / image[0]) if linear else error(size, image)

    for bucket, reason, old in zip(after.bucket_id[count:], after.rejection[count:], before.bucket_id[count:],
                                   strict=True):  # fmt: skip
        image = shape_of(own.size(old))
        near = [size for size in allowed if rule.is_near(np.float32(distance(size, image)))]
        fitting = [size for size in near if covers(image, size)]
        if bucket < 0:
            assert reason == (Rejection.TOO_SMALL if near else Rejection.ASPECT)
            assert not fitting
            continue
        taken = shape_of(table.size(bucket))
        assert table.size(bucket).frames == 1
        assert taken in fitting
        assert distance(taken, image) == pytest.approx(min(distance(size, image) for size in fitting), abs=1e-7)
        assert not any(error(size, taken) < 1e-12 and size[0] > taken[0] for size in fitting), "the largest of a ratio"
    assert (table.num_tokens(after.bucket_id, spec=WAN) == [
        WAN.num_tokens(table.size(bucket)) if bucket >= 0 else 0 for bucket in after.bucket_id
    ]).all()  # fmt: skip


@given(st.lists(SHAPES, min_size=1, max_size=5), SHAPES)
def test_in_packs_a_transposed_image_goes_to_the_transposed_size(videos, image) -> None:
    both = np.array([*videos, *(shape[::-1] for shape in videos)])
    table = open_table(WAN).images_at_video_sizes(np.full(len(both), 5), *both.T)
    result = table.assign([1, 1], image, image[::-1])
    assert result.rejection[0] == result.rejection[1]
    if result.bucket_id[0] >= 0:
        there, back = (shape_of(table.size(bucket)) for bucket in result.bucket_id)
        assert there == back[::-1] or WAN.snap(Size(1, *image)).aspect_ratio == 1


def test_an_image_of_a_videos_own_size_joins_it_though_the_size_is_rounded_up() -> None:
    table = open_table(WAN).images_at_video_sizes([33, -1, 1], [1080, -1, 90], [1920, -1, 90])
    assert table.size(int(table.assign([1], [1080], [1920]).bucket_id[0])) == (1, 1088, 1920)
    assert table.assign([1], [1070], [1900]).rejection.tolist() == [Rejection.TOO_SMALL]
    larger = open_table(WAN).images_at_video_sizes([33], [1080], [1920], rule=AssignmentRule(max_upscale=1.1))
    assert larger.assign([1], [1070], [1900]).rejection.tolist() == [Rejection.NONE]


def test_the_fingerprint_of_an_open_table_follows_sizes_and_rule() -> None:
    plain = open_table(WAN)
    tables = [
        plain,
        plain.images_at_video_sizes([5], [64], [64]),
        plain.images_at_video_sizes([5, 5], [64, 80], [64, 96]),
        plain.images_at_video_sizes([5], [64], [64], rule=AssignmentRule(max_upscale=2.0)),
    ]
    assert len({table.fingerprint for table in tables}) == 4


def test_impossible_sizes_of_images_are_errors() -> None:
    with pytest.raises(BucketingError, match="no readable video"):
        open_table(WAN).images_at_video_sizes([1, -1], [64, -1], [64, -1])
    with pytest.raises(BucketingError, match="multiples of 16 and 16"):
        OpenTable(spec=WAN, image_sizes=ImageSizes(sizes=((64, 72),), rule=AssignmentRule()))
    for sizes in ((), ((64, 64), (64, 64)), ((0, 64),)):
        with pytest.raises(BucketingError, match="one or more different sizes"):
            ImageSizes(sizes=sizes, rule=AssignmentRule())


def test_a_prepared_folder_keeps_the_choice_and_older_ones_have_none(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"width": [96, 200], "height": [64, 100], "num_frames": [9, 1], "file": ["a", "b"]})
    table = BucketTable(sizes=((9, 64, 96),)).images_at_video_sizes()
    sizes = open_table(WAN).images_at_video_sizes([9], [64], [96], rule=AssignmentRule(max_upscale=1.5)).image_sizes
    prepared = PreparedDataset(dataset=map_columns(rows, BucketColumns(table, WAN)), table=table, spec=WAN,
                               column="file", caption_column=None, image_sizes=sizes)  # fmt: skip
    prepared.save(tmp_path / "data")
    back = PreparedDataset.load(tmp_path / "data")
    assert (back.table, back.image_sizes) == (table, sizes)
    assert back.open_table.fingerprint == prepared.open_table.fingerprint
    manifest = json.loads((tmp_path / "data" / "bucketing.json").read_text())
    assert manifest.pop("image_sizes")
    (tmp_path / "data" / "bucketing.json").write_text(json.dumps({**manifest, "version": 2}))
    assert PreparedDataset.load(tmp_path / "data").open_table == open_table(WAN)


def test_preparing_puts_images_into_buckets_of_video_sizes_and_leaves_videos(
    video_dir: Path, prepared_dir: Path
) -> None:
    own, data = PreparedDataset.load(prepared_dir), PreparedDataset.load(video_dir)
    assert own.image_sizes is None
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
    assert reasons[6:9] == [Rejection.ASPECT, Rejection.NONE, Rejection.NONE]
    assert f"{reasons.count(Rejection.ASPECT)} rows rejected: ASPECT" in result.stdout
    data = PreparedDataset.load(tmp_path / "near")
    assert data.image_sizes.rule == AssignmentRule(max_aspect_error=0.3, max_upscale=0.75)
    larger = prepare(media_dir, pipeline_dir, tmp_path / "small", *table, "--max_upscale", 0.5)
    assert PreparedDataset.load(tmp_path / "small").dataset["rejection"][7:9] == [Rejection.TOO_SMALL] * 2
    assert "rows rejected: TOO_SMALL" in larger.stdout
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
    data = make_data(config, prepared.spec, width=96)
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
    collator = PackCollator(prepared.spec, image_sizes=prepared.image_sizes, column=prepared.column,
                            root=prepared.root, random_crop=False)  # fmt: skip
    loader = StreamingBucketBatcher(stream, PackGrouping(capacity=640), collate_fn=collator).make_loader()
    shapes = set()
    for message in loader:
        if message.ended:
            break
        if message.batch is not None:
            assert sum(map(prepared.spec.num_tokens, message.batch["size"])) <= 640
            shapes |= {shape_of(size) for size in message.batch["size"]}
    assert shapes == set(prepared.image_sizes.sizes)


def test_sizes_drawn_at_random_and_rejected_rows_are_refused(video_dir, pipeline_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    with pytest.raises(BucketingError, match=r"--random_resize.*--image_sizes own"):
        make_data(in_process(pipeline_dir, video_dir, tmp_path, **PACK, random_resize=32), prepared.spec, width=96)
    with pytest.raises(BucketingError, match="leave resize"):
        PackCollator(WAN, image_sizes=prepared.image_sizes, resize=RandomResize(spec=WAN))
    collator = PackCollator(WAN, image_sizes=prepared.image_sizes)
    with pytest.raises(BucketingError, match="rejected as TOO_SMALL; leave out rows whose num_tokens is 0"):
        collator.target([{"num_frames": 1, "height": 20, "width": 30}])


@pytest.mark.parametrize("flags", [{"batching": "bucket"}, PACK], ids=["bucket", "pack"])
def test_training_runs_with_images_at_the_sizes_of_videos(flags, video_dir, pipeline_dir, tmp_path: Path) -> None:
    losses = run(in_process(pipeline_dir, video_dir, tmp_path, **flags))
    assert len(losses) == 3
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_caches_hold_images_at_the_sizes_of_videos(batching, video_dir, pipeline_dir, tmp_path: Path) -> None:
    prepared = PreparedDataset.load(video_dir)
    prepared = replace(prepared, dataset=prepared.dataset.select(range(5, 9)))
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    cached, counts = CacheJob(recipe=recipe, folder=str(tmp_path / "cache"), batching=batching).run(prepared)
    assert counts["encoded"] == 4
    cached.save(tmp_path / "cached")
    settings = {"train_batch_size": 1} if batching == "bucket" else PACK
    data = make_data(in_process(pipeline_dir, tmp_path / "cached", tmp_path, **settings), prepared.spec, width=96)
    expected = dict(zip(cached.dataset["index"], data.sizes(np.arange(4)), strict=True))
    seen = {index: size for batch in data.loader for index, size in zip(batch["index"], batch["size"], strict=True)}
    assert seen == expected
    allowed = prepared.image_sizes.sizes if batching == "pack" else map(shape_of, prepared.table.sizes)
    assert {shape_of(seen[index]) for index in (6, 7, 8)} <= set(allowed)
