"""The kept area: what of a frame is inside its bucket."""

from __future__ import annotations

import math

import pytest

from hf_bucketing import BucketTable, LatentSpec, Size, open_table
from hf_bucketing.buckets.kept import kept_area, mean_kept_area


def test_it_is_the_ratio_of_the_aspect_ratios() -> None:
    """100 × 300 covers 64 × 96 as 64 × 192, of which a half is inside; a higher frame loses rows."""
    shares = kept_area([100, 300, 64], [300, 100, 96], target_heights=64, target_widths=96)
    assert shares.tolist() == pytest.approx([1 / 2, (64 / 288), 1])


def test_the_mean_is_over_rows_with_a_bucket_in_tables_and_at_own_sizes() -> None:
    table = BucketTable(sizes=(Size(1, 64, 64), Size(9, 32, 64)))
    sides = {"heights": [100, 32, 7], "widths": [200, 64, 7]}
    assert mean_kept_area(table, [0, 1, -1], **sides) == pytest.approx((0.5 + 1) / 2)
    assert math.isnan(mean_kept_area(table, [-1, -1, -1], **sides))
    own = open_table(LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2)))
    ids = own.assign([1, 1, 1], sides["heights"], sides["widths"]).bucket_id
    sizes = [own.size(bucket) for bucket in ids.tolist()]
    shares = [float(kept_area(*side, target_heights=size.height, target_widths=size.width))
              for side, size in zip(zip(*sides.values(), strict=True), sizes, strict=True)]  # fmt: skip
    assert mean_kept_area(own, ids, **sides) == pytest.approx(sum(shares) / 3)


def test_the_mean_does_not_depend_on_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BucketTable(sizes=(Size(1, 64, 64), Size(1, 64, 96)))
    ids, heights, widths = [0, -1, 1, 0, -1, -1, 1], [64, 1, 64, 100, 1, 1, 80], [128, 1, 96, 200, 1, 1, 80]
    whole = mean_kept_area(table, ids, heights=heights, widths=widths)
    monkeypatch.setattr("hf_bucketing.buckets.kept._BLOCK", 2)
    assert mean_kept_area(table, ids, heights=heights, widths=widths) == pytest.approx(whole, rel=1e-12)
