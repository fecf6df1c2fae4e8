"""Views of files: frames, crops and flips, and sizes drawn anew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, CropBox, LatentSpec, MediaError, Size
from hf_bucketing.loaders import BucketCollator, PackBatchSampler, PackCollator, RandomResize
from hf_bucketing.media import MediaSource, View, ViewRule, iter_frames, write_video
from hf_bucketing.media.sample import load_sample
from hf_bucketing.randomness import ROW

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
NINE = BucketTable(sizes=(Size(9, 32, 32),))


def view(rule: ViewRule, *draws: float, frames: int = 9, num_frames: int = 17, fps: float = 8.0) -> View:
    return rule.view(Size(frames, 32, 32), num_frames=num_frames, fps=fps, draws=np.array(draws))


def test_frames_come_from_the_start_spread_evenly_or_from_a_random_place() -> None:
    first = ViewRule(frame_picking="start")
    spread = ViewRule(frame_picking="uniform")
    anywhere = ViewRule(random_crop=False, frame_picking="random")
    assert (view(first, 0.9, 0, 0).start, view(first, 0.9, 0, 0).fps) == (0, 8)
    assert (view(spread, 0.9, 0, 0).start, view(spread, 0.9, 0, 0).fps) == (0, 4)
    assert (view(anywhere, 0.999, 0.1, 0.1).start, view(anywhere, 0.999, 0.1, 0.1).fps) == (8, 8)
    assert view(anywhere, 0.5, 0.1, 0.1).position == (0.5, 0.5)
    assert view(spread, 0, 0, 0, frames=1).start == 8
    assert view(spread, 0, 0, 0, frames=1, num_frames=1, fps=0.0).fps == 0


def test_by_default_frames_are_random_where_crops_are() -> None:
    assert view(ViewRule(), 0.5, 0.25, 0.75) == View(size=Size(9, 32, 32), fps=8, start=4, position=(0.25, 0.75))
    assert view(ViewRule(random_crop=False)) == View(size=Size(9, 32, 32), fps=8)
    assert [ViewRule().num_draws, ViewRule(random_crop=False).num_draws] == [3, 0]


def test_evenly_spread_frames_reach_from_the_first_to_the_last(tmp_path: Path) -> None:
    write_video(tmp_path / "ramp.mp4", [np.full((32, 32, 3), 20 + 4 * n, np.uint8) for n in range(48)], fps=16)
    row = {"video": str(tmp_path / "ramp.mp4"), "num_frames": 24, "fps": 8.0, "caption": "", "bucket_id": 0}
    batch = BucketCollator(NINE, seed=0, views=ViewRule(frame_picking="uniform"))([{**row, ROW: 0}])
    numbers = ((batch["pixel_values"].mean((0, 1, 3, 4)) + 1) * 127.5 - 20) / 4
    assert numbers.tolist() == pytest.approx([int(n * 46 / 8 + 0.25) for n in range(9)], abs=0.5)
    assert batch["fps"] == [pytest.approx(8 * 8 / 23)]


def test_flips_are_drawn_reported_and_applied(tmp_path: Path) -> None:
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:, :24, 0] = 255
    Image.fromarray(picture).save(tmp_path / "halves.png")
    row = {"video": str(tmp_path / "halves.png"), "num_frames": 1, "fps": 0.0, "width": 48, "height": 32}
    rows = [{**row, "caption": "", ROW: index} for index in range(100)]
    batch = PackCollator(SPEC, seed=0, views=ViewRule(flip_probability=0.3))(rows)
    plain = PackCollator(SPEC, seed=0)(rows)
    assert 15 < sum(batch["flip"]) < 45
    assert not any(plain["flip"])
    assert batch["crop"] == plain["crop"]
    for flip, pixels, unflipped in zip(batch["flip"], batch["pixel_values"], plain["pixel_values"], strict=True):
        assert torch.equal(pixels, unflipped.flip(-1) if flip else unflipped)
    again = PackCollator(SPEC, seed=0, views=ViewRule(flip_probability=0.3))
    again.set_epoch(1)
    assert again(rows)["flip"] != batch["flip"]


def test_a_flip_comes_after_the_crop(tmp_path: Path) -> None:
    Image.fromarray(np.arange(40 * 100 * 3, dtype=np.uint32).reshape(40, 100, 3).astype(np.uint8)).save(
        tmp_path / "a.png"
    )
    source = MediaSource.from_cell(str(tmp_path / "a.png"))
    left, box = load_sample(source, View(size=Size(1, 40, 40), fps=0.0, position=(0.5, 0.0)))
    flipped, same = load_sample(source, View(size=Size(1, 40, 40), fps=0.0, position=(0.5, 0.0), flip=True))
    assert box == same == CropBox(0, 0, 40, 40)
    assert torch.equal(flipped, left.flip(-1))


def test_a_misspelt_decoder_is_refused_with_the_right_name(tmp_path: Path) -> None:
    source = MediaSource(path=str(tmp_path / "a.mp4"))
    for make in (
        lambda: ViewRule(videodecoder="pyav"),
        lambda: View(size=Size(1, 32, 32), fps=0.0, videodecoder="pyav"),
        lambda: iter_frames(source, [0.0], videodecoder="pyav"),
    ):
        with pytest.raises(BucketingError, match="no argument videodecoder; did you mean video_decoder"):
            make()


@pytest.mark.parametrize("options", [{"frame_picking": "middle"}, {"flip_probability": 1.5}], ids=str)
def test_impossible_rules_are_refused(options) -> None:
    with pytest.raises(BucketingError, match=next(iter(options))):
        ViewRule(**options)


def test_too_few_frames_are_an_error() -> None:
    with pytest.raises(MediaError, match="has 3 frames, too few"):
        view(ViewRule(random_crop=False), num_frames=3)


@given(
    sides=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=9),
    seed=st.integers(0, 9),
)
def test_drawn_sizes_are_whole_tokens_between_the_least_side_and_the_samples_own(sides, seed: int) -> None:
    resize = RandomResize(spec=SPEC, seed=seed)
    sizes = [Size(*side) for side in sides]
    for drawn, size in zip(resize.sizes(sizes, indices=range(len(sizes)), epoch=2), sizes, strict=True):
        SPEC.grid(drawn)
        assert drawn.frames == SPEC.snap(size).frames
        for side, original in ((drawn.height, size.height), (drawn.width, size.width)):
            assert min(64, original) <= side < original + 16


def test_draws_follow_seed_epoch_and_index_alone_and_are_uniform() -> None:
    sizes = [Size(1, 512, 320)] * 4000
    resize = RandomResize(spec=SPEC, seed=3)
    drawn = resize.sizes(sizes, indices=range(4000), epoch=1)
    assert resize.sizes(sizes[:3], indices=[3999, 7, 20], epoch=1) == [drawn[3999], drawn[7], drawn[20]]
    assert resize.sizes(sizes, indices=range(4000), epoch=2) != drawn
    assert RandomResize(spec=SPEC, seed=4).sizes(sizes, indices=range(4000), epoch=1) != drawn
    counts = Counter(size.height for size in drawn)
    assert set(counts) == set(range(64, 513, 16))
    expected = {side: 4000 * (1 if side == 64 else 16) / 449 for side in counts}
    chi_squared = sum((counts[side] - expected[side]) ** 2 / expected[side] for side in counts)
    assert chi_squared < 70  # 28 degrees of freedom: exceeded by chance in 2e-5
    heights, widths = (np.array([size[axis] for size in drawn]) for axis in (1, 2))
    assert abs(np.corrcoef(heights, widths)[0, 1]) < 0.1
    narrow = RandomResize(spec=SPEC, min_side=500).sizes(sizes[:9], indices=range(9), epoch=0)
    assert set(narrow) == {Size(1, 512, 320)}


def test_the_sampler_counts_the_tokens_that_the_collator_makes(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((200, 160, 3), np.uint8)).save(tmp_path / "a.png")
    row = {"video": str(tmp_path / "a.png"), "num_frames": 1, "fps": 0.0, "width": 160, "height": 200, "caption": ""}
    rows = [{**row, ROW: index} for index in range(40)]
    resize = RandomResize(spec=SPEC, seed=1)
    names = {"num_frames": "num_frames", "height": "height", "width": "width", "index": ROW}
    columns = {name: [row[column] for row in rows] for name, column in names.items()}
    sampler = PackBatchSampler(resize.token_counter(**columns), max_tokens=200, strip_length=1, num_processes=1)
    collator = PackCollator(SPEC, resize=resize, seed=0)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        collator.set_epoch(epoch)
        seen = []
        for pack in sampler:
            batch = collator([rows[index] for index in pack])
            tokens = [SPEC.num_tokens(size) for size in batch["size"]]
            assert tokens == sampler.num_tokens[pack].tolist()
            assert [pixels.shape[1:] for pixels in batch["pixel_values"]] == batch["size"]
            assert sum(tokens) <= 200
            seen += pack
        assert sorted(seen) == list(range(40))
    assert sampler.tokens_in(0).tolist() != sampler.tokens_in(1).tolist()


def test_rows_without_a_size_have_no_tokens_and_mistakes_are_named() -> None:
    columns = {"num_frames": [1, -1], "height": [64, -1], "width": [80, -1], "index": [0, 1]}
    assert RandomResize(spec=SPEC, min_side=80).token_counter(**columns)(0).tolist() == [20, 0]
    with pytest.raises(BucketingError, match="min_side"):
        RandomResize(spec=SPEC, min_side=0)
    with pytest.raises(BucketingError, match="at least 1"):
        RandomResize(spec=SPEC).sizes([Size(1, 0, 3)], indices=[0], epoch=0)
    with pytest.raises(BucketingError, match="give both the same"):
        PackCollator(LatentSpec(temporal_stride=1, spatial_stride=8), resize=RandomResize(spec=SPEC))
