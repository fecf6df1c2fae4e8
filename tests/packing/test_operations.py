"""A packed block dispatches about as many operations as a stock one; see scripts/benchmark_operations.py."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.packing.flash_attention import flash_attention_4

FAMILIES = ("wan", "ltx", "flux", "hunyuan-video", "qwen-image")


@pytest.fixture
def counts(monkeypatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("benchmark_operations")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_block_dispatches_few_operations_more_than_the_stock_model(name, counts, monkeypatch) -> None:
    """Forward, recomputation and backward of a block with LoRA, for a pack of samples of three sizes."""
    monkeypatch.setattr("hf_bucketing.models.enable.resolve_backend", lambda backend: backend)
    stock = counts.operations_of_a_block(name, backend=None)
    by_segments = counts.operations_of_a_block(name, backend="segments")
    with flash_attention_4():
        by_kernel = counts.operations_of_a_block(name, backend="varlen:fa4")
    assert stock.without_views > 200
    assert by_kernel.without_views <= 1.05 * stock.without_views
    assert by_kernel.all <= 1.15 * stock.all
    assert by_segments.without_views <= 1.08 * stock.without_views
    assert by_segments.all <= 1.18 * stock.all
