"""Recipes of models that are shown more than a caption: what they take, and how they render with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_bucketing import BucketingError, Size
from hf_bucketing.batching import way_of
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.batching.run_data import LargestStep
from hf_bucketing.caching.fingerprints import latents_fingerprint
from hf_bucketing.configuration import BatchConfig
from hf_bucketing.media import MediaSource, probe, write_video
from hf_bucketing.models.families.wan import VACE_CONTROL
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.loss_mask import LOSS_MASK
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.training.estimate import _random_batch
from tests.conftest import run_script_here
from tests.models.recipe_cases import conditions_of

RENDER = {"num_inference_steps": 1, "max_sequence_length": 64}
SIZE = Size(5, 32, 48)


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Callable[[str], str]:
    """Return the folder of a tiny pipeline."""
    return lambda name: str(tiny_folder(name))


@cache
def load(folder: str) -> Recipe:
    return recipe_of(folder).load(folder, max_sequence_length=64)


def test_vace_keeps_the_sample_where_a_mask_is_black_and_counts_where_it_is_white(folder) -> None:
    recipe, pixels = load(folder("wan-vace")), torch.rand(1, 3, 5, 32, 48) * 2 - 1
    mask = torch.zeros(1, 5, 32, 48)
    mask[:, :, :, 16:] = 1
    media = recipe.encode_media(pixels, {"mask": [mask]})
    grey = pixels.clone()
    grey[..., 16:] = 0
    stays, generated = media[VACE_CONTROL][0][:4], media[VACE_CONTROL][0][4:8]
    assert torch.allclose(stays, recipe.encode_latents(grey)[0], atol=1e-6)
    assert torch.allclose(generated, recipe.encode_latents(torch.zeros_like(pixels))[0], atol=1e-6)
    assert media[VACE_CONTROL][0][8:, :, :, :2].eq(0).all()
    assert media[VACE_CONTROL][0][8:, :, :, 2:].eq(1).all()
    assert media[LOSS_MASK][0][0, 0, 0].tolist() == [0, 0, 1, 1, 1, 1]


def test_caches_of_vace_are_not_those_of_other_pipelines_with_its_vae(folder) -> None:
    vace, wan = load(folder("wan-vace")), load(folder("wan"))
    wan.pipeline.vae.load_state_dict(vace.pipeline.vae.state_dict())
    names = ("latents_mean", "latents_std")
    wan.pipeline.vae.register_to_config(**{name: vace.pipeline.vae.config[name] for name in names})
    assert latents_fingerprint(vace) != latents_fingerprint(wan)


def test_a_reference_is_a_latent_frame_in_front_that_does_not_count(folder) -> None:
    recipe, pixels = load(folder("wan-vace")), torch.rand(2, 3, 5, 32, 48) * 2 - 1
    references = [torch.rand(3, 1, 16, 48) * 2 - 1, torch.rand(3, 1, 64, 16) * 2 - 1]
    shown = {"reference": [(reference,) for reference in references]}
    alone, media = recipe.encode_media(pixels), recipe.encode_media(pixels, shown)
    assert media["latents"].shape == (2, 4, 3, 4, 6)
    assert media["latents"][:, :, 1:].equal(alone["latents"])
    assert media[VACE_CONTROL][:, :, 1:].equal(alone[VACE_CONTROL])
    assert media[VACE_CONTROL][:, :4, 0].equal(media["latents"][:, :, 0])
    assert media[VACE_CONTROL][:, 4:, 0].eq(0).all()
    assert media[LOSS_MASK].mean((0, 1, 3, 4)).tolist() == [0, 1, 1]
    canvas = torch.ones(3, 1, 32, 48)
    canvas[:, :, 8:24] = references[0]
    expected = recipe.encode_latents(canvas[None])[0]
    assert torch.allclose(media["latents"][0, :, :1], expected, atol=0.05), "8 bits of colour"
    both = recipe.encode_media(pixels, {"reference": [tuple(references)] * 2})
    assert both["latents"][0, :, 1:].equal(media["latents"][0])
    assert both["latents"][1, :, 0].equal(media["latents"][1, :, 0])
    assert both[LOSS_MASK].mean((0, 1, 3, 4)).tolist() == [0, 0, 1, 1]
    without = recipe.encode_media(pixels, {"reference": [(), ()]})
    assert without.keys() == both.keys()
    assert all(without[name].equal(values) for name, values in alone.items())
    assert without[LOSS_MASK].eq(1).all()


def test_vace_renders_with_a_control_as_it_is_trained(folder) -> None:
    recipe, calls = load(folder("wan-vace")), []
    hook = recipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    levels = np.random.default_rng(0).integers(0, 256, (5, 32, 48, 3), dtype=np.uint8)
    video = [Image.fromarray(frame) for frame in levels]
    recipe.render("red", SIZE, video=video, guidance_scale=1.0, **RENDER)
    hook.remove()
    control = torch.from_numpy(levels).permute(3, 0, 1, 2) / 127.5 - 1
    trained = recipe.encode_media(torch.zeros(1, 3, 5, 32, 48), {"control": [control]})[VACE_CONTROL]
    assert torch.allclose(calls[0]["control_hidden_states"], trained, atol=1e-5)


@pytest.mark.parametrize(
    ("tiny", "names", "message"),
    [
        ("wan-i2v", {"last_frame"}, "begins with an image and ends with none"),
        ("wan-i2v", {"control"}, "is not shown .control"),
        ("flux-control", set(), "must be shown"),
    ],
)
def test_a_recipe_refuses_conditions_that_its_model_does_not_take(tiny: str, names: set[str], message, folder) -> None:
    recipe = recipe_of(folder(tiny)).load(folder(tiny), loading=Loading(parts=()))
    with pytest.raises(BucketingError, match=message):
        recipe.check_conditions(names)


def test_a_model_of_two_frames_takes_both(folder) -> None:
    recipe = recipe_of(folder("wan-flf2v")).load(folder("wan-flf2v"), loading=Loading(parts=()))
    recipe.check_conditions({"first_frame", "last_frame", "mask"})


@pytest.mark.parametrize("tiny", ["flux-control", "wan-vace"])
def test_a_step_that_is_tried_out_has_conditions(tiny: str, folder) -> None:
    recipe = load(folder(tiny))
    names = ("control", "mask", *(["reference"] if tiny == "wan-vace" else []))
    shape = {"way": way_of(BatchConfig()), "spec": recipe.spec, "conditions": names}
    data: Any = SimpleNamespace(text_tokens=0, audio=None, references=None, **shape)
    largest = LargestStep([Size(1, 32, 48)] * 2, 0, conditions_of([Size(1, 32, 48)] * 2))
    batch = _random_batch(largest, recipe, torch.device("cpu"), data=data)
    media = media_of(recipe, batch)
    assert len(media["latents"]) == len(media[LOSS_MASK]) == 2
    assert {*recipe.blank_conditions(media["latents"][0])} <= {*media}


def test_a_rendered_sample_has_an_image_as_its_control(folder) -> None:
    recipe = load(folder("flux-control"))
    images = [Image.new("RGB", (48, 32), color) for color in ("white", "black")]
    generators = [torch.Generator().manual_seed(0) for _ in images]
    white, black = (
        recipe.render("x", Size(1, 32, 48), image=image, generator=generator, **RENDER)
        for image, generator in zip(images, generators, strict=True)
    )
    assert white.shape == (1, 32, 48, 3)
    assert np.abs(white - black).max() > 1e-3


@pytest.mark.slow
def test_the_script_samples_with_a_control_and_refuses_what_does_not_fit(folder, tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (9, 64, 96, 3), dtype=np.uint8)
    write_video(tmp_path / "control.mp4", levels, fps=8)
    image = tmp_path / "image.png"
    Image.fromarray(levels[0]).save(image)
    common = ("--height", 32, "--width", 48, "--num_inference_steps", 1, "--max_sequence_length", 64)
    clip, picture = tmp_path / "clip.mp4", tmp_path / "one.png"
    shown = ("--control", tmp_path / "control.mp4", "--mask", image, "--reference", image)
    run_script_here("sample_video.py", folder("wan-vace"), "--output", clip, "--num_frames", 5, *shown, *common)
    assert probe(MediaSource.from_cell(str(clip))).num_frames == 5
    run_script_here("sample_video.py", folder("flux-control"), "--output", picture, "--control", image, *common)
    assert Image.open(picture).size == (48, 32)
    for name, flags, message in (
        ("flux-control", (), "give --control"),
        ("wan", ("--control", image), "Omit --control"),
    ):
        failed = run_script_here("sample_video.py", folder(name), "--output", picture, *flags, *common, check=False)
        assert message in failed.stderr
