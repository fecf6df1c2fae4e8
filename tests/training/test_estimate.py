"""The largest `max_tokens` that fits, found before a run trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.training.estimate import find_max_tokens
from tests.training.training_cases import in_process


@pytest.mark.slow
def test_max_tokens_is_the_largest_number_that_fits() -> None:
    tried = []

    def try_step(max_tokens: int) -> None:
        tried.append(max_tokens)
        if max_tokens > 700:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert find_max_tokens(try_step, largest=1000, smallest=100) == 656
    assert tried == [1000, 900, 810, 729, 656]
    with pytest.raises(BucketingError, match="largest sample takes 800"):
        find_max_tokens(try_step, largest=1000, smallest=800)

    def broken(max_tokens: int) -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        find_max_tokens(broken, largest=1000, smallest=1)


@pytest.mark.slow
def test_a_dry_run_and_automatic_max_tokens_train_nothing(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch, capsys
) -> None:
    from hf_bucketing.training import estimate as memory, train as run_training

    tokens = PreparedDataset.load(prepared_dir).dataset["num_tokens"]
    original, tried = memory.find_max_tokens, []

    def small_memory(try_step, **limits):
        def limited(max_tokens: int) -> None:
            tried.append(max_tokens)
            if max_tokens > 1000:
                raise RuntimeError("CUDA out of memory.")
            try_step(max_tokens)

        return original(limited, **limits)

    monkeypatch.setattr(memory, "find_max_tokens", small_memory)
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", batching="pack", max_tokens="auto",
                        strip_length=16, dry_run=True)  # fmt: skip
    run_training(config)
    printed = capsys.readouterr().out
    assert "***** Dry run: nothing is trained *****" in printed
    assert "Running training" not in printed
    assert tried[0] >= sum(tokens) * 0.9
    assert f"--max_tokens auto found {tried[-1]} tokens" in printed
    assert 900 <= tried[-1] <= 1000
    assert "Memory per process = weights" in printed
    assert "text encoding: weights" in printed
    assert "20 kept, 0 repeated" in printed
    assert not (tmp_path / "out" / "model_index.json").exists()
