"""Ladders: the rules that generate bucket tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_bucketing import BucketingError, LatentSpec, Size, novelai_ladder, token_ladder

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))

NOVELAI = (
    "256×1024 320×1024 384×1024 384×960 384×896 448×832 512×768 512×704 512×512 576×640 640×576 704×512 768×512 "
    "832×448 896×384 960×384 1024×384 1024×320 1024×256"
)


def test_novelai_ladder_gives_the_19_buckets_of_the_blog_post_in_order() -> None:
    table = novelai_ladder()
    assert " ".join(f"{size.width}×{size.height}" for size in table.sizes) == NOVELAI
    assert table.size(table.base) == Size(1, 512, 512)


def test_a_base_that_is_not_square_keeps_its_own_ratio() -> None:
    table = novelai_ladder(base=(384, 640))
    assert table.size(table.base) == Size(1, 384, 640)
    assert table.assign([1], [800], [1333]).bucket_id.tolist() == [table.base]


@given(st.integers(2, 6), st.integers(6, 24), st.integers(20, 200), st.sampled_from([8, 32, 64]))
def test_novelai_buckets_keep_the_caps_and_are_mirrored_and_unique(low: int, high: int, area: int, step: int) -> None:
    cap = (area * step, step)
    if low * low > area:
        with pytest.raises(BucketingError, match="No bucket fits"):
            novelai_ladder(cap, low * step, max_dim=high * step, step=step, base=None)
        return
    sizes = novelai_ladder(cap, low * step, max_dim=high * step, step=step, base=None).sizes
    shapes = {(size.height, size.width) for size in sizes}
    assert len(shapes) == len(sizes)
    assert shapes == {(width, height) for height, width in shapes}
    for height, width in shapes:
        assert height * width <= cap[0] * cap[1]
        assert low * step <= min(height, width)
        assert max(height, width) <= high * step
        assert height % step == width % step == 0


@pytest.mark.parametrize("options", [
    {"min_dim": 250}, {"base": (500, 512)}, {"base": (512, 1024)}, {"base": (128, 128)}, {"max_dim": 200},
])  # fmt: skip
def test_novelai_ladder_refuses_what_the_original_lets_pass(options) -> None:
    with pytest.raises(BucketingError):
        novelai_ladder(**options)


@given(st.lists(st.integers(200, 20000), min_size=1, max_size=3, unique=True), st.floats(1.5, 4.0))
def test_token_ladder_keeps_budgets_ratios_and_mirror_images(budgets: list[int], max_ratio: float) -> None:
    table = token_ladder(WAN, budgets, frames=[1, 17], max_aspect_ratio=max_ratio, tolerance=0.1)
    for size, tier in zip(table.sizes, table.tiers, strict=True):
        budget = sorted(budgets)[tier]
        assert abs(WAN.num_tokens(size) - budget) <= 0.1 * budget
        assert 1 / max_ratio - 1e-9 <= size.aspect_ratio <= max_ratio + 1e-9
    assert {(tier, *size) for size, tier in zip(table.sizes, table.tiers, strict=True)} == {
        (tier, size.frames, size.width, size.height) for size, tier in zip(table.sizes, table.tiers, strict=True)
    }
    assert {size.frames for size in table.sizes} == {1, 17}


def test_token_ladder_spaces_aspect_ratios_evenly_in_log_space() -> None:
    table = token_ladder(WAN, [8190], frames=[1], max_aspect_ratio=4.0, num_aspect_ratios=5)
    ratios = [math.log2(size.aspect_ratio) for size in table.sizes]
    assert ratios == pytest.approx([-2, -1, 0, 1, 2], abs=0.1)


@pytest.mark.parametrize(("options", "message"), [
    ({"frames": [16]}, "next valid size is 13"),
    ({"frames": [81], "tokens": [30]}, "budget of 30 tokens over 81 frames"),
    ({"num_aspect_ratios": 4}, "odd"),
    ({"max_aspect_ratio": 0.5}, "at least 1"),
    ({"tokens": []}, "needs a budget"),
])  # fmt: skip
def test_token_ladder_says_what_is_impossible(options, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        token_ladder(WAN, **{"tokens": [3600], **options})
