"""Costs fitted to measured times: coefficients that are found again, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hf_bucketing import BucketingError, CostModel
from hf_bucketing.buckets import CostFit, fit_costs, read_cost_model

LINEAR, QUADRATIC, PER_BATCH = 3e-5, 2e-9, 0.08


def packs(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw packs of samples of 1,000 to 16,000 tokens, and return the tokens and the pairs of tokens of each."""
    rng = np.random.default_rng(seed)
    lengths = [rng.choice([1000, 2000, 5000, 8000, 16_000], rng.integers(1, 6)) for _ in range(count)]
    return np.array([pack.sum() for pack in lengths]), np.array([(pack**2).sum() for pack in lengths])


def times(tokens: np.ndarray, pairs: np.ndarray, *, per_batch: float = 0.0) -> np.ndarray:
    return LINEAR * tokens + QUADRATIC * pairs + per_batch


@pytest.mark.parametrize("per_batch", [0.0, PER_BATCH])
def test_exact_times_give_back_the_coefficients_also_that_of_a_batch(per_batch: float) -> None:
    tokens, pairs = packs(60)
    fit = fit_costs(times(tokens, pairs, per_batch=per_batch), tokens=tokens, token_pairs=pairs)
    assert (fit.linear, fit.quadratic) == pytest.approx((LINEAR, QUADRATIC), rel=1e-6)
    assert fit.per_batch == pytest.approx(per_batch, abs=1e-9)
    assert (fit.residual, fit.num_steps) == (pytest.approx(0, abs=1e-9), 60)
    assert fit.model == CostModel(linear=fit.linear, quadratic=fit.quadratic)


def test_warm_up_steps_and_stalls_do_not_move_the_fit() -> None:
    tokens, pairs = packs(200)
    measured = times(tokens, pairs, per_batch=PER_BATCH)
    measured[:12] += 30  # compilation
    measured[40::8] *= 3  # data, checkpoints, another process
    fit = fit_costs(measured, tokens=tokens, token_pairs=pairs)
    assert (fit.linear, fit.quadratic, fit.per_batch) == pytest.approx((LINEAR, QUADRATIC, PER_BATCH), rel=1e-4)
    assert fit.residual < 1e-4, "the median step fits, the others do not count"


def test_the_residual_is_the_typical_noise_of_a_step() -> None:
    tokens, pairs = packs(500)
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, 500)
    fit = fit_costs(times(tokens, pairs) * (1 + noise), tokens=tokens, token_pairs=pairs)
    assert (fit.linear, fit.quadratic) == pytest.approx((LINEAR, QUADRATIC), rel=0.1)
    assert fit.residual == pytest.approx(0.05, rel=0.15)


def test_several_batches_of_a_step_cost_their_constant_each() -> None:
    tokens, pairs = packs(120)
    batches = np.random.default_rng(2).integers(1, 5, 120)
    measured = times(tokens, pairs) + PER_BATCH * batches
    fit = fit_costs(measured, tokens=tokens, token_pairs=pairs, batches=batches)
    assert fit.per_batch == pytest.approx(PER_BATCH, rel=1e-4)


def test_full_packs_count_the_constant_of_a_batch_among_their_tokens() -> None:
    pairs = np.random.default_rng(3).integers(10_000_000, 500_000_000, 80)
    tokens = np.full(80, 32_768)
    fit = fit_costs(times(tokens, pairs, per_batch=PER_BATCH), tokens=tokens, token_pairs=pairs)
    assert (fit.linear, fit.per_batch) == (pytest.approx(LINEAR + PER_BATCH / 32_768), 0)
    assert fit.quadratic == pytest.approx(QUADRATIC, rel=1e-6)


def test_no_coefficient_is_negative() -> None:
    tokens, pairs = packs(60)
    concave = 1e-3 * np.sqrt(tokens)
    fit = fit_costs(concave, tokens=tokens, token_pairs=pairs)
    assert min(fit.linear, fit.quadratic, fit.per_batch) >= 0
    assert fit.quadratic == 0


@pytest.mark.parametrize(("seconds", "tokens", "message"), [
    (np.ones(19), np.arange(1, 20), "at least 20 steps, got 19"),
    (np.ones(30), np.full(30, 500), "about 500 to 500 tokens each"),
    (np.ones(30), np.arange(30) + 500, "measure a run on samples of several sizes"),
    (np.linspace(2, 1, 30), np.arange(1, 31) * 100, "do not rise with their tokens"),
    (np.zeros(30), np.arange(1, 31), "times above 0"),
    (np.full(30, np.nan), np.arange(1, 31), "finite times"),
])  # fmt: skip
def test_steps_that_tell_too_little_are_errors_that_say_why(seconds, tokens, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        fit_costs(seconds, tokens=tokens, token_pairs=tokens**2)


def test_the_file_of_a_fit_gives_back_its_model(tmp_path: Path) -> None:
    fit = CostFit(linear=LINEAR / 3, quadratic=QUADRATIC / 7, per_batch=0.1, residual=0.02, num_steps=50)
    (tmp_path / "cost_model.json").write_text(fit.to_json())
    assert CostFit.from_json(fit.to_json()) == fit
    assert read_cost_model(tmp_path / "cost_model.json") == fit.model


GOOD = {"version": 1, "linear": 1.0, "quadratic": 0.0, "per_batch": 0.0, "residual": 0.0, "num_steps": 20}


@pytest.mark.parametrize(("text", "message"), [
    (None, "No such file"),
    ("{", "Expected a cost model"),
    ("[]", "Expected a cost model"),
    ("{}", "'version'"),
    (json.dumps({**GOOD, "version": 2}), "version 1, got 2"),
    (json.dumps({**GOOD, "linear": -1.0}), "at least 0"),
    (json.dumps({**GOOD, "linear": 0.0}), "above 0"),
    (json.dumps({**GOOD, "residual": -1.0}), "at least 0"),
    (json.dumps({**GOOD, "linear": "fast"}), "Expected a cost model"),
    (json.dumps({**GOOD, "speed": 1}), "speed"),
])  # fmt: skip
def test_a_bad_file_is_refused_by_name(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BucketingError, match=message) as error:
        read_cost_model(path)
    assert str(path) in str(error.value)
