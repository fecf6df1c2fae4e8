"""Anima's texts: captions are cut to `max_sequence_length`, and the conditioner pads them to its own length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner import PlanConfig, plan_memory
from tests.models.families.anima import text_of
from tests.models.recipe_cases import Drawn

CAPTION = "a red circle above a blue square, and a green line below"


@torch.no_grad()
def test_a_short_length_cuts_captions_as_the_pipeline_does_and_shortens_no_text(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = tiny_folder("anima")
    nothing = torch.zeros(0)
    drawn = Drawn(caption=CAPTION, pixels=nothing, fps=1.0, noise=nothing, timestep=nothing, max_sequence_length=512)
    texts = {}
    for length in (512, 4):
        recipe = recipe_of(str(folder)).load(str(folder), max_sequence_length=length)
        texts[length] = recipe.encode_text([CAPTION]).values
        assert torch.equal(texts[length], text_of(recipe.pipeline, replace(drawn, max_sequence_length=length)))
        assert texts[length].shape[1] == recipe.text_length(length) == 512
    assert texts[4][:, 4:].count_nonzero() == 0
    assert texts[512][:, 4:].count_nonzero() > 0
    with pytest.raises(BucketingError, match="`max_sequence_length` of at most 512"):
        recipe_of(str(folder)).load(str(folder), max_sequence_length=513)


def test_memory_is_planned_for_the_whole_text(tiny_folder: Callable[[str], Path]) -> None:
    plans = [
        plan_memory(
            str(tiny_folder("anima")),
            PlanConfig.from_flat(
                sample_size=[1, 64, 64],
                cached="all",
                device="cpu",
                mixed_precision="no",
                max_sequence_length=n,
                train_batch_size=1,
            ),
        )
        for n in (4, None)
    ]
    assert plans[0].total == plans[1].total
