"""Images at the sizes of videos: the tables of buckets and of packs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

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

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
LADDER = token_ladder(WAN, [400, 1600], frames=[1, 9, 33])
SIDES = st.integers(16, 1500)
SHAPES = st.tuples(SIDES, SIDES)


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
