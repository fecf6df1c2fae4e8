"""Random draws: no two purposes or keys share a stream, and everything random goes through the registry."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import hf_bucketing
from hf_bucketing import BucketingError
from hf_bucketing.randomness import Purpose, generator, integer_seed, seed_sequence

PACKAGE = Path(hf_bucketing.__file__).parent
NUMBERS = st.integers(0, 2**64 - 1) | st.integers(0, 3)
STREAMS = st.tuples(st.sampled_from(Purpose), st.lists(NUMBERS, max_size=4).map(tuple))


def words(purpose: Purpose, key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(seed_sequence(purpose, *key).generate_state(8).tolist())


def test_no_two_purposes_give_the_same_stream() -> None:
    for key in [(), (0,), (0, 0), (0, 0, 0), (7, 3, 1)]:
        drawn = [generator(purpose, *key).random(4).tolist() for purpose in Purpose]
        assert all(a != b for a, b in combinations(drawn, 2))


@given(STREAMS, STREAMS)
def test_different_arguments_give_different_streams(one, other) -> None:
    assert (one == other) == (words(*one) == words(*other))


def test_zeros_at_the_end_of_a_key_and_large_numbers_matter() -> None:
    keys = [(), (0,), (0, 0), (2**32,), (0, 1), (1, 0), (2**32 + 1,), (1,), (0, 2**32)]
    assert len({words(Purpose.VIEW, key) for key in keys}) == len(keys)


def test_streams_stay_what_they_are_across_releases() -> None:
    assert generator(Purpose.NOISE, 1, 2, 3).integers(0, 1000, 4).tolist() == [340, 886, 294, 912]
    assert integer_seed(Purpose.NOISE, 1, 2, 3) == 7270462932408953265


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    with pytest.raises(BucketingError, match=str(number)):
        generator(Purpose.VIEW, 0, number)


def test_no_other_module_makes_generators_of_its_own() -> None:
    allowed = ("randomness.py", "synthetic")  # which makes data, and draws none
    made = {
        f"{path.relative_to(PACKAGE)}: {node.attr}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("default_rng", "SeedSequence", "PCG64", "Philox")
    }
    assert not made
