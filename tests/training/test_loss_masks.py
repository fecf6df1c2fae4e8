"""Masks of a data set weigh the loss; conditions that a model is not shown are refused before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError, TokenDrop
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import loss_weights, media_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.caching import CacheConfig, cache_dataset
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.condition import Condition
from hf_bucketing.conditions.names import MASK
from hf_bucketing.media import write_image, write_video
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.loss_mask import LOSS_MASK, latent_mask
from hf_bucketing.models.samples import ModelInputs, Samples
from hf_bucketing.training.loop import Trainer, train
from tests.caching.test_caching import load_recipe
from tests.conftest import run_script_here
from tests.training.test_steps import OPTIONS, make_batch
from tests.training.training_cases import in_process, run

PACK = {"batching": "pack", "max_tokens": 200, "strip_length": 16}


def masks_of(count: int, frames: int) -> list[torch.Tensor]:
    """Return grey masks of which a half, in space, is black."""
    masks = torch.rand(count, 1, frames, 32, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks[..., :16, :] = 0
    return list(masks)


def on_latents(mask: torch.Tensor, frames: int) -> torch.Tensor:
    """Average a mask `(1, F, H, W)` over 8 × 8 pixels and over the frames of each of some latent frames."""
    squares = mask.unfold(2, 8, 8).unfold(3, 8, 8).mean((-2, -1))
    parts = [squares[:, :1], *squares[:, 1:].split((mask.shape[1] - 1) // (frames - 1) if frames > 1 else 1, 1)]
    return torch.cat([part.mean(1, keepdim=True) for part in parts if part.numel()], 1)


@pytest.mark.parametrize(("family", "frames"), [("wan", 9), pytest.param("latte", 16, marks=pytest.mark.slow)])
def test_a_masked_loss_is_the_mean_over_what_is_white(family: str, frames: int, pipeline_dirs) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    for name in ("transformer", "text_encoder", "vae"):
        getattr(recipe.pipeline, name).double()
    step = BucketStep(recipe=recipe, objective=recipe.objective(**OPTIONS))
    batch, masks = make_batch(frames, count=2), masks_of(2, frames)
    media = media_of(recipe, {**batch, "shown": {"mask": masks}})
    latents, weights = media["latents"], media[LOSS_MASK]
    for mask, weight in zip(masks, weights, strict=True):
        assert torch.allclose(weight, on_latents(mask, latents[0].shape[1]), rtol=1e-6)

    def losses(**conditions: list[torch.Tensor]) -> torch.Tensor:
        return step(recipe.transformer, {**batch, "latents": latents, "conditions": conditions}, epoch=2).values

    with torch.no_grad():
        whole, masked = losses(), losses(loss_mask=weights)
        assert torch.allclose(losses(loss_mask=[torch.ones_like(weight) for weight in weights]), whole, rtol=1e-12)
        assert losses(loss_mask=[torch.zeros_like(weight) for weight in weights]).tolist() == [0, 0]
        noised = step.objective(latents, indices=batch["index"], epoch=2)
        text = recipe.encode_text(batch["caption"]).to(torch.float64)
        samples = Samples(noised=noised, text=text, fps=torch.tensor(batch["fps"]))
        prediction = recipe.predict(recipe.transformer, samples, recipe.model_inputs(samples))
    assert not torch.allclose(masked, whole, rtol=1e-3)
    if family == "latte":  # its loss has a second part, which is weighted likewise
        assert torch.allclose(step.objective.losses(prediction, noised, weights=weights), masked, rtol=1e-6)
        return
    for row, value in enumerate(masked):
        error = (prediction[row] - noised.targets[row]).square()
        each = weights[row].expand_as(error)
        assert float((error * each).sum() / each.sum()) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize(("family", "frames"), [("wan", 5), pytest.param("latte", 16, marks=pytest.mark.slow)])
def test_packs_have_the_masked_losses_of_stacks(family: str, frames: int, pipeline_dirs) -> None:
    recipe = load_recipe(pipeline_dirs[family])
    for name in ("transformer", "text_encoder", "vae"):
        getattr(recipe.pipeline, name).double()
    common = {"recipe": recipe, "objective": recipe.objective(**OPTIONS)}
    batch = {**make_batch(frames, count=2), "shown": {"mask": masks_of(2, frames)}}
    with torch.no_grad():
        expected = BucketStep(**common)(recipe.transformer, batch, epoch=2).values
        packing = enable_packing(recipe.transformer, strip_length=8)
        pack = {**batch, "pixel_values": list(batch["pixel_values"])}
        assert torch.allclose(
            PackStep(**common, packing=packing)(recipe.transformer, pack, epoch=2).values, expected, rtol=1e-6
        )
        if family == "wan":
            recipe.transformer.train()
            drop = PackStep(**common, packing=packing, token_drop=TokenDrop(rate=0.5))
            black = {**pack, "shown": {"mask": [torch.zeros_like(mask) for mask in batch["shown"]["mask"]]}}
            assert drop(recipe.transformer, black, epoch=2).values.tolist() == [0, 0]
            assert drop(recipe.transformer, pack, epoch=2).values.isfinite().all()
    disable_packing(recipe.transformer)


def test_a_mask_multiplies_the_weights_of_the_model() -> None:
    mask, clean = torch.rand(1, 3, 4, 4), torch.ones(1, 3, 4, 4)
    clean[:, 0] = 0
    inputs = ModelInputs(latents=[clean], timesteps=torch.ones(1), weights=[clean])
    samples = type("Samples", (), {"conditions": {LOSS_MASK: [mask]}})()
    assert torch.equal(loss_weights(inputs, samples)[0], mask * clean)
    assert loss_weights(replace(inputs, weights=None), samples) == [mask]
    samples.conditions = {}
    assert loss_weights(inputs, samples) == [clean]
    assert loss_weights(replace(inputs, weights=None), samples) is None


def test_a_mask_on_latents_follows_the_groups_of_frames() -> None:
    mask = torch.zeros(1, 9, 4, 4)
    mask[:, 0], mask[:, 5, :2, :2] = 1, 1
    assert latent_mask(mask, (3, 2, 2)).flatten().tolist() == [1] * 4 + [0] * 4 + [0.25, 0, 0, 0]
    assert latent_mask(mask, (4, 2, 2), repeats=1)[:, :2].eq(1).all()
    with pytest.raises(BucketingError, match="9 frames does not fit latents of 4"):
        latent_mask(mask, (4, 2, 2))


@torch.no_grad()
def test_a_mask_follows_the_chunks_that_a_vae_encodes(tiny_folder: Callable[[str], Path]) -> None:
    recipe = load_recipe(tiny_folder("minimax-h3"))
    mask = torch.zeros(1, 22, 32, 32)
    mask[:, 17] = 1  # the first frame of the second chunk of 17 frames
    mask[:, 18] = 1  # one of the four frames of its second latent
    encoded = recipe.encode_media(torch.zeros(1, 3, 22, 32, 32), {MASK: [mask]})
    weights = encoded[LOSS_MASK][0][0, :, 0, 0]
    assert weights.tolist() == [0, 0, 0, 0, 0, 1, 0.25]
    assert encoded["latents"].shape[2] == 7


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path) -> dict[str, Path]:
    """Videos and an image with masks, one row without; prepared with the masks, and with a control too."""
    folder = tmp_path_factory.mktemp("masked")
    rng = np.random.default_rng(0)
    rows = []
    for index in range(5):
        video = index < 4
        name, mask = (f"{index}.mp4", f"{index} mask.mp4") if video else ("4.png", "4 mask.png")
        frames = rng.integers(0, 255, (9, 64, 96, 3), dtype=np.uint8)
        black = np.zeros((9, 64, 96, 3), np.uint8)
        black[:, 16:48, 32:80] = 255
        if video:
            write_video(folder / name, frames, fps=8)
            write_video(folder / mask, black, fps=8)
        else:
            write_image(folder / name, frames[0])
            write_image(folder / mask, black[0])
        rows.append({"file_name": name, "mask": None if index == 3 else mask, "control": name, "caption": "noise"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {}
    for name, flags in {"mask": (), "control": ("--control_column", "control")}.items():
        made[name] = folder / f"prepared with {name}"
        run_script_here(
            "prepare_dataset.py",
            *flags,
            dataset=folder / "rows.jsonl",
            output_dir=made[name],
            pretrained_model_name_or_path=pipeline_dir,
            target_fps=8,
            buckets="64,96",
            bucket_frames="1,9",
            mask_column="mask",
        )
    return made


@pytest.mark.slow
def test_training_on_masks_from_files_and_from_a_cache(masked, pipeline_dir: Path, tmp_path: Path) -> None:
    losses = {}
    for batching, options in (("bucket", {"remainder": "repeat"}), ("pack", PACK)):
        settings = {**options, "max_train_steps": 4}
        files = in_process(pipeline_dir, masked["mask"], tmp_path / batching, random_crop=False, **settings)
        losses[batching] = run(files)
        run_script_here(
            "cache_latents.py",
            dataset_dir=masked["mask"],
            pretrained_model_name_or_path=pipeline_dir,
            cache_dir=tmp_path / "cache",
            output_dir=tmp_path / f"{batching} cached",
            batching=batching,
            max_sequence_length=32,
        )
        cached = in_process(pipeline_dir, tmp_path / f"{batching} cached", tmp_path / f"{batching} out", **settings)
        assert run(cached) == pytest.approx(losses[batching], rel=1e-4)
        data = PreparedDataset.load(masked["mask"])
        unmasked = tmp_path / f"{batching} unmasked"
        replace(data, conditions={}).save(unmasked)
        plain = run(in_process(pipeline_dir, unmasked, tmp_path / f"{batching} plain", random_crop=False, **settings))
        assert plain[0] != pytest.approx(losses[batching][0], rel=1e-4)


@pytest.mark.every
def test_what_masks_leave_out_is_shown_from_files_as_from_a_cache(masked, tiny_folder, tmp_path: Path) -> None:
    pipeline, data = tiny_folder("wan-2.2-ti2v"), masked["mask"].parent / "rows.jsonl"
    sizes = {"target_fps": 8, "buckets": "64,96", "bucket_frames": "1,9", "mask_column": "mask"}
    common = {"pretrained_model_name_or_path": pipeline, "output_dir": tmp_path / "prepared"}
    run_script_here("prepare_dataset.py", dataset=data, **common, **sizes)
    common |= {"output_dir": tmp_path / "cached", "cache_dir": tmp_path / "cache", "batching": "pack"}
    run_script_here("cache_latents.py", dataset_dir=tmp_path / "prepared", **common, max_sequence_length=32)
    settings = {**PACK, "condition": "mask:0.5,prefix+mask:0.5", "max_train_steps": 4}
    files = run(in_process(pipeline, tmp_path / "prepared", tmp_path / "files", random_crop=False, **settings))
    cached = run(in_process(pipeline, tmp_path / "cached", tmp_path / "out", **settings))
    assert cached == pytest.approx(files, rel=1e-4)
    settings["condition"] = "none"
    assert run(in_process(pipeline, tmp_path / "cached", tmp_path / "none", **settings)) != pytest.approx(
        cached, rel=1e-3
    )
    found = Trainer(in_process(pipeline, tmp_path / "cached", tmp_path / "auto", **{
        **settings, "condition": "mask", "max_tokens": "auto", "max_train_steps": 1,
    }))  # fmt: skip
    assert found.config.batches.max_tokens > 0


def test_a_condition_that_the_model_is_not_shown_is_refused(masked, pipeline_dir: Path, tmp_path: Path) -> None:
    refusal = r"A WanPipeline is not shown `control`, which the data set has; .* it takes `mask`"
    for options in ({}, {"dry_run": True}):
        with pytest.raises(BucketingError, match=refusal):
            train(in_process(pipeline_dir, masked["control"], tmp_path / "out", **options))
    prepared, recipe = PreparedDataset.load(masked["control"]), load_recipe(pipeline_dir)
    with pytest.raises(BucketingError, match=refusal):
        cache_dataset(prepared, recipe, CacheConfig(folder=str(tmp_path / "cache")))
    control = Condition(name="control", enters="channels", least=1)
    needing = type("NeedsControl", (type(recipe),), {"conditions": (control,)})
    check = needing.check_conditions
    check(recipe_like(needing), ["control", "mask"])
    with pytest.raises(BucketingError, match=r"must be shown `control`, which the data set lacks; .*--control_column"):
        check(recipe_like(needing), ["mask"])


def recipe_like(kind: type):
    """Make a recipe without a pipeline."""
    return object.__new__(kind)


@pytest.mark.slow
def test_a_cache_without_masks_is_refused_for_a_data_set_with_them(masked, pipeline_dir: Path, tmp_path: Path) -> None:
    data, recipe = PreparedDataset.load(masked["mask"]), load_recipe(pipeline_dir)
    plain, _ = cache_dataset(replace(data, conditions={}), recipe, CacheConfig(folder=str(tmp_path / "cache")))
    replace(plain, conditions=data.conditions).save(tmp_path / "mixed")
    with pytest.raises(BucketingError, match="is also shown loss_mask, which the cache lacks"):
        train(in_process(pipeline_dir, tmp_path / "mixed", tmp_path / "out", max_sequence_length=None))
