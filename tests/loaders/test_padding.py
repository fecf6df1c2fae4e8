"""Padding to the batch's longest sample, to a pad_to_multiple_of, or to a boundary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hf_bucketing import BucketingError, ColumnError
from hf_bucketing.loaders import PadCollator
from hf_bucketing.losses import masked_mse


def rows(*lengths: int):
    return [{"x": torch.full((2, n), float(n)), "name": f"s{n}"} for n in lengths]


@pytest.mark.parametrize(("options", "width"), [
    ({}, 9), ({"pad_to_multiple_of": 4}, 12), ({"pad_to_multiple_of": 3}, 9),
    ({"boundaries": [32, 9, 16]}, 9), ({"boundaries": [16]}, 16),
])  # fmt: skip
def test_samples_are_padded_at_their_end_and_their_lengths_returned(options, width: int) -> None:
    batch = PadCollator(["x"], value=-7, **options)(rows(5, 9, 1))
    assert batch["x"].shape == (3, 2, width)
    assert batch["lengths"].tolist() == [5, 9, 1]
    assert batch["name"] == ["s5", "s9", "s1"]
    for sample, length in zip(batch["x"], (5, 9, 1), strict=True):
        assert (sample[:, :length] == length).all()
        assert (sample[:, length:] == -7).all()
    target = torch.zeros_like(batch["x"])
    assert masked_mse(batch["x"], target, batch["lengths"]).tolist() == [25, 81, 1]


def test_another_dimension_numpy_arrays_lists_and_bare_tensors() -> None:
    columns = [{"a": np.ones((n, 3), np.float32), "b": np.ones((n, 2), np.int64)} for n in (2, 4)]
    batch = PadCollator(["a", "b"], dim=0)(columns)
    assert (batch["a"].shape, batch["b"].shape, batch["b"].dtype) == ((2, 4, 3), (2, 4, 2), torch.int64)
    assert batch["b"].sum((1, 2)).tolist() == [4, 8]
    assert PadCollator(["ids"])([{"ids": [1, 2, 3]}, {"ids": [4]}])["ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert PadCollator(["wave"])([torch.ones(2), torch.ones(3)])["wave"].shape == (2, 3)
    second = PadCollator(["x"], dim=1)([torch.ones(2, n, 5) for n in (3, 4)])
    assert second["x"].shape == (2, 2, 4, 5)


def test_without_names_all_columns_of_numbers_are_padded_and_others_are_lists() -> None:
    others = {"name": "a", "rate": 8}
    columns = [
        {"wave": torch.ones(n), "pitch": np.ones((2, n)), "notes": [1] * n, "pairs": [[1] * n] * 2, **others}
        for n in (3, 5)
    ]
    batch = PadCollator(boundaries=[8])(columns)
    assert [tuple(batch[name].shape) for name in ("wave", "pitch", "notes", "pairs")] == [(2, 8), (2, 2, 8)] * 2
    assert (batch["name"], batch["rate"], batch["lengths"].tolist()) == (["a", "a"], [8, 8], [3, 5])
    assert PadCollator()([torch.ones(2), torch.ones(3)])["values"].shape == (2, 3)
    with pytest.raises(ColumnError, match=r"No column holds .* \['name'\]"):
        PadCollator()([{"name": "a"}])
    with pytest.raises(BucketingError, match=r"PadCollator\(\['wave'\]\)"):
        PadCollator()([{"wave": torch.ones(3), "size": [480, 832]}])


def test_rows_of_several_tensors_come_back_as_a_tuple_or_under_the_given_names() -> None:
    rows = [(torch.ones(2, n), np.full(n, 2.0), f"clip {n}") for n in (3, 1)]
    x, y, names, lengths = PadCollator(pad_to_multiple_of=4)(rows)
    assert (tuple(x.shape), tuple(y.shape), names, lengths.tolist()) == (
        (2, 2, 4),
        (2, 4),
        ["clip 3", "clip 1"],
        [3, 1],
    )
    assert y.tolist() == [[2, 2, 2, 0], [2, 0, 0, 0]]
    named = PadCollator(["noisy", "clean"])([row[:2] for row in rows])
    assert {name: tuple(value.shape) for name, value in named.items()} == {
        "noisy": (2, 2, 3), "clean": (2, 3), "lengths": (2,),
    }  # fmt: skip
    loader = DataLoader(TensorDataset(torch.ones(4, 5), torch.zeros(4, 5)), batch_size=2, collate_fn=PadCollator())
    assert [[part.shape[0] for part in batch] for batch in loader] == [[2, 2, 2]] * 2
    with pytest.raises(BucketingError, match="3 values, but `columns` names 2"):
        PadCollator(["noisy", "clean"])(rows)


@pytest.mark.parametrize(("options", "batch", "error", "message"), [
    ({"boundaries": [4, 8]}, rows(5, 9), BucketingError, "9 long, but the last boundary is 8"),
    ({}, [{"y": torch.ones(2)}], ColumnError, "lacks 'x'"),
    ({}, [{"x": torch.ones(2, 3)}, {"x": torch.ones(3, 3)}], BucketingError, "differs in more than dimension -1"),
    ({"columns": ["x", "y"]}, [{"x": torch.ones(3), "y": torch.ones(2)}], BucketingError, "columns of equal length"),
])  # fmt: skip
def test_batches_that_cannot_be_padded_are_errors(options, batch, error, message: str) -> None:
    with pytest.raises(error, match=message):
        PadCollator(**{"columns": ["x"], **options})(batch)


@pytest.mark.parametrize(
    "options", [{"pad_to_multiple_of": 2, "boundaries": [4]}, {"pad_to_multiple_of": 0}, {"boundaries": [0, 4]}]
)
def test_impossible_settings_are_errors(options) -> None:
    with pytest.raises(BucketingError):
        PadCollator(["x"], **options)
    with pytest.raises(BucketingError, match="Expected columns"):
        PadCollator([])
