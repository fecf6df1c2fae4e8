"""Ideogram 4: several samples of one size in one forward, with padding among their texts."""

from __future__ import annotations

import torch

from hf_bucketing.models.registry import family_of
from hf_bucketing.packing.batch import Rows
from tests.models.cases import Samples
from tests.models.families import CASES


@torch.no_grad()
def test_padding_takes_no_part_and_no_position_in_a_stack() -> None:
    case = CASES["ideogram4"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case, order=(0, 4))
    text = torch.full((2, 10, case.text_dim), 7.0, dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 2:5], mask[1, :3] = 0, 0
    for row, words in enumerate(samples.text):
        text[row, mask[row].bool()] = words
    rows = Rows(
        latents=torch.stack(samples.latents),
        timesteps=samples.timesteps,
        text=text,
        text_mask=mask,
        patch=(1, 1, 1),
    )
    outputs = family_of(model).run(model, rows)
    for output, expected in zip(outputs, samples.alone(model), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
