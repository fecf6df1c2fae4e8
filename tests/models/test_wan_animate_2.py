"""Wan-Animate 2: driving videos beside the samples of a pack, and what its pipeline passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.models.transformers import transformer_wan_animate_2 as stock
from PIL import Image

from hf_bucketing import PackingError
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.families.wan_animate import KNOWN
from hf_bucketing.models.loss_mask import LOSS_MASK
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import family_of, recipe_of
from hf_bucketing.models.samples import SHOWN_FRAMES, Samples as TrainedSamples
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.batch import Rows
from tests.models.cases import Samples, largest_difference, outputs_with_nan
from tests.models.families.wan_animate_2 import CASE
from tests.models.recipe_cases import draw_conditions, stock_pipeline

FRAMES, HEIGHT, WIDTH = 9, 32, 48


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stock model make its masks without a compiler, which takes two minutes on a CPU."""
    make = stock.create_block_mask
    monkeypatch.setattr(
        stock, "create_block_mask", lambda *args, **options: make(*args, **options | {"_compile": False})
    )


def stacked(samples: Samples, *rows: int) -> Rows:
    """Return samples of as many tokens as batch rows of the stock model."""
    taken = {name: [values[row] for row in rows] for name, values in samples.conditioning.items()}
    latents, text = ([values[row] for row in rows] for values in (samples.latents, samples.text))
    return Rows(
        latents=torch.stack(latents),
        timesteps=samples.timesteps[list(rows)],
        text=torch.stack(text),
        patch=(1, 2, 2),
        conditioning={name: torch.stack(values) for name, values in taken.items()},
    )


def test_the_stock_model_has_no_backward_pass_on_a_cpu(uncompiled: None) -> None:
    model = CASE.model()
    with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
        family_of(model).run(model, stacked(Samples(case=CASE), 0))


@pytest.mark.slow
@torch.no_grad()
def test_a_stack_runs_as_its_samples_alone(uncompiled: None) -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    outputs = family_of(model).run(model, stacked(samples, 0, 4))
    assert largest_difference([CASE.expected.outputs[row] for row in (0, 4)], list(outputs)) <= 1e-5


@pytest.mark.parametrize("name", ["driving_latents", "driving_text", "driving_image", "encoder_hidden_states_image"])
def test_what_a_sample_is_shown_leaks_into_no_other_sample(name: str) -> None:
    for victim, before, after in outputs_with_nan(CASE, name, (0, 3, 5)):
        for sample, (output, other) in enumerate(zip(before, after, strict=True)):
            assert torch.equal(output, other) == (sample != victim)


@torch.no_grad()
def test_the_first_frame_of_a_driving_video_is_not_read() -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    for latent in samples.conditioning["driving_latents"]:
        latent[:, 0] = 1e3
    batch = samples.pack(enable_packing(model, strip_length=4))
    assert largest_difference(CASE.expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


@torch.no_grad()
def test_a_mask_lets_a_frame_attend_to_two_spans_of_keys() -> None:
    model, samples = CASE.model(), Samples(case=CASE)
    batch = samples.pack(enable_packing(model, strip_length=4, backend="dense"))
    assert largest_difference(CASE.expected.outputs, batch.unpack(packed_forward(model, batch))) <= 1e-5


def test_a_character_alone_and_patches_of_several_frames_are_refused() -> None:
    model, samples = CASE.model(), Samples(case=CASE, order=(0, 1))
    packing = enable_packing(model, strip_length=4)
    for values in (samples.latents, samples.conditioning["driving_latents"]):
        values[1] = values[1][:, :1]
    with pytest.raises(PackingError, match="a latent frame of its character, followed by its own"):
        packed_forward(model, samples.pack(packing))
    with pytest.raises(PackingError, match=r"this model has patches of \(2, 2, 2\)"):
        enable_packing(CASE.model(patch_size=(2, 2, 2)))


@pytest.fixture(scope="module")
def recipe(tiny_folder: Callable[[str], Path]) -> Recipe:
    folder = str(tiny_folder("wan-animate-2"))
    return recipe_of(folder).load(folder)


def drawn(frames: int) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Draw the pixels of a sample, and what it is shown; its reference has the sample's aspect ratio."""
    generator, size = torch.Generator().manual_seed(0), (frames, HEIGHT, WIDTH)
    shown = draw_conditions(("control", "reference"), size, generator, references=((1, 2 * HEIGHT, 2 * WIDTH),))
    pixels = torch.rand(1, 3, *size, generator=generator) * 2 - 1
    return pixels, {name: [values] for name, values in shown.items()}


def pictures(pixels: torch.Tensor) -> list[Image.Image]:
    levels = ((pixels + 1) * 127.5).round().byte()
    return [Image.fromarray(frame.numpy()) for frame in levels.permute(1, 2, 3, 0)]


class Recorded(Exception):  # noqa: N818
    """Ends a call at the second call of the transformer."""


def both_passes(transformer: Any, call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the arguments of the first two calls of a transformer, of which the first computes nothing."""
    passes: list[dict[str, Any]] = []

    @functools.wraps(transformer.forward)  # the pipeline passes what its signature names
    def record(hidden_states: Any, *, return_dict: bool = True, **kwargs: Any) -> Any:
        passes.append({"hidden_states": hidden_states, **kwargs})
        if len(passes) == 2:
            raise Recorded
        return (hidden_states,)

    with patch.object(transformer, "forward", record), pytest.raises(Recorded):
        call()
    return passes


def meaning(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what arguments mean to the model, by name, as tensors of float64."""
    (latent,), (condition,) = arguments["hidden_states"], arguments["condition_latents"]
    (text,) = arguments["encoder_hidden_states"]
    cached = arguments["kv_cache_mode"] == "cached"
    meant = {"latents": torch.cat([latent, condition]), "text": text, "seq_len": arguments["seq_len"]}
    meant |= {"image": arguments["encoder_hidden_states_image"]}
    meant["grid"] = arguments["reference_grid_sizes" if cached else "offset_grid_sizes"]
    if cached:
        height, width = arguments["origin_area"]
        sizes = [arguments["origin_len"] // 4 + 1, height * width // 256]
        meant |= {"timestep": arguments["timestep"], "mask": torch.tensor(sizes)}
        assert not arguments.get("is_uncondtion")
    return {name: torch.as_tensor(value).double() for name, value in meant.items()}


@pytest.mark.slow
@torch.no_grad()
def test_the_recipe_passes_what_the_pipeline_passes_in_both_passes(
    recipe: Recipe, tiny_folder: Callable[[str], Path]
) -> None:
    pipeline = stock_pipeline(tiny_folder("wan-animate-2"))
    pixels, shown = drawn(FRAMES)
    call = {"prompt": "a red square", "num_inference_steps": 4, "height": HEIGHT, "width": WIDTH}
    call |= recipe.shown_arguments({"control": pictures(shown["control"][0])}) | {"segment_frame_length": FRAMES}
    call |= recipe.reference_arguments([pictures(shown["reference"][0][0])], None)
    passed = both_passes(pipeline.transformer, lambda: pipeline(**call))
    assert [arguments["kv_cache_mode"] for arguments in passed] == ["extract", "cached"]
    media = media_of(recipe, {"pixel_values": pixels, "shown": shown})
    del media["latents"]
    noise = list(passed[1]["hidden_states"])
    samples = TrainedSamples(
        noised=Noised(noise, noise, passed[1]["timestep"], noise),
        text=recipe.encode_text(["a red square"]),
        fps=torch.ones(1),
        conditions=media,
    )
    rows = recipe._stack(samples, recipe.model_inputs(samples))
    made = both_passes(recipe.transformer, lambda: recipe.family.run(recipe.transformer, rows))
    for of_pipeline, of_recipe in zip(map(meaning, passed), map(meaning, made), strict=True):
        assert of_pipeline.keys() == of_recipe.keys()
        for name, value in of_pipeline.items():
            assert torch.allclose(value, of_recipe[name], atol=2e-5), name


@pytest.mark.slow
def test_a_stack_that_runs_as_a_pack_keeps_its_packing_for_a_backward_pass_alone(recipe: Recipe) -> None:
    pixels, shown = drawn(5)
    batch = {"pixel_values": pixels, "shown": shown, "caption": ["x"], "fps": [8.0], "index": [0]}
    step = BucketStep(recipe=recipe, objective=recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0))
    with torch.no_grad():
        expected = step(recipe.transformer, batch, epoch=1).values
    with pytest.raises(PackingError, match="not enabled"):
        disable_packing(recipe.transformer)
    recipe.transformer.enable_gradient_checkpointing()
    losses = step(recipe.transformer, batch, epoch=1).values
    assert losses.tolist() == pytest.approx(expected.tolist())
    losses.sum().backward()
    disable_packing(recipe.transformer)
    recipe.transformer.disable_gradient_checkpointing()


@torch.no_grad()
def test_drawn_frames_are_known_as_those_of_the_segment_before(recipe: Recipe) -> None:
    from diffusers.modular_pipelines.wan_animate_2.denoise import WanAnimate2SegmentPrevFramesStep

    pixels, shown = drawn(FRAMES)
    latent = torch.zeros(20, 1, HEIGHT // 8, WIDTH // 8)
    state = SimpleNamespace(
        reference_image_latents=latent[: recipe.latent_channels + 4],
        segment_frame_length=FRAMES,
        prev_segment_conditioning_frames=5,
        out_frames=pixels[:, :, :5],
    )
    WanAnimate2SegmentPrevFramesStep()(recipe.pipeline, state, k=1)
    media = recipe.encode_media(pixels, {**shown, SHOWN_FRAMES: [torch.arange(FRAMES) < 5]})
    assert torch.allclose(media[KNOWN][0][:, 1:], state.reference_latents[:, 1:], atol=1e-6)
    assert media[LOSS_MASK][:, :, 0].eq(0).all()
    assert media[LOSS_MASK][:, :, 1:].eq(1).all()


def test_a_mask_weighs_the_loss_alone(recipe: Recipe) -> None:
    pixels, shown = drawn(5)
    mask = torch.ones(1, 5, HEIGHT, WIDTH)
    mask[..., : WIDTH // 2] = 0
    plain, masked = (recipe.encode_media(pixels, {**shown, **more}) for more in ({}, {"mask": [mask]}))
    assert torch.equal(plain[KNOWN], masked[KNOWN])
    assert masked[LOSS_MASK][0, 0, 1, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_blank_conditions_have_the_shapes_of_encoded_ones(recipe: Recipe) -> None:
    media = recipe.encode_media(*drawn(1))
    blank = recipe.blank_conditions(media["latents"][0])
    assert {*blank} == {*media} - {"latents", LOSS_MASK}
    for name, values in blank.items():
        shape = media[name][0].shape
        assert values.shape == shape or (values.shape[-1] == shape[-1] and "image" in name)  # fewer tokens
