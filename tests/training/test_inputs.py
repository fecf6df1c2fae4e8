"""Latents and texts of a step: from the cache where a batch has them, encoded where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bucketing.loaders import BucketCollator, PackCollator
from hf_bucketing.media import ViewRule
from hf_bucketing.models.recipe import TextEmbeddings
from hf_bucketing.training.steps import latents_of, text_of
from tests.caching.test_caching import cached, collator_of, load_recipe, prepared

__all__ = ["prepared"]


def test_inputs_of_a_step_come_from_whatever_the_collator_gave(prepared, pipeline_dir, tmp_path: Path) -> None:
    recipe = load_recipe(pipeline_dir)
    keyed = cached(prepared, recipe, tmp_path / "cache", batching="pack")
    options = {"column": prepared.column, "root": prepared.root, "views": ViewRule(random_crop=False)}
    rows = [prepared.dataset[row] for row in (0, 6)]
    packs = PackCollator(prepared.spec, **options)(rows)
    stack = BucketCollator(prepared.table, **options)(rows[:1])
    entries = collator_of(keyed)([keyed.dataset[row] for row in (0, 6)])
    for one, other in zip(latents_of(recipe, packs), latents_of(recipe, entries), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert torch.equal(torch.stack(latents_of(recipe, stack)), recipe.encode_latents(stack["pixel_values"]))
    options = {"dropped": [False, False], "empty": None}
    assert torch.allclose(*(text_of(recipe, batch, **options).values for batch in (packs, entries)), atol=1e-6)


@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_captions_that_are_dropped_are_the_empty_one_of_the_cache(
    family: str, prepared, pipeline_dirs, tmp_path: Path
) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    keyed = cached(prepared, recipe, tmp_path / "cache", batching="pack")
    collator = collator_of(keyed)
    empty = {name: values[None] for name, values in collator.empty_text().items()}
    text = TextEmbeddings(empty["text_values"], empty.get("text_mask"))
    entries = collator([keyed.dataset[row] for row in (0, 6)])
    mixed = text_of(recipe, entries, dropped=[True, False], empty=text)
    expected = recipe.encode_text(["", entries["caption"][1]])
    assert (mixed.mask is None) == (expected.mask is None)
    if mixed.mask is None:
        assert torch.allclose(mixed.values, expected.values, atol=1e-6)
    else:
        real = expected.mask.bool()
        assert torch.equal(mixed.mask.bool(), real)
        assert torch.allclose(mixed.values[real], expected.values[real], atol=1e-6)
