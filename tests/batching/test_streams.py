"""Streams of runs: what their checkpoints know them by stays as earlier releases wrote it."""

from __future__ import annotations

import dataclasses
import pickle

from hf_bucketing.batching.streamed import _CountedTokens
from hf_bucketing.buckets.open_table import open_table
from hf_bucketing.conditions.appended import AppendedFrames
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.conditions.rows import ConditionRules
from hf_bucketing.packing.token_drop import TokenDrop
from tests.training.test_oversize import SPEC


def test_the_function_that_counts_tokens_is_saved_by_the_modules_where_its_values_first_were() -> None:
    """A digest of the saved values tells a stream from others, so that a new place would refuse every checkpoint."""
    table, audio = open_table(SPEC), AudioRule(rate=16000, samples_per_token=640)
    counted = _CountedTokens(drop=TokenDrop(rate=0.5), table=table, spec=SPEC, rules=ConditionRules())
    rules = [
        ConditionRules.of(["reference"], references=ReferenceRule(most=2)),
        ConditionRules.of(["reference"], references=ReferenceRule(most=2), appended=AppendedFrames(1)),
        ConditionRules.of(["reference"], references=ReferenceRule(most=2), audio=audio),
    ]
    others = [dataclasses.replace(counted, rules=of_run) for of_run in rules]
    others.append(dataclasses.replace(counted, drop=None))
    others.append(dataclasses.replace(counted, table=open_table(SPEC, max_frames=5)))
    saved = [pickle.dumps(function.identity) for function in (counted, *others)]
    assert len({*saved}) == len(saved)
    assert all(b"hf_bucketing.training.streamed" in state for state in saved)
    assert b"hf_bucketing.media.references" in saved[1]
    assert b"hf_bucketing.media.row_audio" in saved[3]
    assert not any(b"hf_bucketing.batching" in state or b"hf_bucketing.conditions" in state for state in saved)
    assert pickle.loads(saved[3]) == others[2].identity
    assert counted({"bucket_id": [table.assign([1], [64], [64]).bucket_id[0]], "num_tokens": [16]}) == {
        "num_tokens": [8]
    }
