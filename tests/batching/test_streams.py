"""Streams of runs: what their checkpoints know them by are values, not the places of functions."""

from __future__ import annotations

import dataclasses

from hf_bucketing.batching.streamed import _CountedTokens
from hf_bucketing.buckets.open_table import open_table
from hf_bucketing.conditions.appended import AppendedFrames
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.conditions.rows import ConditionRules
from hf_bucketing.packing.token_drop import TokenDrop
from tests.training.test_oversize import SPEC


def test_the_function_that_counts_tokens_is_known_by_its_values() -> None:
    table = open_table(SPEC)
    counted = _CountedTokens(drop=TokenDrop(rate=0.5), table=table, spec=SPEC, rules=ConditionRules())
    rules = [
        ConditionRules.of(["reference"], references=ReferenceRule(most=2)),
        ConditionRules.of(["reference"], references=ReferenceRule(most=2), appended=AppendedFrames(1)),
        ConditionRules.of([], references=ReferenceRule(), audio=AudioRule(rate=16000, samples_per_token=640)),
    ]
    others = [dataclasses.replace(counted, rules=of_run) for of_run in rules]
    others += [
        dataclasses.replace(counted, drop=None),
        dataclasses.replace(counted, table=open_table(SPEC, max_frames=5)),
    ]
    identities = [value.identity for value in (counted, *others)]
    assert len({*identities}) == len(identities)
    assert dataclasses.replace(counted).identity == counted.identity
    assert "hf_bucketing" not in "".join(identities), "modules may move"
    assert counted({"bucket_id": [table.assign([1], [64], [64]).bucket_id[0]], "num_tokens": [16]}) == {
        "num_tokens": [8]
    }
