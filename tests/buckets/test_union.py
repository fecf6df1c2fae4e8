"""One table in place of several: equal sizes are one bucket, and every id finds its size again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from hf_bucketing import BucketingError, BucketTable, LatentSpec, Size, token_ladder
from hf_bucketing.buckets.table import union_of_tables

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def test_the_union_of_two_tables_by_hand() -> None:
    low = BucketTable(sizes=((1, 64, 96), (9, 64, 96), (9, 96, 64)), tiers=(0, 0, 0))
    high = BucketTable(sizes=((9, 128, 192), (9, 96, 64), (17, 64, 64)), tiers=(1, 0, 0), base=1)
    table, ids = union_of_tables([low, high])
    assert table.sizes == ((1, 64, 96), (9, 64, 96), (9, 96, 64), (9, 128, 192), (17, 64, 64))
    assert [column.tolist() for column in ids] == [[0, 1, 2], [3, 2, 4]]
    # The tier of `low` and the lower one of `high` have frames of 96 × 64 at most; only 128 × 192 is larger.
    assert table.tiers == (0, 0, 0, 1, 0)
    assert table.base == 2
    assert table.size(table.base) == Size(9, 96, 64)


def test_tables_with_the_same_buckets_stay_as_they_are() -> None:
    table = token_ladder(SPEC, [60, 110], frames=[1, 9]).with_base()
    union, ids = union_of_tables([table, table])
    assert union == table
    assert union.ids_mark == table.ids_mark
    assert all(column.tolist() == list(range(len(table))) for column in ids)
    assert union_of_tables([table])[0] == table


def test_images_at_video_sizes_keep_their_higher_tiers() -> None:
    tables = [token_ladder(SPEC, budget, frames=[1, 9]).images_at_video_sizes() for budget in ([60], [60, 150])]
    union, ids = union_of_tables(tables)
    for table, buckets in zip(tables, ids, strict=True):
        for first in range(len(table)):
            for second in range(len(table)):
                if (
                    table.sizes[first].frames == table.sizes[second].frames
                    and table.tiers[first] < table.tiers[second]
                ):
                    assert union.tiers[buckets[first]] < union.tiers[buckets[second]]


def test_two_bases_and_no_table_are_refused() -> None:
    a, b = (BucketTable.parse("64,96;96,64").with_base(size) for size in ((64, 96), (96, 64)))
    with pytest.raises(BucketingError, match=r"different base buckets, 1×64×96 .* and 1×96×64"):
        union_of_tables([a, b])
    with pytest.raises(BucketingError, match="at least one table"):
        union_of_tables([])


sizes = st.tuples(st.sampled_from([1, 9]), st.sampled_from([32, 48, 64]), st.sampled_from([32, 64, 96]))


@settings(max_examples=30)
@given(st.lists(st.lists(sizes, min_size=1, max_size=6, unique=True), min_size=1, max_size=4))
def test_every_bucket_has_its_size_in_the_union_and_none_comes_twice(tables: list[list[tuple[int, int, int]]]) -> None:
    given_tables = [BucketTable(sizes=tuple(sizes_of_table)) for sizes_of_table in tables]
    union, ids = union_of_tables(given_tables)
    assert {size for table in given_tables for size in table.sizes} == set(union.sizes)
    for table, buckets in zip(given_tables, ids, strict=True):
        assert [union.size(int(bucket)) for bucket in buckets] == list(table.sizes)
