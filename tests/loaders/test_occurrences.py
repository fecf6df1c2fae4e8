"""Occurrences of a row in an epoch: their numbers, and the views and captions that they draw."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketTable, Size, ViewRule
from hf_bucketing.loaders import BucketBatchSampler, BucketCollator, CaptionRule, NumberedRows, PackBatchSampler
from hf_bucketing.loaders.occurrences import OCCURRENCE, RepeatedRow
from hf_bucketing.randomness import ROW

TABLE = BucketTable(sizes=(Size(1, 8, 8), Size(1, 16, 8)))
IDS = [0] * 7 + [1] * 6
WEIGHTS = [4.0, 2.5, 1.0, 0.5, 3.0, 1.0, 2.0] * 2


def sampler(kind: str, num_processes: int = 1, **options) -> BucketBatchSampler | PackBatchSampler:
    weights = None if "remainder" in options else WEIGHTS[: len(IDS)]
    options = {"weights": weights, "num_processes": num_processes, "seed": 3, **options}
    if kind == "bucket":
        return BucketBatchSampler(IDS, table=TABLE, batch_size=2, **options)
    return PackBatchSampler([20 + 5 * row for row in IDS], max_tokens=64, strip_length=1, **options)


def drawn(planned: BucketBatchSampler | PackBatchSampler) -> list[tuple[int, int]]:
    return [(int(row), getattr(row, "occurrence", 0)) for batch in planned for row in batch]


@pytest.mark.parametrize("kind", ["bucket", "pack"])
def test_occurrences_are_numbered_in_order_and_exactly_after_resuming_on_any_number_of_processes(kind: str) -> None:
    whole = drawn(sampler(kind))
    seen: Counter[int] = Counter()
    for row, occurrence in whole:
        assert occurrence == seen[row]
        seen[row] += 1
    assert max(seen.values()) == 4
    on_two = drawn(sampler(kind, 2))
    assert len({*on_two}) == len(on_two), "each occurrence once"
    assert {*on_two} <= {*whole} or kind == "pack"  # packs on two processes may drop another row
    for processes in (1, 2, 3):
        first = sampler(kind, 2)
        step = 2
        started = [(int(row), getattr(row, "occurrence", 0)) for batch in [*first][: 2 * step] for row in batch]
        later = sampler(kind, processes)
        later.load_state_dict(first.state_dict(step=step))
        rest = drawn(later)
        if processes == 2:
            assert started + rest == on_two
        counts = Counter(row for row, _ in started + rest)
        assert {*started, *rest} == {(row, number) for row, times in counts.items() for number in range(times)}


def test_without_repeats_and_in_evaluation_the_rows_are_plain_numbers() -> None:
    unweighted = sampler("bucket", weights=None)
    evaluated = sampler("bucket", 2, weights=None, evaluation=True, shuffle=False)
    assert {type(row) for planned in (unweighted, evaluated) for batch in planned for row in batch} == {int}
    filled = drawn(sampler("bucket", 3, remainder="repeat"))
    assert max(occurrence for _, occurrence in filled) == 1, "a row that fills a step is another occurrence"


def test_a_number_of_an_occurrence_reaches_a_worker_and_is_else_the_row() -> None:
    row = pickle.loads(pickle.dumps([RepeatedRow(4, 2)]))[0]
    assert (row, row.occurrence, [*"abcde"][row]) == (4, 2, "e")
    assert NumberedRows(Dataset.from_dict({"a": range(9)}))[row] == {"a": 4, OCCURRENCE: 2}


def test_each_occurrence_draws_its_own_crop_and_caption_and_the_first_those_of_no_repeats(tmp_path: Path) -> None:
    pixels = torch.randint(256, (64, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.numpy()).save(tmp_path / "tall.png")
    cells = {
        "video": str(tmp_path / "tall.png"),
        "caption": ["a, b, c", "d, e, f"],
        ROW: 0,
        "bucket_id": 0,
    }
    dataset = Dataset.from_list([{**cells, "num_frames": 1, "fps": 0.0}])
    captions = CaptionRule(shuffle_tags=True)
    collate = BucketCollator(TABLE, views=ViewRule(random_crop=True), captions=captions, seed=1)
    repeated = collate(NumberedRows(dataset).__getitems__([0, *(RepeatedRow(0, number) for number in range(1, 6))]))
    assert repeated[OCCURRENCE] == [0, 1, 2, 3, 4, 5]
    assert len({*repeated["crop"]}) > 3
    assert len({*repeated["caption"]}) > 2
    plain = collate([dataset[0]])
    assert (plain["crop"], plain["caption"]) == (repeated["crop"][:1], repeated["caption"][:1])
    assert OCCURRENCE not in plain
