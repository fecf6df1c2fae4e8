"""What is particular to recipes of pipelines that make images."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from hf_bucketing import BucketingError, LatentSpec, Size
from hf_bucketing.caching.fingerprints import text_fingerprint
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.settings import PlanConfig
from tests.models.recipe_cases import samples_of

Load = Callable[[str], Recipe]


@pytest.fixture(scope="module")
def folder_of(tiny_folder: Callable[[str], Path]) -> Callable[[str], str]:
    """Return the folder of a tiny pipeline."""
    return lambda name: str(tiny_folder(name))


@pytest.fixture
def load(folder_of) -> Load:
    return lambda tiny: recipe_of(folder_of(tiny)).load(folder_of(tiny), max_sequence_length=32)


@pytest.mark.parametrize("tiny", ["flux", "sd3", "pixart-alpha", "flux2-klein"])
def test_the_spec_is_that_of_a_frame_with_blocks_of_two(tiny: str, folder_of) -> None:
    spec = recipe_of(folder_of(tiny)).read_spec(folder_of(tiny))
    assert spec == LatentSpec(temporal_stride=1, spatial_stride=8, patch=(1, 2, 2))


def test_flux_is_shifted_by_tokens_and_sd3_by_a_constant(load: Load) -> None:
    options = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}
    shift = load("flux").objective(**options).shift
    assert shift((1, 128, 64)) == pytest.approx(math.exp(calculate_shift(64 * 32)))
    assert load("sd3").objective(**options).shift == 3.0


def test_pixart_renders_the_size_that_is_asked_for_and_not_the_nearest_of_its_own(load: Load, monkeypatch) -> None:
    recipe, seen = load("pixart-sigma"), []
    recipe.pipeline.set_progress_bar_config(disable=True)
    recipe.transformer.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[2:]))
    images = recipe.render("red", Size(1, 64, 96), num_inference_steps=1, guidance_scale=1.0, max_sequence_length=32)
    assert images.shape == (1, 64, 96, 3)
    assert seen == [(8, 12)]


def test_only_the_third_text_encoder_of_sd3_may_be_absent(load: Load) -> None:
    recipe = load("sd3-without-t5")
    values, mask, others = recipe.encode_text(["red", "x"])
    assert (values.shape, mask, others["pooled_projections"].shape) == ((2, 77 + 32, 32), None, (2, 32))
    assert not values[:, 77:].any()
    assert recipe.text_tokens(32) == values.shape[1]
    recipe.pipeline.text_encoder_2 = None
    with pytest.raises(BucketingError, match="no text_encoder_2"):
        recipe.encode_text(["red"])


def test_sd3_without_t5_encodes_captions_also_where_the_transformer_is_not_loaded(load: Load, folder_of) -> None:
    source = folder_of("sd3-without-t5")
    loading = Loading(parts=("text_encoders",))
    encoder = recipe_of(source).load(source, max_sequence_length=32, loading=loading)
    assert torch.equal(
        encoder.encode_text(["red", "x"]).values, load("sd3-without-t5").encode_text(["red", "x"]).values
    )
    assert encoder.pipeline.transformer is None


def test_every_text_encoder_and_tokenizer_is_part_of_the_fingerprint(load: Load) -> None:
    recipe = load("sd3")
    prints = {text_fingerprint(recipe)}
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        next(getattr(recipe.pipeline, name).parameters()).data += 1
        prints.add(text_fingerprint(recipe))
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        getattr(recipe.pipeline, name).add_tokens(["<new>"])
        prints.add(text_fingerprint(recipe))
    assert len(prints) == 7


def test_all_text_encoders_move_together(load: Load) -> None:
    recipe = load("flux")
    assert len(recipe.modules("text_encoders")) == 2
    recipe.to("meta", "text_encoders")
    devices = {encoder.device.type for encoder in (recipe.pipeline.text_encoder, recipe.pipeline.text_encoder_2)}
    assert devices == {"meta"}
    assert recipe.pipeline.vae.device.type == "cpu"


def test_chroma_refuses_checkpointed_stacks_with_padding_which_the_stock_model_would_not_mask(load: Load) -> None:
    recipe = load("chroma")
    samples = samples_of(recipe, fps=[1.0, 1.0], captions=["a red square", "x"])
    inputs = recipe.model_inputs(samples)
    recipe.transformer.enable_gradient_checkpointing()
    with pytest.raises(BucketingError, match='batching="pack"'):
        recipe.predict(recipe.transformer, samples, inputs)
    with torch.no_grad():
        assert recipe.predict(recipe.transformer, samples, inputs).isfinite().all()


def test_gradients_of_a_stack_of_chroma_with_padding_are_finite(load: Load) -> None:
    recipe = load("chroma")
    samples = samples_of(recipe, fps=[1.0, 1.0], captions=["a red square", "x"])
    recipe.predict(recipe.transformer, samples, recipe.model_inputs(samples)).square().mean().backward()
    gradients = [parameter.grad for parameter in recipe.transformer.parameters() if parameter.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.slow
def test_a_plan_encodes_no_more_tokens_than_clip_takes(folder_of) -> None:
    plan = plan_memory(
        folder_of("flux"),
        PlanConfig.from_flat(
            device="cpu", sample_size=[1, 64, 64], train_batch_size=1, cached="nothing", mixed_precision="bf16"
        ),
    )
    assert plan.phases["text encoding"].text_encoder > 0


def test_a_vae_takes_latents_of_the_precision_of_the_transformer(folder_of) -> None:
    pipeline = recipe_of(folder_of("flux2")).load(folder_of("flux2"), loading=Loading(dtype=torch.bfloat16)).pipeline
    latents = torch.zeros(1, pipeline.vae.config.latent_channels, 4, 4, dtype=torch.bfloat16)
    assert pipeline.vae.decode(latents).sample.dtype == torch.float32
