"""Wan-Animate: faces and poses of a pack's samples, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from hf_bucketing import PackingError, Size
from hf_bucketing.batching import way_of
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.batching.run_data import LargestStep
from hf_bucketing.configuration import BatchConfig
from hf_bucketing.models import enable_packing
from hf_bucketing.models.families.wan_animate import KNOWN
from hf_bucketing.models.loss_mask import LOSS_MASK
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import SHOWN_FRAMES
from hf_bucketing.packing import packed_forward
from hf_bucketing.training.estimate import _random_batch
from tests.models.cases import CASES, Samples, largest_difference, outputs_with_nan
from tests.models.families.wan_animate import CASES as ANIMATE, SIDE
from tests.models.recipe_cases import conditions_of, draw_conditions

CASE = ANIMATE["wan-animate"]
FACE, POSE, IMAGE = "face_pixel_values", "pose_hidden_states", "encoder_hidden_states_image"


@pytest.mark.parametrize("name", [FACE, POSE, IMAGE])
def test_what_a_sample_is_shown_leaks_into_no_other_sample(name: str) -> None:
    for victim, before, after in outputs_with_nan(CASE, name, (0, 3, 5)):
        for sample, (output, other) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(output, other) == (sample != victim)
            if sample == victim and name == FACE:  # the tokens of the character see it in attention alone
                assert other.isnan().all()


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", pytest.param("flex", marks=pytest.mark.every)])
def test_other_backends_keep_the_faces_of_frames_apart(backend: str) -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    batch = samples.pack(enable_packing(model, strip_length=4, backend=backend))
    assert largest_difference(CASE.expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


def test_faces_of_another_length_and_samples_without_a_frame_behind_the_character_are_refused() -> None:
    model, samples = CASE.model(), Samples(case=CASE, order=(0, 1))
    packing = enable_packing(model, strip_length=4)
    samples.conditioning[FACE][0] = torch.zeros(3, 4, SIDE, SIDE)
    with pytest.raises(PackingError, match="have 5 frames, but its samples need 6"):
        packed_forward(model, samples.pack(packing))
    samples = Samples(case=CASE, order=(0, 1))
    samples.latents[1], samples.conditioning[POSE][1] = samples.latents[1][:, :1], samples.conditioning[POSE][1][:, :1]
    with pytest.raises(PackingError, match="a sample has a latent frame of its character"):
        packed_forward(model, samples.pack(packing))


def test_a_strip_leaves_a_place_for_the_frame_without_a_token() -> None:
    with pytest.raises(PackingError, match="strip_length=65 exceeds the 64 positions"):
        enable_packing(CASE.model(), strip_length=65)


@pytest.mark.parametrize("case", [CASE, CASES["wan image"]], ids=["wan-animate", "wan image"])
def test_image_tokens_without_layers_of_their_own_are_refused(case) -> None:
    with pytest.raises(PackingError, match="has `image_dim`, but no `added_kv_proj_dim`"):
        enable_packing(case.model(added_kv_proj_dim=None))


@pytest.fixture(scope="module")
def recipe(tiny_folder: Callable[[str], Path]) -> Recipe:
    folder = str(tiny_folder("wan-animate"))
    return recipe_of(folder).load(folder)


def media_and_conditions(count: int, frames: int) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Draw the pixels of samples of 32×48 pixels, and what they are shown but for a mask."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        draw_conditions(("control", "face", "reference"), (frames, 32, 48), generator, references=((1, 20, 50),))
        for _ in range(count)
    ]
    pixels = torch.rand(count, 3, frames, 32, 48, generator=generator) * 2 - 1
    return pixels, {name: [sample[name] for sample in drawn] for name in drawn[0]}


def test_each_sample_of_a_stack_trains_the_mode_that_its_mask_says(recipe: Recipe) -> None:
    pixels, shown = media_and_conditions(2, 5)
    half = torch.ones(1, 5, 32, 48)
    half[..., :24] = 0
    both = recipe.encode_media(pixels, {**shown, "mask": [half, torch.ones_like(half)]})
    animated = recipe.encode_media(pixels, shown)
    assert torch.equal(both[KNOWN][1], animated[KNOWN][1]), "white throughout is no mask"
    assert torch.equal(both[KNOWN][:, :, 0], animated[KNOWN][:, :, 0]), "the character"
    assert both[KNOWN][0, :4, 1:, :, :3].eq(1).all()
    assert both[KNOWN][0, :4, 1:, :, 3:].eq(0).all()
    black = pixels.clone()
    black[..., 24:] = -1
    assert torch.allclose(both[KNOWN][0, 4:, 1:], recipe.encode_latents(black)[0], atol=1e-6)
    assert animated[LOSS_MASK][:, :, 0].eq(0).all()
    assert animated[LOSS_MASK][:, :, 1:].eq(1).all()


@pytest.mark.parametrize("mode", ["animate", "replace"])
def test_shown_frames_are_those_of_the_segment_before(recipe: Recipe, mode: str) -> None:
    pixels, shown = media_and_conditions(1, 9)
    mask = torch.ones(1, 9, 32, 48)
    mask[..., :24] = 0
    shown |= {"mask": [mask]} if mode == "replace" else {}
    frames = torch.arange(9) < 5
    media = recipe.encode_media(pixels, {**shown, SHOWN_FRAMES: [frames]})
    expected = recipe.pipeline.prepare_prev_segment_cond_latents(
        pixels[:, :, :5],
        background_video=torch.where(mask > 0.5, -1.0, pixels) if mode == "replace" else None,
        mask_video=mask[None] if mode == "replace" else None,
        segment_frame_length=9,
        start_frame=9,
        height=32,
        width=48,
        prev_segment_cond_frames=5,
        task=mode,
        device=torch.device("cpu"),
    )
    assert torch.allclose(media[KNOWN][:, :, 1:], expected, atol=1e-6)


def test_an_image_has_a_face_of_one_frame_and_trains(recipe: Recipe) -> None:
    media = recipe.encode_media(*media_and_conditions(2, 1))
    assert (media["latents"].shape[2], media[FACE].shape[2]) == (2, 1)
    assert {name: values[0].shape for name, values in media.items() if name not in (IMAGE, "latents", LOSS_MASK)} == {
        name: values.shape
        for name, values in recipe.blank_conditions(media["latents"][0]).items()
        if name != IMAGE  # the tiny encoder makes fewer tokens
    }


def test_the_pipeline_is_given_the_background_without_what_the_mask_replaces(recipe: Recipe) -> None:
    red, halves = Image.new("RGB", (4, 2), "red"), Image.new("L", (4, 2))
    halves.paste(255, (2, 0, 4, 2))
    arguments = recipe.shown_arguments({"mask": [halves], "background": [red]})
    assert arguments["mode"] == "replace"
    assert [arguments["background_video"][0].getpixel((x, 0)) for x in (0, 3)] == [(255, 0, 0), (0, 0, 0)]


def test_a_step_that_is_tried_out_has_faces(recipe: Recipe) -> None:
    size, names = Size(1, 32, 48), ("control", "face", "mask", "reference")
    shape = {"way": way_of(BatchConfig()), "spec": recipe.spec, "conditions": names}
    data: Any = SimpleNamespace(text_tokens=0, audio=None, references=None, **shape)
    largest = LargestStep([size] * 2, 0, conditions_of([size] * 2))
    batch = _random_batch(largest, recipe, torch.device("cpu"), data=data)
    media = media_of(recipe, batch)
    assert {*recipe.blank_conditions(media["latents"][0])} <= {*media}
