"""What a pipeline passes to its transformer, its recipe passes: for the same prompt, size and conditions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hf_bucketing.batching.drawing import media_of, text_of
from hf_bucketing.buckets.sizes import Size
from hf_bucketing.conditions.names import MASK, REFERENCE
from hf_bucketing.models.calls import IMAGES
from hf_bucketing.models.families.ltx2 import modulates_text
from hf_bucketing.models.objectives import DiffusionForcing, Noised, NoisedAudio
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.samples import Samples
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin
from tests.models.pipeline_calls import record_call
from tests.models.recipe_cases import RecipeCase, draw_conditions, stock_pipeline
from tests.models.test_recipe_suite import folder_of, load

__all__ = ["folder_of"]

FPS = 8.0
EDITING = ("qwen-image-edit", "qwen-image-edit-2509", "qwen-image-edit-2511")
"""Pipelines that are called with pictures alone; tests/models/test_references.py compares what they pass."""
REFERENCES = {"flux2": ((1, 64, 80), (1, 96, 64)), "ltx2": ((1, 32, 64),)}
"""Frames, height and width of references that pipelines do not resize, where they resize those of the cases."""
MASKS = ("attention_mask", "encoder_attention_mask", "encoder_hidden_states_mask")
IGNORED = ("return_dict", "isolate_modalities", "kv_cache", "kv_cache_mode")
"""Arguments that are not compared, beside those of sound where none is trained.

The cache of Qwen-Image 2.1 holds what later steps need not compute again.
"""
MODULAR = ("flux3", "minimax-h3", "wan-animate-2")
"""Pipelines that exist only as blocks, or call their transformer twice, which are called by other means; see
`test_minimax_h3.py` and `test_wan_animate_2.py`."""
LEVELS: dict[str, Callable[[Any], float]] = {
    "anima": lambda scheduler: float(scheduler.sigmas[0]),
    "cosmos2": lambda scheduler: float(scheduler.sigmas[0] / (1 + scheduler.sigmas[0])),
    "mochi": lambda scheduler: 1000.0 - float(scheduler.timesteps[0]),
}
"""The objective's timestep of a pipeline's first step, where its scheduler counts otherwise."""


@contextmanager
def passing_keywords(transformer: torch.nn.Module) -> Iterator[None]:
    """Let a transformer see all its arguments as keywords."""
    parameters = inspect.signature(transformer.forward)

    def name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = parameters.bind(*args, **kwargs)
        named.apply_defaults()
        return (), named.arguments

    hook = transformer.register_forward_pre_hook(name, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True, kw_only=True)
class RecipeCall:
    """A call of a recipe, in the place of its pipeline's."""

    recipe: Recipe
    samples: Samples

    @property
    def transformer(self) -> Any:
        return self.recipe.transformer

    def __call__(self) -> Any:
        recipe, inputs = self.recipe, self.recipe.model_inputs(self.samples)
        predict = recipe.predict if self.samples.audio is None else recipe.predict_with_audio
        return predict(self.transformer, self.samples, inputs)


def arguments_of(call: Any, **kwargs: Any) -> dict[str, Any]:
    with passing_keywords(call.transformer):
        return record_call(call, **kwargs)


def pictures(pixels: torch.Tensor) -> list[Image.Image]:
    """Return the frames of `(3, F, H, W)` in [−1, 1], or of a mask `(1, F, H, W)` in [0, 1]."""
    levels = ((pixels + 1) * 127.5 if len(pixels) == 3 else pixels * 255).round().byte()
    return [Image.fromarray(frame.squeeze(-1).numpy()) for frame in levels.permute(1, 2, 3, 0)]


def call_of(case: RecipeCase, recipe: Recipe, pipeline: Any, size: Size, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which the pipeline is called for what the recipe is shown."""
    call = {**case.render, **recipe.size_arguments(size), "prompt": case.captions[0]}
    taken = recipe.call_parameters()
    call |= {name: FPS for name in ("fps", "frame_rate") if name in taken}
    if recipe.takes_image:
        count = recipe.num_images(recipe.transformer.config)
        frames = [shown[name] for name in ("first_frame", "last_frame") if name in shown]
        call |= {name: pictures(frame)[0] for name, frame in zip(IMAGES[:count], frames, strict=True)}
    if "height" not in taken:  # the sides have about this mean, in the image's ratio
        pipeline.target_size = int((size.height * size.width) ** 0.5)
    omitted = {REFERENCE} if MASK in shown else {REFERENCE, "background"}
    names = [name for name in recipe.call_arguments() if name in shown and name not in omitted]
    call |= recipe.shown_arguments({name: pictures(shown[name]) for name in names})
    if REFERENCE in shown:
        call |= recipe.reference_arguments([pictures(pixels) for pixels in shown[REFERENCE]], size)
    return call


def guidance_of(pipeline: Any, call: dict[str, Any]) -> float:
    """Return the guidance scale that a pipeline's call passes to a model that embeds one."""
    taken = inspect.signature(pipeline.__call__).parameters
    name = "distilled_guidance_scale" if "distilled_guidance_scale" in taken else "guidance_scale"
    return float(call.get(name, taken[name].default))


def normalised(transformer: Any, arguments: dict[str, Any], *, sound: bool) -> dict[str, Any]:
    """Return what a call's arguments mean to the model: the text without its padding, and its positions."""
    rest = {
        name: value
        for name, value in arguments.items()
        if name not in IGNORED and (sound or not name.startswith("audio_"))
    }
    if rest.get("audio_num_frames") is not None and rest["audio_coords"] is None:  # then LTX-2 makes them itself
        rest["audio_coords"] = transformer.audio_rope.prepare_audio_coords(1, rest["audio_num_frames"], "cpu")
    for level in ("timestep", "sigma"):  # that of video by default
        if f"audio_{level}" in rest:
            rest[f"audio_{level}"] = rest[level] if rest[f"audio_{level}"] is None else rest[f"audio_{level}"]
    rest |= rest.pop("added_cond_kwargs", {})
    words = rest["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in rest else None
    of_text = [name for name in MASKS if rest.get(name) is not None and rest[name].shape[-1] == words]
    masks = [rest.pop(name) for name in of_text]
    masks.append((rest.pop("attention_kwargs", None) or {}).pop("text_attn_mask", None))
    for mask in masks:
        if mask is not None:  # of numbers that are added to scores, or of zeros and ones
            kept = mask.flatten(0, -2)[0] > -1 if mask.ndim == 3 else mask[0] != 0
            rest["encoder_hidden_states"] = rest["encoder_hidden_states"][:, kept]
            if "position_ids" in rest:  # those of text come first
                positions = rest["position_ids"]
                rest["position_ids"] = torch.cat([positions[: len(kept)][kept], positions[len(kept) :]])
    if "img_mask" in rest:  # the model does not read what stands in the place of pictures
        embeds = rest["encoder_hidden_states"]
        rest["encoder_hidden_states"] = embeds[:, ~rest["img_mask"][0, : embeds.shape[1]]]
    if "indicator" in rest:  # of one sequence, which begins with padding
        kept = rest["indicator"][0] != 0
        whole = ("indicator", "segment_ids", "position_ids", "hidden_states", "encoder_hidden_states")
        rest |= {name: rest[name][:, kept] for name in whole}
    if "rope_interpolation_scale" in rest:  # or coordinates
        names = ("num_frames", "height", "width", "rope_interpolation_scale", "video_coords")
        rest["positions"] = transformer.rope(rest["hidden_states"], *(rest.pop(name) for name in names))
    if rest.get("video_coords") is not None:  # by which the model does not read the sides
        rest = {name: value for name, value in rest.items() if name not in ("num_frames", "height", "width")}
    if rest.get("condition_mask") is not None:  # which the model puts behind the latents, as the recipe does
        rest["hidden_states"] = torch.cat([rest["hidden_states"], rest.pop("condition_mask")], 1)
    if rest.get("padding_mask") is not None:  # of any size, which the model changes
        rest["padding_mask"] = rest["padding_mask"].amax()
    if "fps" in rest and rest["hidden_states"].shape[2] == 1:  # which makes no difference to an image
        del rest["fps"]
    if "sigma" in rest and not modulates_text(transformer):  # then LTX-2 reads it for sound alone
        del rest["sigma"]
    if rest.get("image_embeds") is not None and not rest["image_embeds"].any():  # which mean no image
        del rest["image_embeds"]
    return {name: value for name, value in rest.items() if value is not None and value != {}}


def assert_same(value: Any, other: Any, name: str) -> None:
    """Compare numbers and tensors, also in lists; sides of one entry may be absent."""
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
        assert len(value) == len(other), name
        for part, other_part in zip(value, other, strict=True):
            assert_same(part, other_part, name)
        return
    sides = [torch.as_tensor(side).double().squeeze() for side in (value, other)]
    assert torch.allclose(*torch.broadcast_tensors(*sides), atol=2e-5), f"{name}: {value} and {other}"


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipelines begin with zeros, and VAEs draw the mode."""

    def zeros(shape: Sequence[int], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and "randn_tensor" in vars(module):
            monkeypatch.setattr(module, "randn_tensor", zeros)


@pytest.mark.parametrize("name", one_per_kin(name for name in RECIPES if name not in (*EDITING, *MODULAR)))
def test_a_recipe_passes_what_its_pipeline_passes(
    name: str, folder_of: Callable[[RecipeCase], Path], request: pytest.FixtureRequest
) -> None:
    check_arguments(name, folder_of, request, sound=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ltx2", "ltx2-i2v", "kandinsky6"])
def test_a_recipe_passes_the_sound_that_its_pipeline_passes(
    name: str, folder_of: Callable[[RecipeCase], Path], request: pytest.FixtureRequest
) -> None:
    check_arguments(name, folder_of, request, sound=True)


def no_sound_yet(recipe: Recipe, folder: Path, size: Size, timesteps: torch.Tensor) -> NoisedAudio:
    """Return audio of zeros, as long as the pipeline makes it for frames of a size."""
    rule = recipe.read_audio_rule(str(folder))
    assert rule is not None
    channels = recipe.family.audio_channels(recipe.transformer)
    latents = [torch.zeros(int(rule.num_tokens(size.frames, FPS)), channels)]
    return NoisedAudio(latents, latents, timesteps, timesteps, torch.ones(1))


@torch.no_grad()
def check_arguments(
    name: str, folder_of: Callable[[RecipeCase], Path], request: pytest.FixtureRequest, *, sound: bool
) -> None:
    case = RECIPES[name]
    recipe = replace(load(case, folder_of(case)), audio=sound)
    pipeline = stock_pipeline(folder_of(case), **case.components)
    request.getfixturevalue("without_noise")  # now that the modules of the pipeline are imported
    height, width = map(int, case.buckets.split(";")[0].split(","))
    size = Size(case.sizes[0][0], height, width)
    generator = torch.Generator().manual_seed(0)
    names = [name for name in (case.shown or [()])[-1] if name != REFERENCE or REFERENCE in recipe.call_arguments()]
    references = REFERENCES.get(name.partition("-")[0], case.references[0])
    shown = draw_conditions(names, size, generator, references=references)
    pixels = torch.randint(0, 256, (1, 3, *size), generator=generator) / 255 * 2 - 1
    call = call_of(case, recipe, pipeline, size, {"first_frame": pixels[0, :, :1], "background": pixels[0], **shown})
    call |= recipe.sound_arguments(FPS) if sound else {}
    passed = arguments_of(pipeline, **call)
    if recipe.embeds_guidance:
        recipe = recipe.guided(guidance_of(pipeline, call))
    batch = {"pixel_values": pixels, "shown": {name: [value] for name, value in shown.items()}}
    media = media_of(recipe, batch)
    latents = [torch.zeros_like(latent) for latent in media.pop("latents")]
    level = next((read for begin, read in LEVELS.items() if name.startswith(begin)), None)
    timesteps = pipeline.scheduler.timesteps[:1]
    timesteps = timesteps if level is None else torch.tensor([level(pipeline.scheduler)])
    frames = [timesteps.expand(latent.shape[1]) for latent in latents]
    samples = Samples(
        noised=Noised(latents, latents, timesteps, latents, frames if recipe.flow is DiffusionForcing else None),
        text=text_of(recipe, {**batch, "caption": [case.captions[0]]}),
        fps=torch.tensor([FPS if size.frames > 1 else 1.0]),
        conditions=media,
        audio=no_sound_yet(recipe, folder_of(case), size, timesteps) if sound else None,
    )
    of_pipeline = normalised(pipeline.transformer, passed, sound=sound)
    of_recipe = normalised(recipe.transformer, arguments_of(RecipeCall(recipe=recipe, samples=samples)), sound=sound)
    assert of_pipeline.keys() == of_recipe.keys()
    for argument, value in of_pipeline.items():
        assert_same(value, of_recipe[argument], argument)
