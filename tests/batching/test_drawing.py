"""Drawn conditions: what stock pipelines pass for them, the loss that counts the rest, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

from hf_bucketing import BucketingError
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import clean_latents
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.buckets.sizes import LatentSpec, Size
from hf_bucketing.conditions.shares import read_condition, read_conditions
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.objectives import DiffusionForcing, Noised
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import Samples
from tests.models.families import RECIPES
from tests.models.recipe_cases import RecipeCase
from tests.models.test_pipeline_arguments import (
    FPS,
    LEVELS,
    RecipeCall,
    arguments_of,
    assert_same,
    normalised,
    pictures,
    without_noise,
)
from tests.models.test_recipe_suite import folder_of, load

__all__ = ["folder_of", "without_noise"]

MIXED = "first_frame:0.2,prefix:0.2,suffix:0.2,keyframes:0.2,none:0.2"
APPENDING = "first_frame+appended_keyframes:0.4,appended_last_frame:0.3,prefix:0.3"
OPTIONS: dict[str, Any] = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


def step_of(recipe: Recipe, condition: str | None, kind: Callable[..., Step] = BucketStep, **options: Any) -> Any:
    shares = None if condition is None else read_conditions(condition)
    return kind(recipe=recipe, objective=recipe.objective(**OPTIONS), condition=shares, **options)


def media_of(step: Step, batch: dict[str, Any]) -> dict[str, Any]:
    return step.media(batch, step.draw(batch, [(index,) for index in batch["index"]]))


def ltx(frames: list[Any]) -> dict[str, Any]:
    return {"conditions": [LTXVideoCondition(video=frames)], "image_cond_noise_scale": 0.0}


def ltx2(frames: list[Any]) -> dict[str, Any]:
    return {"conditions": [LTX2VideoCondition(frames=frames, index=0)]}


def video(frames: list[Any]) -> dict[str, Any]:
    return {"video": frames}


def extended(frames: list[Any]) -> dict[str, Any]:
    return {"video": frames, "overlap_history": len(frames), "base_num_frames": 97}


def image(frames: list[Any]) -> dict[str, Any]:
    return {"image": frames[0]}


def ends(frames: list[Any]) -> dict[str, Any]:
    return {"image": frames[0], "last_image": frames[-1]}


def test_a_sample_of_which_nothing_would_be_left_is_shown_nothing() -> None:
    spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 1, 1))
    shares, parts = read_condition("first_frame+last_frame"), []
    for latent_frames in (1, 2, 3):
        drawn = shares.draw(0, latent_frames=latent_frames, stride=4)
        parts.append(clean_latents(drawn, torch.zeros(4, latent_frames, 2, 2), None, spec).flatten().tolist())
    assert parts == [[False], [False, False], [True, False, True]]


STOCK = {
    "ltx-condition": ("LTXConditionPipeline", "prefix@2", ltx),
    "ltx2": ("LTX2ConditionPipeline", "prefix@2", ltx2),
    "cosmos-v2w": ("CosmosVideoToWorldPipeline", "prefix@2", video),
    "cosmos2-v2w": ("Cosmos2VideoToWorldPipeline", "prefix@2", video),
    "skyreels-v2-df": ("SkyReelsV2DiffusionForcingVideoToVideoPipeline", "prefix@2", extended),
    "wan-2.2-i2v": ("WanImageToVideoPipeline", "first_frame+last_frame", ends),
    "wan-flf2v": ("WanImageToVideoPipeline", "first_frame+last_frame", ends),
    "wan-i2v": ("WanImageToVideoPipeline", "first_frame", image),
    "wan-2.2-ti2v": ("WanImageToVideoPipeline", "first_frame", image),
    "skyreels-v2-i2v": ("SkyReelsV2ImageToVideoPipeline", "first_frame", image),
    "cogvideox-i2v": ("CogVideoXImageToVideoPipeline", "first_frame", image),
    "ltx-i2v": ("LTXImageToVideoPipeline", "first_frame", image),
    "ltx2-i2v": ("LTX2ImageToVideoPipeline", "first_frame", image),
}
"""Stock pipelines that show frames: their class, the condition, and their arguments for the frames that are shown."""


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK)
@torch.no_grad()
def test_a_recipe_shows_frames_as_the_stock_pipeline_does(
    name: str, folder_of: Callable[[RecipeCase], Path], request: pytest.FixtureRequest
) -> None:
    pipeline_class, condition, arguments = STOCK[name]
    case, folder = RECIPES[name], folder_of(RECIPES[name])
    recipe = load(case, folder)
    pipeline = getattr(diffusers, pipeline_class).from_pretrained(folder, **case.components)
    pipeline.tokenizer_padding_side = "left"  # that of LTX-2's published tokenizer, which its pipeline sets too late
    request.getfixturevalue("without_noise")
    stride = recipe.spec.temporal_stride
    size = recipe.spec.snap(Size(3 * stride + 1, 32, 64))
    count = 1 + size.frames // stride
    pixels = torch.randint(0, 256, (3, *size), generator=torch.Generator().manual_seed(0)) / 255 * 2 - 1
    shown = read_condition(condition).draw(0, latent_frames=count, stride=stride).frames
    frames = [picture for picture, visible in zip(pictures(pixels), shown, strict=True) if visible]
    call = {**case.render, **recipe.size_arguments(size), "prompt": case.captions[0], **arguments(frames)}
    call |= {rate: FPS for rate in ("fps", "frame_rate") if rate in recipe.call_parameters()}
    passed = arguments_of(pipeline, **call)
    media = media_of(step_of(recipe, condition), {"pixel_values": pixels[None], "index": [0]})
    clean = media.pop("latents")
    zeros = [torch.zeros_like(latent) for latent in clean]
    level = LEVELS["cosmos2"](pipeline.scheduler) if name.startswith("cosmos2") else pipeline.scheduler.timesteps[0]
    timesteps = torch.as_tensor(level).view(1).float()
    by_frame = [timesteps.expand(count)] if recipe.flow is DiffusionForcing else None
    noised = Noised(zeros, zeros, timesteps, clean, by_frame)
    samples = Samples(
        noised=noised, text=recipe.encode_text([case.captions[0]]), fps=torch.tensor([FPS]), conditions=media
    )
    of_recipe = normalised(recipe.transformer, arguments_of(RecipeCall(recipe=recipe, samples=samples)), sound=False)
    of_pipeline = normalised(pipeline.transformer, passed, sound=False)
    assert of_pipeline.keys() == of_recipe.keys()
    for argument, value in of_pipeline.items():
        assert_same(value, of_recipe[argument], argument)


def make_batch(recipe: Recipe, *, stacked: bool = False, mask: bool = False) -> dict[str, Any]:
    stride, generator = recipe.spec.temporal_stride, torch.Generator().manual_seed(0)
    shapes = [Size(3 * stride + 1, 32, 64), Size(2 * stride + 1, 64, 32)] * 2
    shapes = shapes[:1] * 5 if stacked else [*shapes, Size(1 if recipe.fewest_frames == 1 else stride + 1, 32, 32)]
    sizes = [recipe.spec.snap(size) for size in shapes]
    pixels = [torch.rand(3, *size, generator=generator) * 2 - 1 for size in sizes]
    masks = [torch.ones(1, *size) for size in sizes]
    for white in masks:
        white[..., :32] = 0
    shows = recipe.reference_condition().most > 0 and not stacked
    references = [(clip[..., ::2, ::2],) * (row % 2 * shows) for row, clip in enumerate(pixels)]
    return {
        "pixel_values": torch.stack(pixels) if stacked else pixels,
        "caption": ["a", "b", "c", "d", "e"],
        "fps": [8.0] * 5,
        "index": [3, 4, 5, 6, 7],
        "shown": {"reference": references, **({"mask": masks} if mask else {})},
    }


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Recipe:
    """Return a tiny pipeline in float64, so that packs can be compared with stacks."""
    folder = str(tiny_folder(request.param))
    loaded = recipe_of(folder).load(folder, max_sequence_length=RECIPES[request.param].max_sequence_length)
    for module in loaded.modules("trained", "text_encoders", "vae"):
        module.double()
    loaded.transformer.eval()
    return loaded


def losses(step: Step, batch: dict[str, Any], *, epoch: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return step(step.recipe.transformer, batch, epoch=epoch).values


@pytest.mark.parametrize(
    ("recipe", "condition"),
    [
        ("ltx", MIXED),
        ("ltx", "mask:0.5,prefix+mask:0.5"),
        ("ltx", "first_frame+reference:0.3,reference:0.4,prefix:0.3"),
        ("ltx-condition", APPENDING),
        ("ltx-condition", "first_frame+appended_keyframes@2+reference:0.5,appended_last_frame:0.5"),
        pytest.param("ltx2", APPENDING, marks=pytest.mark.slow),
        pytest.param("ltx2-in-context", MIXED, marks=pytest.mark.slow),
        pytest.param("ltx2", MIXED, marks=pytest.mark.slow),
        pytest.param("wan-2.2-ti2v", "mask:0.5,last_frame:0.5", marks=pytest.mark.slow),
        pytest.param("cosmos2-v2w", MIXED, marks=pytest.mark.slow),
        pytest.param("skyreels-v2-df", MIXED, marks=pytest.mark.slow),
        pytest.param("wan-2.2-i2v", MIXED, marks=pytest.mark.slow),
        pytest.param("cogvideox-i2v", "first_frame:0.5,none:0.5", marks=pytest.mark.slow),
    ],
    indirect=["recipe"],
)
def test_each_sample_of_a_pack_loses_what_it_loses_alone(recipe: Recipe, condition: str) -> None:
    """Several conditions meet in a pack; each sample alone is a stack of one."""
    batch = make_batch(recipe, mask="mask" in condition)
    step = step_of(recipe, condition)
    alone = []
    for row in range(5):
        single = {name: values[row : row + 1] for name, values in batch.items() if name != "shown"}
        single["shown"] = {name: values[row : row + 1] for name, values in batch["shown"].items()}
        single["pixel_values"] = torch.stack(single["pixel_values"])
        alone.append(losses(step, single))
    packed = step_of(recipe, condition, PackStep, packing=enable_packing(recipe.transformer, strip_length=8))
    together = losses(packed, batch)
    disable_packing(recipe.transformer)
    assert torch.allclose(together, torch.cat(alone), rtol=1e-5)


@pytest.mark.parametrize("recipe", ["ltx"], indirect=True)
@pytest.mark.parametrize(
    ("condition", "places"),
    [
        ("prefix@1", [0]),
        pytest.param("suffix@2", [2, 3], marks=pytest.mark.slow),
        pytest.param("first_frame+last_frame", [0, 3], marks=pytest.mark.slow),
        pytest.param("keyframes@2", None, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_what_is_shown_has_no_noise_timestep_zero_and_no_share_in_the_loss(
    recipe: Recipe, condition: str, places: list[int] | None
) -> None:
    batch, step = make_batch(recipe, stacked=True, mask=True), step_of(recipe, f"{condition}+mask")
    values = losses(step, batch)
    clean = recipe.encode_latents(batch["pixel_values"])
    noised = step.objective(list(clean), indices=batch["index"], epoch=1)
    shown = torch.zeros_like(clean[:, :1], dtype=torch.bool)
    stride, shares = recipe.spec.temporal_stride, read_condition(f"{condition}+mask")
    for row, index in enumerate(batch["index"]):
        drawn = shares.draw(0, 1, index, latent_frames=4, stride=stride).frames[::stride].nonzero()[0].tolist()
        assert len(drawn) == 2 if places is None else drawn == places
        shown[row, :, drawn] = True
    shown[..., : shown.shape[4] // 2] = True
    levels = noised.timesteps[:, None, None, None, None] * ~shown
    tokens = torch.where(shown, clean, torch.stack(noised.latents)).flatten(2).transpose(1, 2)
    text = recipe.encode_text(batch["caption"]).to(torch.float64)
    scale = (recipe.spec.temporal_stride / 8.0, recipe.spec.spatial_stride, recipe.spec.spatial_stride)
    output = recipe.transformer(
        hidden_states=tokens,
        encoder_hidden_states=text.values,
        timestep=levels.flatten(1),
        encoder_attention_mask=text.mask,
        **dict(zip(("num_frames", "height", "width"), clean.shape[2:], strict=True)),
        rope_interpolation_scale=scale,
        return_dict=False,
    )[0]
    errors = (output - torch.stack(noised.targets).flatten(2).transpose(1, 2)).square()
    counted = (~shown).flatten(2).transpose(1, 2)
    by_hand = (errors * counted).sum((1, 2)) / (counted.sum((1, 2)) * errors.shape[2])
    assert torch.allclose(values, by_hand, rtol=1e-6)
    nothing = losses(step_of(recipe, None), batch)
    assert not torch.isclose(values, nothing, rtol=1e-3).any()


@pytest.mark.parametrize("recipe", ["ltx-condition"], indirect=True)
@torch.no_grad()
def test_appended_frames_of_a_stack_have_the_loss_by_hand(recipe: Recipe) -> None:
    """Frames lie at their times, as `LTXConditionPipeline` places them; all samples of the stack have as many."""
    condition = "first_frame+appended_last_frame+appended_keyframes@1"
    batch, step = make_batch(recipe, stacked=True), step_of(recipe, condition)
    values, pipeline, spec = losses(step, batch), recipe.pipeline, recipe.spec
    noised = step.objective(list(recipe.encode_latents(batch["pixel_values"])), indices=batch["index"], epoch=1)
    text, by_hand, places = recipe.encode_text(batch["caption"]).to(torch.float64), [], set()
    for row, pixels in enumerate(batch["pixel_values"]):
        shown = step.draw(batch, [(0, 1, index) for index in batch["index"]])[row].appended
        frames = [latent * spec.temporal_stride for latent in shown]
        places.add(shown)
        clean, noisy = noised.clean[row], noised.latents[row].clone()
        noisy[:, :1] = clean[:, :1]
        keyframes = [recipe.encode_latents(pixels[None, :, frame : frame + 1])[0] for frame in frames]
        grids, tokens, coordinates = [noisy, *keyframes], [], []
        for grid, frame in zip(grids, [0, *frames], strict=True):
            ids = pipeline._prepare_video_ids(1, *grid.shape[1:], device="cpu")
            scaled = pipeline._scale_video_ids(ids, spec.spatial_stride, spec.temporal_stride, frame, device="cpu")
            coordinates.append(scaled.double())
            tokens.append(grid.flatten(1).T)
        where = torch.cat(coordinates, 2)
        where[:, 0] /= 8.0  # frames per second
        levels = torch.full_like(clean[0], float(noised.timesteps[row]))
        levels[0] = 0
        clean_tokens = torch.zeros(sum(map(len, tokens[1:])))
        output = recipe.transformer(
            hidden_states=torch.cat(tokens)[None],
            encoder_hidden_states=text.values[row : row + 1],
            timestep=torch.cat([levels.flatten(), clean_tokens])[None],
            encoder_attention_mask=None if text.mask is None else text.mask[row : row + 1],
            video_coords=where,
            return_dict=False,
        )[0][0, : levels.numel()]
        errors = (output - noised.targets[row].flatten(1).T).square()[levels[0].numel() :]
        by_hand.append(errors.mean())
    assert torch.allclose(values, torch.stack(by_hand), rtol=1e-6)
    assert places == {(1, 3), (2, 3)}
    without = losses(step_of(recipe, "first_frame"), batch)
    assert not torch.isclose(values, without, rtol=1e-6).any()


@pytest.mark.parametrize("recipe", ["ltx-condition"], indirect=True)
def test_a_stack_appends_as_many_frames_to_all_its_samples(recipe: Recipe) -> None:
    """The first sample decides; alone, each would have its own number."""
    batch, condition = make_batch(recipe, stacked=True), "appended_keyframes:0.5,prefix:0.5"
    counts = set()
    for epoch in range(12):
        keys = [(0, epoch, index) for index in batch["index"]]
        drawn = step_of(recipe, condition).draw(batch, keys)
        (count,) = {len(shown.appended) for shown in drawn}
        assert {shown.name for shown in drawn} == ({"appended_keyframes"} if count else {"prefix"})
        alone = step_of(recipe, condition, PackStep, packing=None).draw(batch, keys)
        assert len(alone[0].appended) == count
        counts |= {count, *(len(shown.appended) for shown in alone)}
    assert counts == {0, 1, 2, 3}


@pytest.mark.parametrize("recipe", ["ltx"], indirect=True)
def test_each_source_has_its_own_conditions_in_one_batch(recipe: Recipe) -> None:
    batch, step = make_batch(recipe, stacked=True), step_of(recipe, "prefix;stills=none;ends=last_frame")
    single = [losses(step_of(recipe, condition), batch) for condition in ("prefix", "none", "last_frame")]
    batch["source"] = ["clips", "stills", "ends", "stills", "others"]
    expected = [single[number][row] for row, number in enumerate((0, 1, 2, 1, 0))]
    assert torch.equal(losses(step, batch), torch.stack(expected))
    assert len({*expected}) == 5


@pytest.mark.parametrize("recipe", ["ltx-i2v"], indirect=True)
def test_an_image_to_video_model_is_shown_its_first_frame_unless_others_are_drawn(recipe: Recipe) -> None:
    batch = make_batch(recipe, stacked=True)
    default = losses(step_of(recipe, None), batch)
    assert torch.equal(losses(step_of(recipe, "first_frame"), batch), default)
    drawn = losses(step_of(recipe, "first_frame:0.5,none:0.5"), batch)
    kept, without = drawn == default, torch.isclose(drawn, losses(step_of(recipe, "none"), batch), rtol=1e-9)
    assert {*kept.tolist()} == {True, False}
    assert (kept ^ without).all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ltx"], indirect=True)
def test_held_out_samples_are_shown_the_same_whatever_the_seed(recipe: Recipe) -> None:
    batch = make_batch(recipe, stacked=True)
    steps = [step_of(recipe, MIXED), step_of(recipe, MIXED, seed=5), step_of(recipe, "none")]
    scores = [step.held_out(recipe.transformer, batch, num_levels=2) for step in steps]
    for first, other, none in zip(*scores, strict=True):
        assert torch.equal(first.values, other.values)
        assert 0 < int((first.values != none.values).sum()) < 5


@pytest.mark.parametrize("recipe", ["wan-2.2-i2v"], indirect=True)
@torch.no_grad()
def test_channels_hold_the_drawn_frames_and_grey_ones(recipe: Recipe) -> None:
    batch = make_batch(recipe, stacked=True)
    media = media_of(step_of(recipe, "prefix@2"), batch)
    clips = batch["pixel_values"].clone()
    clips[:, :, 5:] = 0
    noised = Noised(media["latents"], media["latents"], torch.ones(5), media["latents"])
    samples = Samples(noised=noised, text=recipe.encode_text(["x"] * 5), fps=torch.full((5,), 8.0), conditions=media)
    channels = torch.stack(list(recipe.added_channels(samples)))
    assert torch.allclose(channels[:, 4:], recipe.encode_latents(clips))
    assert channels[:, :4, :, 0, 0].tolist() == [[[1, 1, 0, 0]] * 4] * 5
    inputs = recipe.model_inputs(samples)
    assert inputs.weights is None
    assert isinstance(inputs.timesteps, torch.Tensor)


@pytest.mark.parametrize("recipe", ["cogvideox-i2v"], indirect=True)
@torch.no_grad()
def test_channels_of_a_first_frame_that_is_not_drawn_are_zero(recipe: Recipe) -> None:
    batch, shown = make_batch(recipe, stacked=True), []
    for condition in ("none", "first_frame"):
        media = media_of(step_of(recipe, condition), batch)
        noised = Noised(media["latents"], media["latents"], torch.ones(5), media["latents"])
        text = recipe.encode_text(["x"])
        samples = Samples(noised=noised, text=text, fps=torch.full((5,), 8.0), conditions=media)
        assert recipe.model_inputs(samples).weights is None
        shown.append([bool(channels.any()) for channels in recipe.added_channels(samples)])
    assert shown == [[False] * 5, [True] * 5]


@pytest.mark.parametrize("recipe", ["skyreels-v2-df"], indirect=True)
def test_diffusion_forcing_keeps_the_levels_of_frames_that_are_not_shown(recipe: Recipe) -> None:
    batch, step = make_batch(recipe, stacked=True), step_of(recipe, "prefix@2")
    assert isinstance(step.objective, DiffusionForcing)
    media = media_of(step, batch)
    latents = media.pop("latents")
    noised = step.objective(latents, indices=batch["index"], epoch=0)
    text = recipe.encode_text(batch["caption"])
    inputs = recipe.model_inputs(Samples(noised=noised, text=text, fps=torch.full((5,), 16.0), conditions=media))
    assert noised.frame_timesteps is not None
    for levels, drawn in zip(inputs.timesteps, noised.frame_timesteps, strict=True):
        assert levels.tolist() == [0, 0, *drawn[2:].tolist()]


@pytest.mark.parametrize(
    ("recipe", "condition", "cached", "message"),
    [
        ("wan", "prefix:0.5,reference:0.5", False, "`prefix`, but a WanPipeline of this configuration takes none"),
        ("flux2", "first_frame", False, "takes none; omit it"),
        ("chronoedit", "none:0.5,prefix:0.5", False, "takes none; omit it"),
        ("cogvideox-i2v", "prefix:0.5,none:0.5", False, "shows the model `prefix`.* takes `first_frame` alone"),
        ("skyreels-v2-df", "mask", False, "shows the model `mask`"),
        ("ltx", "mask", False, "the data set has no masks"),
        ("wan-2.2-i2v", "prefix", True, "not from a cache"),
        ("wan-i2v", "first_frame:0.5,none:0.5", False, "must have one of `first_frame`, `prefix`"),
        ("wan-flf2v", "first_frame", False, "must have one of `last_frame`, `suffix`"),
    ],
    indirect=["recipe"],
)
def test_conditions_that_a_model_is_not_shown_are_refused(recipe, condition, cached, message) -> None:
    with pytest.raises(BucketingError, match=message):
        recipe.check_conditions([], drawn=[read_condition(condition)], cached=cached)


@pytest.mark.parametrize("recipe", ["wan-i2v"], indirect=True)
def test_conditions_with_the_embedded_frame_are_taken(recipe: Recipe) -> None:
    recipe.check_conditions([], drawn=[read_condition("first_frame:0.5,prefix+last_frame:0.5")], cached=False)
