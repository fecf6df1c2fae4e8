"""What the suites of families and recipes do not reach of HunyuanVideo 1.5 and Mochi."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from hf_bucketing import PackingError, Size
from hf_bucketing.models import enable_packing
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from tests.models.cases import Samples, largest_difference, packed_outputs
from tests.models.families.hunyuan_video_15 import MIXED, RENDER, conditioning, make_model


@pytest.fixture
def load(tiny_folder: Callable[[str], Path]) -> Callable[[str], Recipe]:
    def load(tiny: str) -> Recipe:
        folder = str(tiny_folder(tiny))
        return recipe_of(folder).load(folder, max_sequence_length=48)

    return load


@pytest.mark.parametrize("image_tokens", [6, 0])
@torch.no_grad()
def test_samples_without_images_and_glyphs_attend_to_neither(image_tokens: int) -> None:
    def neither(draw, count: int) -> dict[str, torch.Tensor]:
        drawn = conditioning(draw, count)
        blank = {name: torch.zeros_like(drawn[name]) for name in ("image_embeds", "encoder_attention_mask_2")}
        return {**drawn, **blank, "image_embeds": blank["image_embeds"][:, :image_tokens]}

    case = replace(MIXED, conditioning=neither)
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    assert largest_difference(samples.alone(model), packed_outputs(model, samples)) <= 1e-11
    assert samples.pack(enable_packing(model)).layout.added_lengths == (0,) * 6


def test_the_vae_is_loaded_for_training_from_a_cache_too(load, tiny_folder) -> None:
    recipe = load("hunyuan-video-1.5")
    again = type(recipe).load(str(tiny_folder("hunyuan-video-1.5")), loading=Loading(parts=("trained",)))
    assert again.pipeline.text_encoder is None
    assert again.latent_channels == again.pipeline.num_channels_latents


def test_models_distilled_by_meanflow_are_refused() -> None:
    with pytest.raises(PackingError, match="use_meanflow=True"):
        enable_packing(make_model(use_meanflow=True))


def test_an_image_of_any_ratio_is_continued_at_the_given_size(load) -> None:
    recipe = load("hunyuan-video-1.5-image")
    pixels = torch.rand(2, 3, 5, 32, 48) * 2 - 1
    media = recipe.encode_media(pixels)
    blank = recipe.blank_conditions(media["latents"][0])
    assert {name: values.shape for name, values in blank.items()} == {
        name: media[name].shape[1:] for name in ("image_latents", "image_embeds")
    }
    size = Size(5, 48, 80)  # the pipeline itself takes the image's ratio and the area that the model was trained at
    image, processor = Image.new("RGB", (50, 50), "red"), recipe.pipeline.video_processor
    assert recipe.render("red", size, image=image, guidance_scale=1.0, **RENDER).shape == (5, 48, 80, 3)
    assert recipe.pipeline.guider.guidance_scale == 1.0
    assert processor.calculate_default_height_width(480, 848, 640) == (480, 848)


def test_mochi_zeroes_empty_captions_among_others_alone(load) -> None:
    recipe = load("mochi")
    captions = ["", "a red square", ""]
    together, alone = recipe.encode_text(captions), [recipe.encode_text([caption]) for caption in captions]
    assert together.mask.sum(1).tolist() == [0, 13, 0]
    assert together.values.equal(torch.cat([text.values for text in alone]))
    assert recipe.encode_text(captions[1:2]).values.abs().sum() > 0
