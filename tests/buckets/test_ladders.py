"""Ladders: the rules that generate bucket tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import AssignmentRule, BucketingError, BucketTable, LatentSpec, Size, novelai_ladder, token_ladder
from hf_bucketing.buckets.ladders import COMMON_RATIOS
from hf_bucketing.report import measure_ladder

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
NATIVE = token_ladder(WAN, [8190, 32760], frames=[1, 17, 49, 81], sizes=[(480, 832), (720, 1280)])

NOVELAI = (
    "256×1024 320×1024 384×1024 384×960 384×896 448×832 512×768 512×704 512×512 576×640 640×576 704×512 768×512 "
    "832×448 896×384 960×384 1024×384 1024×320 1024×256"
)


def test_novelai_ladder_gives_the_19_buckets_of_the_blog_post_in_order() -> None:
    table = novelai_ladder()
    assert " ".join(f"{size.width}×{size.height}" for size in table.sizes) == NOVELAI
    assert table.size(table.base) == Size(1, 512, 512)


def test_novelais_rule_assigns_as_its_script_does_whatever_the_size() -> None:
    table, rng = novelai_ladder(), np.random.default_rng(0)
    height, width = rng.integers(1, 2000, (2, 5000))
    aspects = np.array([size.aspect_ratio for size in table.sizes])
    errors = np.abs(width / height - aspects[:, None])
    wanted = np.where(errors.min(axis=0) < 4, errors.argmin(axis=0), -1)
    ids = table.assign(np.ones(5000), height, width, rule=AssignmentRule.novelai()).bucket_id
    ties = np.diff(np.sort(errors, axis=0)[:2], axis=0)[0]
    assert np.array_equal(ids[ties > 1e-9], wanted[ties > 1e-9])
    assert 0 < np.count_nonzero(ids < 0) < 500


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


@given(st.lists(st.integers(320, 20000), min_size=1, max_size=3, unique=True), st.floats(1.5, 4.0))
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


def of_tier(table: BucketTable, frames: int, tier: int) -> list[Size]:
    pairs = zip(table.sizes, table.tiers, strict=True)
    return [size for size, size_tier in pairs if (size.frames, size_tier) == (frames, tier)]


def nearest_error(sizes: list[Size], ratio: float) -> float:
    return min(abs(math.log(size.aspect_ratio / ratio)) for size in sizes)


@pytest.mark.parametrize("options", [{}, {"aspect_step": 0.2}, {"aspect_step": math.inf}], ids=str)
def test_every_budget_has_the_common_aspect_ratios_and_their_transposes(options) -> None:
    table = token_ladder(WAN, [8190, 32760], frames=[1, 17, 49, 81], **options)
    for frames in (1, 17, 49, 81):
        for tier in (0, 1):
            for ratio in COMMON_RATIOS:
                for wanted in (ratio, 1 / ratio):
                    assert nearest_error(of_tier(table, frames, tier), wanted) < 0.015, (frames, tier, wanted)


def test_a_larger_step_makes_fewer_buckets_and_wider_gaps() -> None:
    lengths = []
    for step in (0.04, 0.08, 0.16, math.inf):
        sizes = of_tier(token_ladder(WAN, [8190], max_aspect_ratio=2.5, aspect_step=step), 1, 0)
        ratios = np.log([size.aspect_ratio for size in sizes])
        assert np.diff(ratios).max() < step + 0.02
        assert np.abs(ratios).max() <= math.log(2.5) + 1e-9
        lengths.append(len(sizes))
    assert lengths == [51, 29, 17, 13]


def test_the_default_ladder_keeps_what_the_documentation_says() -> None:
    options = {"tokens": [8190, 32760], "frames": [1, 17, 49, 81]}
    for sizes in ((), ((480, 832), (720, 1280))):
        for limit in (2.5, 4.0):
            fine, coarse = (
                measure_ladder(
                    token_ladder(WAN, sizes=sizes, max_aspect_ratio=limit, aspect_step=step, **options),
                    WAN,
                    max_aspect_ratio=limit,
                    num_samples=20_000,
                )
                for step in (0.08, math.inf)
            )
            assert fine.common > 0.995
            assert fine.mix > 0.98
            assert fine.worst > 0.94
            assert coarse.num_buckets < fine.num_buckets
            assert coarse.mix < fine.mix
            assert coarse.short_batches < fine.short_batches


@given(st.floats(-math.log(4), math.log(4)), st.floats(500, 5000), st.sampled_from([1, 17, 49, 81]))
def test_no_sample_that_has_a_bucket_is_cropped_by_more_than_six_percent(shape: float, side: float, frames) -> None:
    height, width = round(side * math.exp(-shape / 2)), round(side * math.exp(shape / 2))
    bucket = int(NATIVE.assign([frames], [height], [width]).bucket_id[0])
    if bucket >= 0 and max(height, width) <= 4 * min(height, width):
        ratio = NATIVE.size(bucket).aspect_ratio * height / width
        assert min(ratio, 1 / ratio) > 0.94


def test_the_models_own_sizes_are_kept_whole() -> None:
    cases = {
        (87, 480, 832): (81, 480, 832),
        (40, 832, 480): (17, 832, 480),
        (81, 832, 480): (81, 832, 480),
        (49, 480, 832): (49, 480, 832),
        (1, 480, 832): (1, 480, 832),
        (20, 720, 1280): (17, 720, 1280),
        (1, 1280, 720): (1, 1280, 720),
    }
    result = NATIVE.assign(*zip(*cases, strict=True))
    for sample, bucket in zip(cases, result.bucket_id.tolist(), strict=True):
        assert tuple(NATIVE.size(bucket)) == cases[sample], sample


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(64, 1500), st.integers(64, 1500)), min_size=1, max_size=3),
    st.lists(st.integers(2000, 40_000), min_size=1, max_size=3, unique=True),
)
def test_own_sizes_are_buckets_wherever_the_largest_budget_admits_them(sizes, tokens) -> None:
    table = token_ladder(WAN, tokens, frames=[1, 17], sizes=sizes)
    largest = max(tokens)
    for height, width in sizes:
        for frames in (1, 17):
            for side in ((height, width), (width, height)):
                size = WAN.snap(Size(frames, *side), mode="down")
                assert (size in table.sizes) == (WAN.num_tokens(size) <= largest * 1.1)
    snapped = {WAN.snap(Size(1, *side), mode="down")[1:] for h, w in sizes for side in ((h, w), (w, h))}
    for size in table.sizes:
        assert WAN.num_tokens(size) <= (largest * 1.1 if size[1:] in snapped else largest)
    native = [(WAN.num_tokens(size), size.frames, tier) for size, tier in zip(table.sizes, table.tiers, strict=True)
              if size[1:] in snapped]  # fmt: skip
    for tokens_a, frames_a, tier_a in native:
        for tokens_b, frames_b, tier_b in native:
            assert frames_a != frames_b or tokens_a > tokens_b or tier_a <= tier_b


def test_own_sizes_are_rounded_down_to_whole_tokens() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=16, patch=(1, 2, 2))
    assert Size(1, 704, 1280) in token_ladder(spec, [8190], sizes=[(720, 1280)]).sizes


@pytest.mark.parametrize(("options", "message"), [
    ({"frames": [16]}, "next valid size is 13"),
    ({"frames": [81], "tokens": [30]}, "budget of 30 tokens over 81 frames"),
    ({"aspect_step": 0}, "aspect_step above 0"),
    ({"max_aspect_ratio": 0.5}, "at least 1"),
    ({"tokens": []}, "needs a budget"),
])  # fmt: skip
def test_token_ladder_says_what_is_impossible(options, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        token_ladder(WAN, **{"tokens": [3600], **options})
