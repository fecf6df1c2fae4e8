"""Sizes, grids, cover-resize and crop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import BucketingError, LatentSpec, Size, cover_resize, crop_box
from hf_bucketing.buckets.sizes import round_to_multiple

side = st.integers(1, 5000)
sizes = st.builds(Size, frames=st.integers(1, 400), height=side, width=side)
specs = st.builds(
    LatentSpec,
    temporal_stride=st.integers(1, 8),
    spatial_stride=st.sampled_from([1, 8, 16, 32]),
    patch=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)),
)
modes = st.sampled_from(["up", "down", "nearest"])
WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


@given(side, st.integers(1, 64), modes)
def test_rounding_gives_a_positive_multiple_within_one_step(value: int, multiple: int, mode: str) -> None:
    rounded = round_to_multiple(value, multiple, mode=mode)
    assert rounded % multiple == 0
    assert rounded >= multiple
    assert abs(rounded - value) < multiple or rounded == multiple
    if mode == "up":
        assert rounded >= value
    if mode == "nearest" and rounded > multiple:
        assert abs(rounded - value) * 2 <= multiple


@given(specs, sizes, modes, modes)
def test_a_snapped_size_is_valid_and_never_below_one_patch(
    spec: LatentSpec, size: Size, mode: str, frames: str
) -> None:
    snapped = spec.snap(size, mode=mode, frames_mode=frames)
    assert spec.snap(snapped) == snapped
    assert spec.num_tokens(snapped) >= 1
    assert snapped.height % (spec.spatial_stride * spec.patch[1]) == 0
    assert snapped.width % (spec.spatial_stride * spec.patch[2]) == 0


@given(specs, sizes)
def test_snapping_invents_no_frames_by_default(spec: LatentSpec, size: Size) -> None:
    fewest = spec.temporal_stride * (spec.patch[0] - 1) + 1
    assert spec.snap(size).frames <= max(size.frames, fewest)


def test_wan_counts_tokens_as_its_paper_does() -> None:
    assert WAN.latent_size(Size(81, 480, 832)) == (21, 60, 104)
    assert WAN.grid(Size(81, 480, 832)) == (21, 30, 52)
    assert WAN.num_tokens(Size(81, 480, 832)) == 32760
    assert WAN.snap(Size(83, 475, 833)) == Size(81, 480, 848)
    assert WAN.snap(Size(83, 475, 833), mode="down") == Size(81, 464, 832)


def test_a_size_that_is_no_whole_number_of_tokens_is_refused_with_the_next_valid_one() -> None:
    with pytest.raises(BucketingError, match=r"82×480×840.*next valid size is 81×480×848"):
        WAN.num_tokens(Size(82, 480, 840))


@given(side, side, sizes)
def test_cover_resize_covers_touches_one_side_and_keeps_the_ratio(height: int, width: int, target: Size) -> None:
    resized_height, resized_width = cover_resize(height, width, target=target)
    assert resized_height >= target.height
    assert resized_width >= target.width
    assert resized_height == target.height or resized_width == target.width
    scale = max(target.height / height, target.width / width)
    assert abs(resized_height - height * scale) <= 1
    assert abs(resized_width - width * scale) <= 1


@given(side, side, sizes, st.floats(0, 1), st.floats(0, 1))
def test_the_crop_lies_inside_the_resized_frame(height: int, width: int, target: Size, y: float, x: float) -> None:
    resized = cover_resize(height, width, target=target)
    box = crop_box(*resized, target=target, y=y, x=x)
    assert (box.height, box.width) == (target.height, target.width)
    assert 0 <= box.top <= resized[0] - box.height
    assert 0 <= box.left <= resized[1] - box.width


def test_crop_positions_reach_both_ends_and_every_place_between() -> None:
    target = Size(1, 2, 3)
    tops = [crop_box(6, 3, target=target, y=y).top for y in (0.0, 0.25, 0.5, 0.75, 0.999, 1.0)]
    assert tops == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("call", [
    lambda: cover_resize(0, 5, target=Size(1, 2, 3)),
    lambda: crop_box(2, 2, target=Size(1, 2, 3)),
    lambda: crop_box(4, 4, target=Size(1, 2, 3), y=1.5),
    lambda: round_to_multiple(5, 2, mode="sideways"),
    lambda: WAN.snap(Size(1, 0, 16)),
    lambda: LatentSpec(temporal_stride=0, spatial_stride=8),
    lambda: LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 0, 2)),
])  # fmt: skip
def test_impossible_geometry_is_an_error(call) -> None:
    with pytest.raises(BucketingError):
        call()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_grid_and_its_size_belong_together_for_numbers_and_arrays(t: int, h: int, w: int, repeats: bool) -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(2, 1, 3), repeats_first=repeats)
    size = spec.size_of(t, h, w)
    assert spec.grid(size) == (t, h, w)
    assert [side.tolist() for side in spec.grid_of(*(np.array([side]) for side in size))] == [[t], [h], [w]]


def test_a_repeated_first_latent_frame_makes_images_and_videos_fill_patches() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(2, 2, 2), repeats_first=True)
    assert [spec.snap(Size(frames, 16, 16)).frames for frames in (1, 8, 9, 80, 81, 85)] == [1, 1, 9, 73, 81, 81]
    assert [spec.latent_size(Size(frames, 16, 16))[0] for frames in (1, 9, 81)] == [2, 4, 22]
    assert [spec.grid(Size(frames, 16, 16))[0] for frames in (1, 9, 81)] == [1, 2, 11]
    assert "repeats_first=True" in str(spec)
    assert "repeats_first" not in str(WAN), "fingerprints of prepared folders are made of it"


def test_a_vae_of_chunks_takes_images_and_videos_that_end_in_a_short_chunk() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=16, patch=(1, 2, 2), chunk_frames=17)
    counts = [1, 2, 3, 4, 5, 6, 13, 14, 21, 22, 38, 39]
    snapped = {
        mode: [spec.snap(Size(count, 32, 64), frames_mode=mode).frames for count in counts]
        for mode in ("down", "nearest", "up")
    }
    assert snapped["down"] == [1, 1, 1, 1, 5, 5, 5, 5, 5, 22, 22, 39]
    assert snapped["nearest"] == [1, 1, 5, 5, 5, 5, 5, 22, 22, 22, 39, 39]
    assert snapped["up"] == [1, 5, 5, 5, 5, 22, 22, 22, 22, 22, 39, 39]
    for frames, latent_frames in ((1, 1), (5, 2), (22, 7), (39, 12), (124, 37)):
        size = Size(frames, 32, 64)
        assert spec.latent_size(size) == (latent_frames, 2, 4)
        assert spec.size_of(*spec.grid(size)) == size
    with pytest.raises(BucketingError, match="does not divide"):
        spec.grid(Size(9, 32, 64))
    assert eval(repr(spec), {"LatentSpec": LatentSpec}) == spec


@pytest.mark.parametrize(
    "settings", [{"chunk_frames": 16}, {"chunk_frames": 5}, {"chunk_frames": 17, "patch": (2, 1, 1)}]
)
def test_chunks_that_are_no_videos_are_refused(settings: dict) -> None:
    with pytest.raises(BucketingError, match="chunk_frames"):
        LatentSpec(temporal_stride=4, spatial_stride=16, **settings)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 999), st.integers(1, 999))
def test_the_side_that_a_resize_leaves_free_is_the_nearest_whole_number(height, width, target_height, target_width):
    target = Size(1, target_height, target_width)
    resized_height, resized_width = cover_resize(height, width, target=target)
    if target_height * width >= target_width * height:
        assert abs(2 * (resized_width * height - width * target_height)) <= height
    else:
        assert abs(2 * (resized_height * width - height * target_width)) <= width
