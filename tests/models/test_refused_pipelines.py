"""Pipelines of families that pack, and that cannot be trained: the reason is said, and holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of, refused_pipelines
from tests.models.cases import Samples
from tests.models.families import CASES


@pytest.mark.parametrize("name", sorted(refused_pipelines()))
def test_a_pipeline_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(BucketingError, match=f"{name}, which cannot be trained: {refused_pipelines()[name][:40]}"):
        recipe_of(str(tmp_path))


def test_a_pipeline_without_a_recipe_is_refused_with_what_its_transformer_does(tmp_path: Path) -> None:
    index = {"_class_name": "SanaPipeline", "transformer": ["diffusers", "SanaTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        BucketingError, match=r"is a SanaPipeline; .* Its SanaTransformer2DModel .* attention is linear"
    ):
        recipe_of(str(tmp_path))


def test_small_images_of_glm_image_have_more_tokens_than_half_their_patches() -> None:
    """A token of GLM-Image stands for 2×2 patches of 16 pixels; if this changes, it can have a recipe."""
    processing = pytest.importorskip("transformers.models.glm_image.image_processing_pil_glm_image")
    for (height, width), fits in {(1024, 768): True, (512, 512): True, (256, 320): False}.items():
        sides = processing.smart_resize(height, width, factor=16, min_pixels=512**2, max_pixels=2048**2)
        assert (sides == (height // 2, width // 2)) is fits


@torch.no_grad()
def test_what_anyflow_predicts_depends_on_the_level_to_which_a_step_leads() -> None:
    case = CASES["anyflow"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case)
    latent, text, level = samples.latents[0], samples.text[0], samples.timesteps[0]
    here, next_one = (case.alone(model, latent, level, text, r_timestep=level * share) for share in (1.0, 0.5))
    assert not torch.allclose(here, next_one)
