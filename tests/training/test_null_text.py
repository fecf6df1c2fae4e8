"""The text that a dropped caption becomes is the one that the stock pipeline calls its model with for guidance."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from torch.utils._pytree import tree_leaves

from hf_bucketing.models.recipe import TextEmbeddings
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.testing import make_tiny_pipeline
from tests.models.families import RECIPES
from tests.models.recipe_cases import RecipeCase
from tests.training.test_every_recipe import PROMPT, render

GUIDANCE = {"guidance_scale": 4.0, "true_cfg_scale": 4.0, "negative_prompt": ""}
"""Arguments with which a pipeline that knows them calls its model for an empty negative prompt."""


TEXTS = ("encoder_hidden_states", "cap_feats")
"""Names of a transformer's text."""


def texts_of(case: RecipeCase, pipeline: DiffusionPipeline) -> list[torch.Tensor]:
    """Return each different text that the pipeline gives its transformer as it renders with guidance: `(n, width)`."""
    given: list[torch.Tensor] = []
    forward = pipeline.transformer.forward
    signature = inspect.signature(forward)

    def record(*args: object, **kwargs: object) -> object:
        arguments = signature.bind(*args, **kwargs).arguments
        for text in tree_leaves([arguments.get(name) for name in TEXTS]):
            rows = [] if text is None else text.detach() if text.ndim == 3 else text.detach()[None]
            given.extend(row for row in rows if not any(torch.equal(row, other) for other in given))
        return forward(*args, **kwargs)

    pipeline.transformer.forward = record
    known = inspect.signature(pipeline.__call__).parameters
    guidance = {name: value for name, value in GUIDANCE.items() if name in known}
    render(replace(case, render={**case.render, **guidance}), pipeline)
    return given


def real_tokens(text: TextEmbeddings) -> torch.Tensor:
    return text.values[0] if text.mask is None else text.values[0][text.mask[0].bool()]


def begins_or_ends_with(row: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Return whether a row is these tokens and padding, on either side."""
    count = len(tokens)
    parts = (row[:count], row[len(row) - count :])
    return len(row) >= count and any(torch.allclose(part, tokens, atol=1e-5) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("case", RECIPES.values(), ids=RECIPES.keys())
def test_a_dropped_caption_is_the_empty_negative_prompt_of_the_pipeline(case: RecipeCase, tmp_path: Path) -> None:
    make_tiny_pipeline(tmp_path / "pipeline", family=case.tiny)
    folder = str(tmp_path / "pipeline")
    recipe = recipe_of(folder).load(folder, max_sequence_length=case.max_sequence_length)
    empty, prompt = (real_tokens(recipe.encode_text([caption])) for caption in ("", PROMPT))
    pipeline = DiffusionPipeline.from_pretrained(folder, **case.components)
    texts = [text for text in texts_of(case, pipeline) if not begins_or_ends_with(text, prompt)]
    if not texts:
        known = inspect.signature(pipeline.__call__).parameters
        with_guider = hasattr(pipeline, "guider")  # which decides about guidance itself
        assert "negative_prompt" not in known or "guidance_scale" in known or with_guider
        pytest.skip("the pipeline calls its model with the prompt alone")
    assert any(begins_or_ends_with(text, empty) for text in texts)
