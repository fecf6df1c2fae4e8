"""The shift of noise levels by the number of tokens."""

from __future__ import annotations

import math

import pytest
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from hf_bucketing import BucketingError
from hf_bucketing.models.shift import shift_for_tokens


@pytest.mark.parametrize("tokens", [1, 256, 1000, 4096, 32760])
def test_the_shift_is_that_of_fluxs_schedule(tokens: int) -> None:
    assert math.log(shift_for_tokens(tokens)) == pytest.approx(calculate_shift(tokens))
    options = {"base_shift": 0.1, "max_shift": 2.0}
    ours = shift_for_tokens(tokens, base_tokens=100, max_tokens=900, **options)
    assert math.log(ours) == pytest.approx(calculate_shift(tokens, 100, 900, 0.1, 2.0))


@pytest.mark.parametrize("arguments", [{"num_tokens": 0}, {"num_tokens": 4, "base_tokens": 7, "max_tokens": 7}])
def test_impossible_numbers_of_tokens_are_errors(arguments) -> None:
    with pytest.raises(BucketingError, match="at least 1 token"):
        shift_for_tokens(**arguments)
