"""Streams of runs: what their checkpoints know them by stays as earlier releases wrote it."""

from __future__ import annotations

import pickle

from hf_bucketing.batching.streamed import _CountedTokens
from hf_bucketing.buckets.open_table import open_table
from hf_bucketing.packing.token_drop import TokenDrop
from tests.training.test_oversize import SPEC


def test_the_function_that_counts_tokens_is_saved_by_the_module_where_it_first_was() -> None:
    """A digest of the saved function tells a stream from others, so that a new place would refuse every checkpoint."""
    table = open_table(SPEC)
    counted = _CountedTokens(drop=TokenDrop(rate=0.5), table=table, spec=SPEC, references=None, audio=None)
    saved = pickle.dumps(counted)
    assert b"hf_bucketing.training.streamed" in saved
    assert b"hf_bucketing.batching.streamed" not in saved
    assert pickle.loads(saved) == counted
    assert counted({"bucket_id": [table.assign([1], [64], [64]).bucket_id[0]], "num_tokens": [16]}) == {
        "num_tokens": [8]
    }
