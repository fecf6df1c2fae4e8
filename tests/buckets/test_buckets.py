"""Bucket tables, ladders and the assignment of samples."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_bucketing import (
    AssignmentRule,
    BucketingError,
    BucketTable,
    LatentSpec,
    Rejection,
    Size,
    novelai_ladder,
    open_table,
    token_ladder,
)
from hf_bucketing.buckets.assignment import DETOUR

WAN = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def random_sizes(count: int, *, seed: int = 0, frames: int = 120) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, frames, count), rng.integers(64, 3000, count), rng.integers(64, 3000, count)


def test_parse_reads_diffusers_bucket_text_and_names_a_wrong_part() -> None:
    table = BucketTable.parse("480,832; 832,480;", frames=[1, 49])
    assert table.sizes == (Size(1, 480, 832), Size(1, 832, 480), Size(49, 480, 832), Size(49, 832, 480))
    with pytest.raises(BucketingError, match="'480x832'"):
        BucketTable.parse("480x832")


@pytest.mark.parametrize("options", [
    {"sizes": ()},
    {"sizes": (Size(1, 64, 64), Size(1, 64, 64))},
    {"sizes": (Size(1, 64, 0),)},
    {"sizes": (Size(1, 64, 64),), "tiers": (0, 1)},
    {"sizes": (Size(1, 64, 64),), "base": 1},
])  # fmt: skip
def test_an_impossible_table_is_an_error(options) -> None:
    with pytest.raises(BucketingError):
        BucketTable(**options)


def test_a_table_survives_json_and_its_fingerprint_follows_every_field() -> None:
    table = token_ladder(WAN, [3600, 8190], frames=[1, 17])
    assert BucketTable.from_json(table.to_json()) == table
    variants = [
        table,
        BucketTable(sizes=table.sizes),
        BucketTable(sizes=table.sizes[::-1], tiers=table.tiers[::-1]),
        BucketTable(sizes=table.sizes, tiers=table.tiers, base=0),
        BucketTable(sizes=table.sizes[1:], tiers=table.tiers[1:]),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)
    for text in ("[]", "{", '{"version": 2}'):
        with pytest.raises(BucketingError):
            BucketTable.from_json(text)


def test_each_sample_goes_to_the_most_frames_then_the_highest_tier_then_the_nearest_ratio() -> None:
    table = BucketTable(
        sizes=(
            Size(1, 64, 64),
            Size(1, 64, 128),
            Size(1, 128, 128),
            Size(9, 64, 64),
            Size(9, 32, 128),
            Size(17, 128, 64),
        ),
        tiers=(0, 0, 1, 0, 0, 0),
    )
    cases = {
        (1, 200, 200): 2,
        (1, 100, 100): 0,
        (1, 64, 120): Rejection.TOO_SMALL,
        (1, 100, 190): 1,
        (9, 300, 300): 3,
        (16, 100, 400): 4,
        (17, 256, 128): 5,
        (17, 300, 300): 5,
        (8, 300, 300): Rejection.TOO_SHORT,
        (9, 32, 32): Rejection.TOO_SMALL,
        (1, 500, 5000): Rejection.ASPECT,
        (-1, -1, -1): Rejection.UNREADABLE,
        (0, 10, 10): Rejection.EMPTY,
    }
    result = table.assign(*zip(*cases, strict=True))
    for row, (size, expected) in enumerate(cases.items()):
        if isinstance(expected, Rejection):
            assert (result.rejection[row], result.bucket_id[row]) == (expected, -1), size
            assert np.isnan(result.aspect_error[row])
        else:
            assert (result.bucket_id[row], result.rejection[row]) == (expected, Rejection.NONE), size


def test_a_sample_too_small_for_the_longest_bucket_takes_one_of_fewer_frames() -> None:
    table = BucketTable(sizes=(Size(9, 32, 32), Size(17, 128, 128)))
    assert table.assign([17], [64], [64]).bucket_id.tolist() == [0]


def test_a_bucket_nearly_as_near_takes_the_place_of_one_that_would_enlarge_the_sample() -> None:
    table = BucketTable(sizes=(Size(1, 496, 880), Size(1, 480, 832), Size(1, 240, 416)), tiers=(1, 1, 0))
    sizes = {(480, 854): 1, (832, 480): -1, (496, 880): 0, (480, 832): 1, (479, 832): 2, (480, 900): 2}
    result = table.assign(np.ones(len(sizes)), *zip(*sizes, strict=True))
    assert result.bucket_id.tolist() == list(sizes.values())
    error = abs(math.log(854 / 480) - math.log(832 / 480))
    assert result.aspect_error[0] == pytest.approx(error, abs=1e-6)
    strict = table.assign([1], [480], [854], rule=AssignmentRule(max_aspect_error=error * 0.9))
    assert strict.bucket_id.tolist() == [-1], "the detour keeps the rule's own limit"


def test_a_sample_near_some_bucket_is_too_small_and_not_of_a_wrong_ratio() -> None:
    table = BucketTable(sizes=(Size(1, 512, 2048), Size(1, 64, 64)), tiers=(1, 0))
    reasons = table.assign([1, 1], [200, 100], [800, 6000]).rejection.tolist()
    assert reasons == [Rejection.TOO_SMALL, Rejection.ASPECT]


def test_max_upscale_and_max_aspect_error_move_the_limits() -> None:
    table = BucketTable(sizes=(Size(1, 100, 100),))
    assert table.assign([1], [80], [80]).rejection.tolist() == [Rejection.TOO_SMALL]
    assert table.assign([1], [80], [80], rule=AssignmentRule(max_upscale=1.25)).bucket_id.tolist() == [0]
    assert table.assign([1], [80], [79], rule=AssignmentRule(max_upscale=1.25)).bucket_id.tolist() == [-1]
    assert table.assign([1], [200], [401]).rejection.tolist() == [Rejection.ASPECT]
    assert table.assign([1], [200], [401], rule=AssignmentRule(max_aspect_error=1.0)).bucket_id.tolist() == [0]
    for settings in ({"metric": "cosine"}, {"max_upscale": 0}, {"max_aspect_error": -1}):
        with pytest.raises(BucketingError):
            AssignmentRule(**settings)


def novelai_by_hand(table: BucketTable, height: int, width: int) -> int:
    """One image as the seed does it: argmin over the aspects, skipped unless the error is below 4."""
    errors = np.abs(np.array([size.width / size.height for size in table.sizes]) - width / height)
    return int(errors.argmin()) if errors.min() < 4 else -1


def test_the_linear_metric_is_novelais_with_its_strict_limit() -> None:
    table = novelai_ladder()
    rule = AssignmentRule(metric="linear", max_upscale=float("inf"))
    _, heights, widths = random_sizes(3000)
    heights, widths = np.append(heights, [100, 100, 512]), np.append(widths, [799, 800, 512])
    result = table.assign(np.ones_like(heights), heights, widths, rule=rule)
    expected = [novelai_by_hand(table, *sides) for sides in zip(heights, widths, strict=True)]
    assert result.bucket_id.tolist() == expected
    assert result.rejection[-3:].tolist() == [Rejection.NONE, Rejection.ASPECT, Rejection.NONE], "7.99 - 4 < 4 = 8 - 4"
    # The seed's metric sends a sample of 1.6 to another bucket than the symmetric one does.
    assert (result.bucket_id != table.assign(np.ones_like(heights), heights, widths).bucket_id).any()


@pytest.mark.parametrize("metric", ["log", "linear"])
def test_ties_go_to_the_bucket_that_stands_first(metric: str) -> None:
    halves = {"log": (Size(1, 64, 64), Size(1, 64, 256)), "linear": (Size(1, 64, 64), Size(1, 64, 192))}[metric]
    for sizes in (halves, halves[::-1]):
        table = BucketTable(sizes=sizes)
        assert table.assign([1], [300], [600], rule=AssignmentRule(metric=metric)).bucket_id.tolist() == [0]
    twins = BucketTable(sizes=(Size(1, 128, 128), Size(1, 64, 64)))
    assert twins.assign([1], [300], [300]).bucket_id.tolist() == [0]


def test_a_transposed_sample_goes_to_the_transposed_bucket() -> None:
    table = token_ladder(WAN, [3600, 8190, 18480], frames=[1, 17, 49, 81])
    mirror = np.array([table.sizes.index(Size(s.frames, s.width, s.height)) for s in table.sizes] + [-1])
    frames, heights, widths = random_sizes(1_000_000)
    widths += widths == heights  # of two buckets that are as near to a square, the first takes it
    there, back = table.assign(frames, heights, widths), table.assign(frames, widths, heights)
    assert (mirror[there.bucket_id] == back.bucket_id).all()
    assert (there.rejection == back.rejection).all()


def test_assignment_equals_a_plain_search_over_the_buckets() -> None:
    table = token_ladder(WAN, [400, 1600], frames=[1, 9, 33])
    frames, heights, widths = (np.append(a, b) for a, b in zip(
        random_sizes(500, frames=60), random_sizes(500, frames=60, seed=1), strict=True))  # fmt: skip
    heights[500:], widths[500:] = heights[500:] // 8 + 120, widths[500:] // 8 + 120  # many near a bucket's own size
    result = table.assign(frames, heights, widths)
    for row, sample in enumerate(zip(frames, heights, widths, strict=True)):
        assert result.bucket_id[row] == plain_search(table, Size(*map(int, sample))), sample


def test_tables_of_many_ratios_are_searched_alike() -> None:
    table = BucketTable(sizes=tuple(Size(1, 64 + 8 * step, 1200 - 8 * step) for step in range(100)))
    _, heights, widths = random_sizes(300)
    result = table.assign(np.ones_like(heights), heights, widths)
    expected = [plain_search(table, Size(1, *map(int, sides))) for sides in zip(heights, widths, strict=True)]
    assert result.bucket_id.tolist() == expected
    assert (result.bucket_id >= 0).any()


def plain_search(table: BucketTable, sample: Size) -> int:
    def error(bucket: int) -> float:
        return abs(math.log(sample.aspect_ratio) - math.log(table.size(bucket).aspect_ratio))

    groups = sorted({(size.frames, tier) for size, tier in zip(table.sizes, table.tiers, strict=True)}, reverse=True)
    for group in groups:
        if group[0] > sample.frames or (group[0] > 1) != (sample.frames > 1):
            continue
        members = [i for i, size in enumerate(table.sizes) if (size.frames, table.tiers[i]) == group]
        nearest = min(members, key=error)
        for best in sorted(members, key=error):
            scale = max(table.size(best).height / sample.height, table.size(best).width / sample.width)
            if error(nearest) <= math.log(2) and scale <= 1 and (best == nearest or error(best) <= DETOUR):
                return best
    return -1


def test_an_open_table_keeps_each_sample_at_its_own_rounded_size() -> None:
    table = open_table(WAN)
    frames, heights, widths = random_sizes(1000)
    result = table.assign([*frames, -1, 0], [*heights, -1, 5], [*widths, -1, 5])
    assert result.bucket_id[-2:].tolist() == [-1, -1]
    assert result.rejection[-2:].tolist() == [Rejection.UNREADABLE, Rejection.EMPTY]
    tokens = table.num_tokens(result.bucket_id, spec=WAN)
    assert tokens[-2:].tolist() == [0, 0]
    for row, sample in enumerate(zip(frames, heights, widths, strict=True)):
        snapped = WAN.snap(Size(*map(int, sample)))
        assert table.size(int(result.bucket_id[row])) == snapped
        assert tokens[row] == WAN.num_tokens(snapped)


def test_an_open_table_cuts_longer_samples() -> None:
    plain, table = open_table(WAN), open_table(WAN, max_frames=21)
    frames, heights, widths = random_sizes(1000)
    cut = table.assign(frames, heights, widths).bucket_id
    assert cut.tolist() == plain.assign(np.minimum(frames, 21), heights, widths).bucket_id.tolist()
    assert max(table.size(bucket).frames for bucket in cut.tolist()) == 21 < max(frames)
    assert table.fingerprint != plain.fingerprint
    with pytest.raises(BucketingError, match="`max_frames` must be at least 1"):
        open_table(WAN, max_frames=0)


def test_lengths_that_differ_and_ids_that_do_not_exist_are_errors() -> None:
    with pytest.raises(BucketingError, match="equally long"):
        novelai_ladder().assign([1, 1], [64], [64])
    for call in (lambda: novelai_ladder().size(19), lambda: open_table(WAN).size(-1)):
        with pytest.raises(BucketingError):
            call()


def test_a_sample_of_more_tokens_than_an_id_holds_is_rejected_and_no_other() -> None:
    found = open_table(WAN).assign([1, 1, 2049], [16 * 2049, 16 * 2048, 16], [16, 16, 16])
    assert found.rejection.tolist() == [Rejection.TOO_LARGE, Rejection.NONE, Rejection.TOO_LARGE]
    assert found.bucket_id[[0, 2]].tolist() == [-1, -1]
    assert open_table(WAN).num_tokens(found.bucket_id, spec=WAN).tolist() == [0, 2048, 0]


def test_a_base_bucket_is_named_or_the_one_that_most_samples_can_fill() -> None:
    sizes = ((9, 64, 64), (1, 96, 96), (1, 48, 80), (1, 64, 48), (1, 48, 64), (9, 48, 80))
    table = BucketTable(sizes=sizes, tiers=(0, 1, 0, 0, 0, 0))
    assert table.with_base().base == 3, "one frame, the lowest tier, nearest to a square, first of equals"
    assert table.with_base((48, 80)).base == 2
    assert table.with_base([9, 48, 80]).base == 5
    moved = table.with_base((96, 96)).with_base()
    assert (moved.sizes, moved.tiers, moved.base) == (table.sizes, table.tiers, 3)
    for wrong in ((80, 48), (17, 48, 80), (48,), (1, 1, 48, 80)):
        with pytest.raises(BucketingError, match=r"must be a bucket of the table.*1×96×96"):
            table.with_base(wrong)
