"""References of rows: how many tokens they take, and which rows can be stacked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hf_bucketing import BucketTable, LatentSpec, Size, open_table
from hf_bucketing.conditions.appended import AppendedFrames
from hf_bucketing.conditions.audio import AudioRule, RowAudio
from hf_bucketing.conditions.condition import Condition, token_conditions
from hf_bucketing.conditions.references import ReferenceRule, RowReferences
from hf_bucketing.conditions.rows import ConditionRules, RowConditions, bucket_parts, sample_sizes
from hf_bucketing.errors import BucketingError

IMAGES = LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))
VIDEOS = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
RULE = ReferenceRule(multiples=(16, 16))

sides = st.tuples(st.sampled_from([1, 9]), st.integers(16, 90), st.integers(16, 90))
rows = st.lists(st.tuples(sides, st.lists(sides, max_size=4)), max_size=12)


def references_of(lists: list[list[tuple[int, int, int]]]) -> RowReferences:
    return RowReferences.of_lists([[side for size in sizes for side in size] for sizes in lists], rule=RULE)


@given(rows)
def test_tokens_and_signatures_are_those_of_the_rows_one_by_one(given_rows) -> None:
    samples = [VIDEOS.snap_arrays(*map(np.int64, sample)) for sample, _ in given_rows]
    references = references_of([sizes for _, sizes in given_rows])
    grids = []
    for sample, (_, sizes) in zip(samples, given_rows, strict=True):
        shown = RULE.sizes(sizes, [sample] * len(sizes)) if sizes else []
        grids.append(tuple(tuple(int(side) for side in VIDEOS.grid_of(*size)) for size in shown))
    tokens = references.num_tokens(samples, spec=VIDEOS)
    assert tokens.tolist() == [sum(int(np.prod(grid)) for grid in lists) for lists in grids]
    sizes = references.sizes(samples)
    assert [tuple(VIDEOS.grid(size) for size in shown) for shown in sizes] == grids
    keys = references.keys(samples, spec=VIDEOS)
    size = Size(9, 64, 64)
    assert [RULE.tokens_of_key(key, size, spec=VIDEOS) for key in keys] == tokens.tolist()
    seen = replace(references, rule=replace(RULE, text_tokens=5, text_factor=2))
    counted = seen.num_tokens(samples, spec=VIDEOS).tolist()
    assert counted == [seen.rule.tokens_of_key(key, size, spec=VIDEOS) for key in keys]
    assert counted == (3 * tokens + 5 * references.counts).tolist()
    signatures = references.signatures(samples, spec=VIDEOS).tolist()
    for lists, signature in zip(grids, signatures, strict=True):
        assert (signature == 0) == (not lists)
        for others, other in zip(grids, signatures, strict=True):
            assert (lists == others) == (signature == other)


def test_a_picture_has_one_latent_frame_and_a_video_those_of_its_sample() -> None:
    references = references_of([[(1, 64, 64), (90, 64, 64)], [(90, 64, 64)], []])
    samples = [(9, 64, 64), (17, 64, 64), (9, 64, 64)]
    assert references.sizes(samples) == [((1, 64, 64), (9, 64, 64)), ((17, 64, 64),), ()]
    assert references.num_tokens(samples, spec=VIDEOS).tolist() == [64, 80, 0]


def test_the_same_file_takes_fewer_tokens_beside_a_smaller_sample() -> None:
    references = references_of([[(1, 128, 128)], [(1, 128, 128)]])
    assert references.num_tokens([(1, 128, 128), (1, 64, 64)], spec=IMAGES).tolist() == [64, 16]


@pytest.mark.parametrize("chunk", [1, 3, 2**20])
def test_the_references_that_are_computed_at_once_change_nothing(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr("hf_bucketing.conditions.references._COUNTED", chunk)
    references = references_of([[(1, 64, 96)], [], [(1, 96, 64), (1, 32, 32), (1, 64, 96)]])
    assert references.num_tokens([(1, 64, 64)] * 3, spec=IMAGES).tolist() == [12, 0, 12 + 4 + 12]


def test_parts_divide_buckets_by_the_grids_of_references() -> None:
    table = BucketTable.parse("64,64;64,96", frames=[1])
    lists = [[], [(1, 64, 64)], [(1, 60, 60)], [(1, 64, 64)], [(1, 64, 64), (1, 64, 64)], []]
    ids = [0, 0, 1, 0, 0, -1]
    parts = bucket_parts(ids, RowConditions.of(references_of(lists)), table=table, spec=IMAGES)
    assert parts.ids.tolist() == [0, 1, 3, 1, 2, -1]
    assert parts.bucket_ids.tolist() == [0, 0, 0, 1]
    assert parts.condition_tokens.tolist() == [0, 16, 32, 9]


def test_parts_divide_buckets_by_the_length_of_audio_too() -> None:
    table, spec = (
        BucketTable.parse("64,64", frames=[1, 9]),
        LatentSpec(temporal_stride=8, spatial_stride=32, patch=(1, 1, 1)),
    )
    rule = AudioRule(rate=16000, samples_per_token=640)
    audio = RowAudio(rule=rule, present=np.array([1, 0, 1, 1, 1], bool), fps=np.array([8.0, 8, 24, 0, 8]))
    references = references_of([[], [], [], [], [(9, 32, 32)]])
    ids = table.assign([9, 9, 9, 1, 9], [64] * 5, [64] * 5).bucket_id.tolist()
    parts = bucket_parts(ids, RowConditions.of(references, audio), table=table, spec=spec)
    assert len({*parts.ids.tolist()}) == 5, "28 tokens, none, 9, an image, and 28 with a reference"
    assert parts.condition_tokens[parts.ids].tolist() == [28, 0, 9, 0, 28 + 2]
    assert parts.bucket_ids[parts.ids].tolist() == ids


def test_rejected_rows_count_nothing_and_rows_can_be_selected() -> None:
    table = open_table(IMAGES)
    references = references_of([[(1, 64, 64)], [(1, 64, 64)], [], [(1, 32, 32), (1, 64, 64)]])
    ids = table.assign([1, -1, 1, 1], [64] * 4, [64] * 4).bucket_id
    samples = sample_sizes(ids, table)
    assert samples.tolist() == [[1, 64, 64], [0, 0, 0], [1, 64, 64], [1, 64, 64]]
    assert references.num_tokens(samples, spec=IMAGES).tolist() == [16, 0, 0, 20]
    some = references.select([3, 2, 0])
    assert some.counts.tolist() == [2, 0, 1]
    assert some.num_tokens(samples[[3, 2, 0]], spec=IMAGES).tolist() == [20, 0, 16]


def test_the_references_that_take_most_tokens_depend_on_the_size_of_their_sample() -> None:
    rows = RowReferences.of_lists([[], [1, 64, 64, 1, 64, 64], [1, 512, 512]], rule=RULE)
    assert rows.most(Size(1, 256, 256), spec=IMAGES) == (Size(1, 256, 256),)
    assert rows.most(Size(1, 64, 64), spec=IMAGES) == (Size(1, 64, 64),) * 2
    assert RowReferences.of_lists([[], []], rule=RULE).most(Size(1, 64, 64), spec=IMAGES) == ()
    assert RowReferences.of_lists([], rule=RULE).most(Size(1, 64, 64), spec=IMAGES) == ()


def test_a_condition_over_its_sample_counts_as_tokens_at_a_fraction_of_its_size() -> None:
    depth = Condition(name="control", enters="tokens", least=1, downscale_factor=2)
    channels, drawn = (
        Condition(name="mask", enters="channels"),
        Condition(name="keyframes", enters="tokens", own_frames=True),
    )
    taken = (depth, channels, drawn, RULE)
    assert token_conditions(taken) == token_conditions(taken, ["control", "mask", "reference"]) == (depth,)
    assert token_conditions(taken, ["mask"]) == ()
    rules = ConditionRules.of(["control", "mask"], references=RULE, taken=taken)
    rows = rules.rows({}, num_rows=3)
    samples = [(9, 64, 96), (1, 64, 64), (0, 0, 0)]
    assert rows.num_tokens(samples, spec=VIDEOS).tolist() == [3 * 2 * 3, 1 * 2 * 2, 0]
    assert rows.sizes(samples, spec=VIDEOS)[:2] == [(Size(9, 32, 48),), (Size(1, 32, 32),)]
    assert rows.shares(samples, spec=VIDEOS) == {"control": 22}
    assert rules.tokens_of_key(rows.keys(samples, spec=VIDEOS)[0], Size(9, 64, 96), spec=VIDEOS) == 18
    seen = replace(depth, text_tokens=5, text_factor=1)
    assert Condition(**seen.settings).settings == seen.settings, "what a prepared folder holds of it counts it alike"
    text = Condition(**seen.settings).rows({}, num_rows=3)
    assert text.text_tokens(samples, spec=VIDEOS).tolist() == [18 + 5, 4 + 5, 0]
    assert text.num_tokens(samples, spec=VIDEOS).tolist() == [2 * 18 + 5, 2 * 4 + 5, 0]


def test_conditions_of_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(BucketingError, match="`reference` conditions are those of 1 rows, but others of 2"):
        RowConditions.of(RULE.rows({"reference_sizes": [[], []]}, num_rows=2), references_of([[]]))


def test_a_hundred_million_rows_without_conditions_take_no_memory_for_them() -> None:
    rows = RowConditions(num_rows=10**8)
    assert rows.references.most(Size(1, 64, 64), spec=IMAGES) == ()
    assert rows.select([3, 10**8 - 1]).references.sizes([(1, 64, 64)] * 2) == [(), ()]
    assert rows.appending(AppendedFrames(1)).select([5]).num_tokens([(9, 64, 64)], spec=VIDEOS).tolist() == [16]
