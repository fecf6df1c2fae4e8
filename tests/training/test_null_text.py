"""The null text, which a dropped caption becomes, is what the stock pipeline calls its model with for guidance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from hf_bucketing import BucketingError, open_table
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.checks import check_cached
from hf_bucketing.batching.drawing import text_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.steps import Step
from hf_bucketing.columns import CacheInfo, PreparedDataset
from hf_bucketing.models import enable_packing
from hf_bucketing.models.families.ideogram4 import TEXT as IDEOGRAM_TEXT
from hf_bucketing.models.registry import recipe_of, recipes
from hf_bucketing.models.texts import TextEmbeddings
from tests.caching.test_caching import OPTIONS, cached, collator_of, first, prepared
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin
from tests.models.recipe_cases import RecipeCase, stock_pipeline
from tests.models.test_recipe_suite import batch_of, losses_by_hand
from tests.training.test_every_recipe import PROMPT, render
from tests.training.training_cases import TINY_WAN, in_process

__all__ = ["prepared"]

GUIDANCE = {"guidance_scale": 4.0, "true_cfg_scale": 4.0, "negative_prompt": ""}
"""Arguments with which a pipeline that knows them calls its model for an empty negative prompt."""


TEXTS = ("encoder_hidden_states", "cap_feats")
"""Names of a transformer's text."""


class PipelineText(NamedTuple):
    """A text that a pipeline gives its transformer.

    Attributes:
        values: `(n, width)`.
        whole: Whether the transformer gets no mask, so that it attends to all of it.
    """

    values: torch.Tensor
    whole: bool


def texts_of(case: RecipeCase, pipeline: Any) -> list[PipelineText]:
    """Return each different text that the pipeline gives its transformer as it renders with guidance."""
    given: list[PipelineText] = []
    forward = pipeline.transformer.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)  # modular pipelines read its signature
    def record(*args: object, **kwargs: object) -> object:
        arguments = signature.bind(*args, **kwargs).arguments
        whole = not any("mask" in name and value is not None for name, value in arguments.items())
        for text in tree_leaves([arguments.get(name) for name in TEXTS]):
            rows = [] if text is None else text.detach() if text.ndim == 3 else text.detach()[None]
            if text is not None and text.ndim == 4:  # Krea 2 takes several layers of each token
                rows = text.detach().flatten(2)
            if text is not None and "indicator" in arguments:  # Ideogram 4 takes text and image in one sequence
                rows = [row[kind == IDEOGRAM_TEXT] for row, kind in zip(rows, arguments["indicator"], strict=True)]
            masks = [value for name, value in arguments.items() if "mask" in name and torch.is_tensor(value)]
            rows = [without_padding_inside(row, masks) for row in rows]
            given.extend(
                PipelineText(row, whole) for row in rows if not any(torch.equal(row, text.values) for text in given)
            )
        return forward(*args, **kwargs)

    pipeline.transformer.forward = record
    known = recipes()[type(pipeline).__name__].call_parameters()
    guidance = {name: value for name, value in GUIDANCE.items() if name in known}
    render(replace(case, render={**case.render, **guidance}), pipeline)
    return given


def references_of(case: RecipeCase) -> tuple[torch.Tensor, ...]:
    """Return the pictures that the case renders with as references, `(3, 1, h, w)` in [−1, 1]."""
    given = case.render.get("image", [])
    images = given if isinstance(given, list) else [given]
    return tuple(torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, None] / 127.5 - 1 for image in images)


def without_padding_inside(row: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
    """Return a text without the padding that stands among its tokens, as Krea 2's does, by the one mask of a call."""
    if len(masks) != 1 or masks[0].shape != (1, len(row)):
        return row
    (places,) = masks[0][0].nonzero(as_tuple=True)
    inside = len(places) and int(places[-1] - places[0]) + 1 > len(places)
    return row[places] if inside else row


def real_tokens(text: TextEmbeddings) -> torch.Tensor:
    return text.values[0] if text.mask is None else text.values[0][text.mask[0].bool()]


def is_of(text: PipelineText, tokens: torch.Tensor, *, masked: bool) -> bool:
    """Return whether a text is these tokens, and padding on either side unless the model would attend to it."""
    row, count = text.values, len(tokens)
    if len(row) < count or (masked and text.whole and len(row) > count):
        return False
    return any(torch.allclose(part, tokens, atol=1e-5) for part in (row[:count], row[len(row) - count :]))


NEVER_EMPTY = ("kandinsky6",)
"""Pipelines that guide with words of their own where the negative prompt is empty."""


@pytest.mark.parametrize("name", one_per_kin((name for name in RECIPES if name not in NEVER_EMPTY), few=True))
def test_a_dropped_caption_is_the_empty_negative_prompt_of_the_pipeline(
    name: str, tiny_folder: Callable[[str], Path]
) -> None:
    case = RECIPES[name]
    folder = str(tiny_folder(case.tiny))
    recipe = recipe_of(folder).load(folder, max_sequence_length=case.max_sequence_length)
    batch = {"caption": [PROMPT], "shown": {"reference": [references_of(case)]}}
    own, null = text_of(recipe, batch), text_of(recipe, batch, captions=[""])
    masked = own.mask is not None
    pipeline = stock_pipeline(Path(folder), **case.components)
    given = texts_of(case, pipeline)
    texts = [text for text in given if not is_of(text, real_tokens(own), masked=masked)]
    if not texts:
        known = recipes()[type(pipeline).__name__].call_parameters()
        with_guider = hasattr(pipeline, "guider")  # which decides about guidance itself
        assert "negative_prompt" not in known or "guidance_scale" in known or with_guider
        pytest.skip("the pipeline calls its model with the prompt alone")
    assert any(is_of(text, real_tokens(null), masked=masked) for text in texts)


@pytest.mark.parametrize("batching", ["bucket", "pack"])
@torch.no_grad()
def test_the_null_text_of_latte_has_as_many_tokens_as_the_caption(
    batching: str, prepared: PreparedDataset, pipeline_dirs, tmp_path: Path
) -> None:
    case, folder = RECIPES["latte"], str(pipeline_dirs["latte"])
    recipe = recipe_of(folder).load(folder)
    recipe.transformer.eval()
    objective, batch = recipe.objective(**OPTIONS), batch_of(case, (), stacked=batching == "bucket")
    data = replace(first(prepared, len(batch["caption"])), open_table=open_table(recipe.spec))
    keyed = cached(data, recipe, tmp_path / "cache", batching="pack")
    entries = collator_of(keyed)(list(keyed.dataset))
    texts = {name: entries[name] for name in ("caption", "text_values", "text_mask")}
    batch["caption"] = texts["caption"]
    encode = recipe.pipeline.encode_prompt

    def encode_negative(prompt: str, **_: object) -> tuple[torch.Tensor, None]:
        _, negative = encode(prompt, do_classifier_free_guidance=True, negative_prompt="")
        return negative, None

    recipe.pipeline.encode_prompt = encode_negative
    by_hand = losses_by_hand(case, recipe, objective, batch)
    options = {
        "recipe": recipe,
        "objective": objective,
        "caption_dropout": 1.0,
        "texts": {"": TextEmbeddings.of_batch(collator_of(keyed).empty_text())},
    }
    step: Step = BucketStep(**options)
    if batching == "pack":
        step = PackStep(**options, packing=enable_packing(recipe.transformer, strip_length=8))
    for source in (batch, {**batch, **texts}):
        losses = step(recipe.transformer, source, epoch=1).values.tolist()
        assert losses == pytest.approx(by_hand, abs=case.tolerance, rel=case.tolerance)


def test_a_cache_with_the_empty_caption_alone_is_refused(pipeline_dirs, prepared, tmp_path: Path) -> None:
    recipe = recipe_of(str(pipeline_dirs["latte"])).load(str(pipeline_dirs["latte"]))
    rows = first(prepared, 2).dataset
    rows = rows.remove_columns("caption").add_column("caption", ["", "red"])
    data = replace(prepared, dataset=rows, open_table=open_table(recipe.spec))
    keyed = cached(data, recipe, tmp_path / "cache", batching="pack")
    options = {"batching": "pack", "max_tokens": 10_000, "caption_dropout": 0.5}

    def check(cache: CacheInfo) -> None:
        folder = tmp_path / cache.empty_text_key
        replace(keyed, cache=cache).save(folder)
        config = in_process(pipeline_dirs["latte"], folder, tmp_path / "run", **options)
        check_cached(recipe, make_data(config, recipe.spec, TINY_WAN))

    check(keyed.cache)
    with pytest.raises(BucketingError, match=r"the cache holds the empty caption alone; run hf_bucketing cache"):
        check(replace(keyed.cache, empty_text_key=keyed.dataset["text_key"][0]))
