"""A packed block dispatches about as many operations as a stock one; see benchmark_operations.py."""

from __future__ import annotations

import pytest
from benchmark_operations import FAMILIES, operations_of_a_block

from tests.packing.flash_attention import flash_attention_4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_block_dispatches_few_operations_more_than_the_stock_model(name, monkeypatch) -> None:
    """Forward, recomputation and backward of a block with LoRA, for a pack of samples of three sizes."""
    monkeypatch.setattr("hf_bucketing.models.enable.resolve_backend", lambda backend: backend)
    stock = operations_of_a_block(name, backend=None)
    by_segments = operations_of_a_block(name, backend="segments")
    with flash_attention_4():
        by_kernel = operations_of_a_block(name, backend="varlen:fa4")
    assert stock.without_views > 200
    assert by_kernel.without_views <= 1.05 * stock.without_views
    assert by_kernel.all <= 1.05 * stock.all
    assert by_segments.without_views <= 1.08 * stock.without_views
    assert by_segments.all <= 1.06 * stock.all
