"""Bucketed and packed steps on the same samples: the same losses and gradients, and the text they get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import text_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.texts import TextEmbeddings
from tests.caching.test_caching import cached, collator_of, load_recipe, prepared

__all__ = ["prepared"]

OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


def make_batch(frames: int, *, count: int = 3) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.rand(count, 3, frames, 32, 64, generator=generator) * 2 - 1,
        "caption": ["a red square", "blue", ""][:count],
        "index": [4, 8, 6][:count],
        "fps": [8.0] * count,
    }


def losses_and_gradients(step, batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    transformer = step.recipe.transformer
    losses = step(transformer, batch, epoch=2)
    gradients = torch.autograd.grad(losses.values.mean(), list(transformer.parameters()), materialize_grads=True,
                                    allow_unused=True)  # fmt: skip
    return losses.values.detach(), list(gradients)


@pytest.mark.parametrize(("family", "frames"), [("wan", 5), ("ltx", 5), ("latte", 16), ("latte", 1), ("wan", 1)])
def test_packed_and_bucketed_training_are_the_same(family: str, frames: int, pipeline_dirs: dict[str, Path]) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    for name in ("transformer", "text_encoder", "vae"):  # in float32, some gradients are mostly rounding
        getattr(recipe.pipeline, name).double()
    objective, batch = recipe.objective(**OPTIONS), make_batch(frames)
    values, gradients = losses_and_gradients(BucketStep(recipe=recipe, objective=objective), batch)
    packing = enable_packing(recipe.transformer, strip_length=8)
    step = PackStep(recipe=recipe, objective=objective, packing=packing)
    packed_values, packed = losses_and_gradients(step, {**batch, "pixel_values": list(batch["pixel_values"])})
    assert torch.allclose(packed_values, values, atol=1e-5, rtol=1e-5)
    compared = 0
    for gradient, packed_gradient in zip(gradients, packed, strict=True):
        if gradient.norm() > 1e-6:
            compared += 1
            assert float((gradient - packed_gradient).norm() / gradient.norm()) <= 1e-6
    assert compared > 10


def test_dropped_captions_are_drawn_from_the_samples_own_seed(pipeline_dirs) -> None:
    recipe = load_recipe(pipeline_dirs["ltx"])
    objective, batch = recipe.objective(**OPTIONS), make_batch(1)

    def values(*, epoch: int = 0, **options) -> torch.Tensor:
        step = BucketStep(recipe=recipe, objective=objective, **options)
        with torch.no_grad():
            return step(recipe.transformer, batch, epoch=epoch).values

    plain, empty = values(), values(caption_dropout=1.0)
    assert torch.equal(plain[2], empty[2]), "its caption is empty anyway"
    assert not torch.equal(plain[0], empty[0])
    drawn = [values(caption_dropout=0.5, seed=seed) for seed in range(8)]
    assert all(torch.equal(losses, values(caption_dropout=0.5, seed=0)) for losses in drawn[:1])
    dropped = [torch.isclose(losses, empty)[:2].tolist() for losses in drawn]
    assert 0 < sum(map(sum, dropped)) < 16
    assert any(first != second for first, second in dropped), "each sample draws for itself"
    in_epochs = {
        bool(torch.isclose(values(caption_dropout=0.5, epoch=epoch), values(caption_dropout=1.0, epoch=epoch))[0])
        for epoch in range(8)
    }
    assert in_epochs == {False, True}, "and anew in each epoch"


def test_a_pipeline_can_use_its_transformer_while_packing_is_off(pipeline_dirs) -> None:
    recipe = load_recipe(pipeline_dirs["wan"])
    packing = enable_packing(
        recipe.transformer, strip_length=8, backend="dense", positions="interpolate", base_size=(1, 3, 3)
    )
    step, batch = PackStep(recipe=recipe, objective=recipe.objective(**OPTIONS), packing=packing), make_batch(1)
    pack = {**batch, "pixel_values": list(batch["pixel_values"])}
    with torch.no_grad():
        before = step(recipe.transformer, pack, epoch=0)
        with step.unpacked():
            recipe.pipeline("red", height=32, width=32, num_frames=1, num_inference_steps=1, output_type="np")
        after = step(recipe.transformer, pack, epoch=0)
    assert torch.equal(before.values, after.values), "positions are stretched as before"
    assert {processor.backend for processor in recipe.transformer.attn_processors.values()} == {"dense"}
    assert 0 <= float(before.noise_levels.min()) <= float(before.noise_levels.max()) <= 1
    disable_packing(recipe.transformer)


@pytest.mark.cases(fast=("wan",), slow=("*",))
@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_captions_that_are_dropped_are_the_empty_one_of_the_cache(
    family: str, prepared, pipeline_dirs, tmp_path: Path
) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    keyed = cached(prepared, recipe, tmp_path / "cache", batching="pack")
    collator = collator_of(keyed)
    empty = collator.empty_text()
    text = TextEmbeddings.of_batch(empty)
    entries = collator([keyed.dataset[row] for row in (0, 6)])
    mixed = text_of(recipe, entries, captions=["", None], texts={"": text})
    expected = recipe.encode_text(["", entries["caption"][1]])
    assert (mixed.mask is None) == (expected.mask is None)
    if mixed.mask is None:
        assert torch.allclose(mixed.values, expected.values, atol=1e-6)
    else:
        real = expected.mask.bool()
        assert torch.equal(mixed.mask.bool(), real)
        assert torch.allclose(mixed.values[real], expected.values[real], atol=1e-6)
