"""The cost model: hand-computed costs, packs, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import BucketingError
from hf_bucketing.buckets.cost import CostModel


def test_costs_of_samples_keep_their_shape() -> None:
    model = CostModel(linear=3, quadratic=0.5)
    assert model.cost([[0, 1], [2, 10]]).tolist() == [[0, 3.5], [8, 80]]
    assert model.cost(np.int32(200_000)) == 600_000 + 2e10, "squares must not overflow"


def test_a_pack_costs_what_its_samples_cost() -> None:
    model = CostModel(linear=1, quadratic=1)
    assert model.pack_cost([4, 2, 2, 8], [0, 1, 3, 4]).tolist() == [20, 12, 72]
    assert model.pack_cost([], [0]).tolist() == []


@given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=5), min_size=1, max_size=20))
def test_packs_are_summed_one_by_one(packs: list[list[int]]) -> None:
    model = CostModel.for_transformer(8)
    offsets = np.cumsum([0, *map(len, packs)])
    expected = [sum(24 * 64 * tokens + 32 * tokens**2 for tokens in pack) for pack in packs]
    assert model.pack_cost(np.concatenate(packs), offsets) == pytest.approx(expected, rel=1e-12)


def test_a_transformer_block_is_counted_weight_by_weight() -> None:
    width, tokens = 6, 5
    projections = 4 * 2 * tokens * width * width  # query, key, value, output: a multiply and an add per weight
    feed_forward = 2 * 2 * tokens * width * 4 * width
    attention = 2 * 2 * tokens * tokens * width  # scores, and the weighted sum of values
    assert CostModel.for_transformer(width).cost(tokens) == projections + feed_forward + attention


@pytest.mark.parametrize(("make", "message"), [
    (lambda: CostModel(linear=-1, quadratic=1), "at least 0"),
    (lambda: CostModel(linear=0, quadratic=0), "above 0"),
    (lambda: CostModel(linear=float("inf"), quadratic=1), "finite"),
    (lambda: CostModel(linear=float("nan"), quadratic=1), "finite"),
    (lambda: CostModel.for_transformer(0), "at least 1, got 0"),
    (lambda: CostModel(linear=1, quadratic=0).pack_cost([1, 2], [0, 1]), "number of samples, 2"),
    (lambda: CostModel(linear=1, quadratic=0).pack_cost([1, 2], [0, 0, 2]), "rise"),
    (lambda: CostModel(linear=1, quadratic=0).pack_cost([1, 2], [1, 2]), "rise from 0"),
    (lambda: CostModel(linear=1, quadratic=0).pack_cost([], []), "rise from 0"),
])  # fmt: skip
def test_impossible_costs_are_errors_that_say_why(make, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        make()
