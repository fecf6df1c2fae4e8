"""MiniMax-H3: what its pipeline passes to the model, and stacks of a model that runs one sample per forward."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import (
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
    before_denoise,
)
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from PIL import Image

from hf_bucketing import BucketingError, Size
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.columns.settings import RowsConfig
from hf_bucketing.conditions.references import REFERENCE_SIZES
from hf_bucketing.conditions.shares import read_condition, read_conditions
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.condition_checks import OfSamples
from hf_bucketing.models.families.minimax_h3 import AT_END, PICTURE_TOKENS
from hf_bucketing.models.first_frame import pictures
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.objectives import Noised
from hf_bucketing.models.registry import family_of, recipe_of
from hf_bucketing.models.samples import Samples as RecipeSamples
from hf_bucketing.models.texts import TextEmbeddings
from hf_bucketing.packing import packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from hf_bucketing.packing.layout import PackedLayout
from hf_bucketing.packing.strips import patchify
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import sample_shape
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.randomness import Purpose, integer_seed
from hf_bucketing.settings import changed
from tests.models.cases import Samples, assert_same_gradients, gradients, largest_difference
from tests.models.families import CASES
from tests.models.families.minimax_h3 import latent_of_rows
from tests.models.pipeline_calls import mean_squares
from tests.models.recipe_cases import stock_pipeline

VIDEO, TEXT = 0, 1
OPTIONS: dict[str, Any] = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


def picture(*, seed: int) -> Image.Image:
    """Return a picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8))


class Recorded(Exception):  # noqa: N818
    """Ends a call of the pipeline at a call of the model."""


def recorded_call(
    pipeline: Any, number: int = 1, *, transformer: str = "transformer", **options: Any
) -> dict[str, Any]:
    """Return the arguments of a pipeline's first call of a transformer, or of a later one."""
    arguments: dict[str, Any] = {}
    model = getattr(pipeline, transformer)
    forward, calls = model.forward, itertools.count(1)

    @functools.wraps(forward)
    def record(**kwargs: Any) -> Any:
        if next(calls) < number:
            return forward(**kwargs)
        arguments.update(kwargs)
        raise Recorded

    with patch.object(model, "forward", record), pytest.raises(Recorded):
        pipeline(**options)
    return arguments


@torch.no_grad()
def test_but_for_the_sound_the_model_gets_what_the_pipeline_passes(tiny_folder: Callable[[str], Path]) -> None:
    folder, prompt = tiny_folder("minimax-h3"), "a red square"
    size = {"height": 32, "width": 96, "num_frames": 124}
    passed = recorded_call(stock_pipeline(folder), prompt=prompt, num_inference_steps=4, **size)
    recipe = recipe_of(str(folder)).load(str(folder))
    rows = Rows(
        latents=torch.zeros(1, 4, 37, 2, 6),
        timesteps=torch.tensor([1000.0]),
        text=recipe.encode_text([prompt]).trimmed().values,
        patch=(1, 2, 2),
    )
    family = recipe.family
    made = {**family.inputs(rows), **family.unpacked_inputs(recipe.transformer, rows)}
    assert torch.equal(made["encoder_hidden_states"], passed["encoder_hidden_states"])
    assert made["hidden_states"].shape == passed["hidden_states"].shape
    silent = (passed["token_tags"] == VIDEO) | (passed["token_tags"] == TEXT)
    assert not bool(silent.all()), "the pipeline always makes sound"
    for name in ("token_tags", "position_ids"):
        assert torch.equal(made[name], passed[name][silent].to(made[name])), name
    places = silent.cumsum(0) - 1
    for name in ("video_indices", "text_indices"):
        assert torch.equal(made[name], places[passed[name]]), name
    times = passed["timestep"][passed["timestep_indices"]][silent]
    assert torch.equal(made["timestep"][made["timestep_indices"]], times)


class Request(NamedTuple):
    """What the pipeline is asked for: a clip of a size, with pictures to begin and to end with, or references."""

    prompt: str
    size: Size
    options: Mapping[str, Any] = {}


SOUNDS = (Request("a red square", Size(124, 32, 96)), Request("a loud bell", Size(141, 64, 32)))
"""Two samples of other sizes, shown nothing."""


class RecordedCalls:
    """Samples as the pipeline passes them in its second step; the model and what it is passed are in float64."""

    def __init__(self, folder: Path, requests: Sequence[Request], *, transformer: str = "transformer") -> None:
        pipeline = stock_pipeline(folder)
        self.model = getattr(pipeline, transformer)
        self.spec = recipe_of(str(folder)).read_spec(str(folder))
        self.sizes = [request.size for request in requests]
        calls = [
            recorded_call(
                pipeline,
                2,
                transformer=transformer,
                prompt=prompt,
                num_inference_steps=4,
                generator=torch.Generator().manual_seed(1),
                height=size.height,
                width=size.width,
                num_frames=size.frames,
                **options,
            )
            for prompt, size, options in requests
        ]
        self.model.double()
        self.calls = [
            {
                name: value.double() if name.endswith("hidden_states") else value
                for name, value in call.items()
                if isinstance(value, torch.Tensor)
            }
            for call in calls
        ]
        patch = self.spec.patch
        self.shown, self.latents = [], []
        for call, size in zip(self.calls, self.sizes, strict=True):
            sides = self.spec.latent_size(size)
            own = math.prod(self.spec.grid(size))
            rows = call["hidden_states"][0]
            self.shown.append(rows[:-own])
            self.latents.append(latent_of_rows(rows[-own:], torch.empty(4, *sides), patch=patch))
        self.levels = [
            [1000 * (1 - self.time_of(call, f"{kind}_indices")) for call in self.calls] for kind in ("video", "audio")
        ]

    @staticmethod
    def time_of(call: dict[str, torch.Tensor], rows: str) -> torch.Tensor:
        return call["timestep"][call["timestep_indices"][call[rows][-1]]]

    def pictures(self) -> torch.Tensor:
        """Return which tokens of texts the pipeline says are those of pictures."""
        pictures = torch.zeros(len(self.calls), max(len(call["text_indices"]) for call in self.calls))
        for row, call in enumerate(self.calls):
            tags = call["token_tags"][call["text_indices"]]
            pictures[row, : len(tags)] = (tags == VIDEO).float()
        assert pictures.any(1).tolist() == [bool(len(shown)) for shown in self.shown]
        return pictures

    def keyframes(self) -> list[list[torch.Tensor]]:
        """Return the latents of the keyframes that each sample is shown."""
        ones = [torch.empty(4, *self.spec.latent_size(size._replace(frames=1))) for size in self.sizes]
        return [
            [latent_of_rows(part, one, patch=self.spec.patch) for part in rows.split(one[0].numel() // 4)]
            if len(rows)
            else []
            for rows, one in zip(self.shown, ones, strict=True)
        ]

    def sample_outputs(self) -> list[torch.Tensor]:
        """Return what the model predicts of the video and of the audio that each sample generates."""
        outputs = [self.model(**call, return_dict=False) for call in self.calls]
        pairs = zip(outputs, self.shown, strict=True)
        return [part for (video, audio), shown in pairs for part in (video[0, len(shown) :], audio[0])]

    def packed(self, *, silent: bool = False, **options: Any) -> Any:
        """Return the outputs of a pack of all, and if `silent` of the last again without sound, as of the model."""
        again = [-1] * silent
        video, heard = (torch.stack([*levels, *(levels[row] for row in again)]) for levels in self.levels)
        texts = [call["encoder_hidden_states"][0] for call in self.calls]
        sounds = [call["audio_hidden_states"][0] for call in self.calls]
        packing = enable_packing(self.model, strip_length=8)
        batch = packing.pack(
            [*self.latents, *(self.latents[row] for row in again)],
            timesteps=video,
            text=[*texts, *(texts[row] for row in again)],
            audio=Audio(
                latents=[*sounds, *(sounds[row][:0] for row in again)], timesteps=heard, video_timesteps=video
            ),
            **options,
        )
        strips, audio = packed_forward_with_audio(self.model, batch)
        rows = [patchify(latent, batch.patch).flatten(1) for latent in batch.unpack(strips)]
        return [-output for output in rows], [-output for output in audio]


def test_a_pack_with_sound_is_what_the_pipelines_calls_of_the_model_give(tiny_folder: Callable[[str], Path]) -> None:
    recorded = RecordedCalls(tiny_folder("minimax-h3"), SOUNDS)
    expected = recorded.sample_outputs()
    alone = gradients(recorded.model, mean_squares(expected))
    videos, sounds = recorded.packed(silent=True)
    outputs = [videos[0], sounds[0], videos[1], sounds[1]]
    assert largest_difference(expected, outputs) <= 1e-11
    assert len(sounds[2]) == 0
    assert largest_difference([videos[1]], [videos[2]]) > 1e-3, "video attends to its sound"
    assert_same_gradients(alone, gradients(recorded.model, mean_squares(outputs)), 1e-6)


FIRST, LAST = picture(seed=1), picture(seed=2)
KEYFRAMES = (
    Request("from the first", Size(124, 32, 96), {"image": FIRST}),
    Request("to the last", Size(124, 64, 32), {"last_image": LAST}),
    Request("from nothing", Size(124, 32, 32)),
    Request("from one to the other", Size(141, 64, 64), {"image": FIRST, "last_image": LAST}),
)


def keyframe_conditioning(recorded: RecordedCalls) -> dict[str, torch.Tensor]:
    """Return the conditioning of these requests, by what the pipeline passes."""
    return {PICTURE_TOKENS: recorded.pictures(), AT_END: torch.tensor([[0, 0], [1, 0], [0, 0], [0, 1]])}


def test_a_pack_with_first_and_last_frames_is_what_the_pipelines_calls_of_the_model_give(
    tiny_folder: Callable[[str], Path],
) -> None:
    recorded = RecordedCalls(tiny_folder("minimax-h3"), KEYFRAMES)
    expected = recorded.sample_outputs()
    alone = gradients(recorded.model, mean_squares(expected))
    conditioning = keyframe_conditioning(recorded)
    videos, sounds = recorded.packed(references=recorded.keyframes(), conditioning=conditioning)
    outputs = [output for pair in zip(videos, sounds, strict=True) for output in pair]
    assert largest_difference(expected, outputs) <= 1e-11
    assert_same_gradients(alone, gradients(recorded.model, mean_squares(outputs)), 1e-6)
    for name in conditioning:
        disable_packing(recorded.model)
        changed = {**conditioning, name: 1 - conditioning[name]}
        others, _ = recorded.packed(references=recorded.keyframes(), conditioning=changed)
        assert largest_difference([videos[3]], [others[3]]) > 1e-6, name


@pytest.mark.slow
@torch.no_grad()
def test_a_sample_alone_with_first_and_last_frames_is_what_the_pipelines_call_gives(
    tiny_folder: Callable[[str], Path],
) -> None:
    recorded = RecordedCalls(tiny_folder("minimax-h3"), KEYFRAMES)
    expected, conditioning = recorded.sample_outputs(), keyframe_conditioning(recorded)
    for row, call in enumerate(recorded.calls):
        levels = [level[row][None] for level in recorded.levels]
        rows = Rows(
            latents=recorded.latents[row][None],
            timesteps=levels[0],
            text=call["encoder_hidden_states"],
            patch=recorded.spec.patch,
            conditioning={name: values[row : row + 1] for name, values in conditioning.items()},
            references=[latent[None] for latent in recorded.keyframes()[row]],
            audio=Audio(latents=call["audio_hidden_states"], timesteps=levels[1], video_timesteps=levels[0]),
        )
        video, (sound,) = family_of(recorded.model).run_with_audio(recorded.model, rows)
        outputs = [-patchify(video[0], rows.patch).flatten(1), -sound]
        assert largest_difference(expected[2 * row : 2 * row + 2], outputs) <= 1e-11


@pytest.mark.slow
def test_audio_has_the_level_of_its_schedule_in_the_step_in_which_video_has_its_own(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = tiny_folder("minimax-h3")
    recorded = RecordedCalls(folder, SOUNDS)
    objective = (
        recipe_of(str(folder)).load(str(folder), audio=True).objective(weighting_scheme=None, snr_gamma=None, seed=0)
    )
    video, heard = map(torch.stack, recorded.levels)
    noised = objective.audio([torch.zeros(2, 4)] * 2, timesteps=video, keys=[(0, 0, 0), (0, 0, 1)])
    assert torch.allclose(noised.timesteps, heard, rtol=1e-5)
    assert bool((heard < video - 1).all())


@torch.no_grad()
def test_a_stack_runs_one_sample_after_another_each_with_its_own_text() -> None:
    case = CASES["minimax-h3"]
    model, samples = case.model(torch.float64), Samples(torch.float64, case=case, order=(0, 4))
    samples.text[1] = samples.text[1][:3]
    text, mask = torch.full((2, 9, case.text_dim), 7.0, dtype=torch.float64), torch.zeros(2, 9)
    for row, words in enumerate(samples.text):
        text[row, : len(words)], mask[row, : len(words)] = words, 1
    stack = Rows(
        latents=torch.stack(samples.latents), timesteps=samples.timesteps, text=text, text_mask=mask, patch=(1, 2, 2)
    )
    outputs = family_of(model).run(model, stack)
    for output, expected in zip(outputs, samples.alone(model), strict=True):
        assert float((output - expected).abs().max()) <= 1e-11


REFERENCES = (
    Request("a red square", Size(124, 32, 96), {"references": [MiniMaxH3ImageReference(FIRST)]}),
    Request(
        "two",
        Size(141, 64, 32),
        {"references": [MiniMaxH3ImageReference(LAST), MiniMaxH3ImageReference(FIRST.rotate(90, expand=True))]},
    ),
)


@pytest.mark.slow
def test_a_pack_with_pictures_as_references_is_what_the_pipelines_calls_of_the_model_give(
    tiny_folder: Callable[[str], Path],
) -> None:
    """Those of the transformer of references: short sides of 64 pixels here, 2048 by default."""
    recorded = RecordedCalls(tiny_folder("minimax-h3"), REFERENCES, transformer="transformer_ref")
    expected = recorded.sample_outputs()
    alone = gradients(recorded.model, mean_squares(expected))
    sides = [[(4, 6)], [(4, 6), (6, 4)]]
    references = [
        [
            latent_of_rows(part, torch.empty(4, 1, *size), patch=(1, 2, 2))
            for part, size in zip(rows.split([math.prod(size) // 4 for size in sizes]), sizes, strict=True)
        ]
        for rows, sizes in zip(recorded.shown, sides, strict=True)
    ]
    conditioning = {PICTURE_TOKENS: recorded.pictures()}
    videos, sounds = recorded.packed(references=references, conditioning=conditioning)
    outputs = [output for pair in zip(videos, sounds, strict=True) for output in pair]
    assert largest_difference(expected, outputs) <= 1e-11
    assert_same_gradients(alone, gradients(recorded.model, mean_squares(outputs)), 1e-6)
    disable_packing(recorded.model)
    swapped = [references[0], references[1][::-1]]
    others, _ = recorded.packed(references=swapped, conditioning=conditioning)
    assert largest_difference([videos[1]], [others[1]]) > 1e-6, "the order of references is that of their times"


def test_videos_and_pictures_as_references_lie_as_the_pipelines_block_places_them() -> None:
    """In a pack with a sample that has none; the block describes their rows to the stock model."""
    model, draw = CASES["minimax-h3"].model(torch.float64), partial(torch.randn, dtype=torch.float64)
    latent, text, sound = draw(4, 3, 4, 6), draw(5, 16), draw(4, 4)
    references = [draw(4, 7, 6, 4), draw(4, 1, 4, 4), draw(4, 2, 2, 2)]
    kinds = [MiniMaxH3VideoReference([]), MiniMaxH3ImageReference(None), MiniMaxH3VideoReference([])]
    made = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        torch.full((5,), TEXT), kinds, [latent[None] for latent in references], [], 3, 4, 6, 2, (1, 2, 2), 2, 2, VIDEO
    )
    layout = dict(
        zip(("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices"), made, strict=False)
    )
    indices = layout["video_indices"], layout["audio_indices"]
    times, of_rows = MiniMaxH3SetTimestepsStep.build_row_timesteps(*indices, made[5], 0, 5, 0.25, 0.5, 0.999, 1.0)
    video, heard = model(
        torch.cat([patchify_video_latents(grid[None], (1, 2, 2)) for grid in (*references, latent)])[None],
        sound[None],
        text[None],
        times,
        of_rows,
        **layout,
        return_dict=False,
    )
    batch = enable_packing(model, strip_length=4).pack(
        [latent, latent],
        references=[references, []],
        timesteps=torch.tensor([750.0, 750.0]),
        text=[text, text],
        audio=Audio(
            latents=[sound, sound], timesteps=torch.tensor([500.0, 500.0]), video_timesteps=torch.tensor([750.0] * 2)
        ),
    )
    strips, sounds = packed_forward_with_audio(model, batch)
    outputs = [patchify(output, batch.patch).flatten(1) for output in batch.unpack(strips)]
    assert largest_difference([video[0, made[5] :], heard[0]], [-outputs[0], -sounds[0]]) <= 1e-11
    assert largest_difference(outputs[:1], outputs[1:]) > 1e-6


CONDITIONS = ("appended_first_frame", "appended_last_frame", "none", "appended_first_frame+appended_last_frame")


class KeyframeStep:
    """A training step of clips that are shown their first frame, their last, nothing, or both, in a float64 model.

    Args:
        batching: `"pack"` or `"bucket"`; the samples of a stack are shown as many frames each.
    """

    trained = "transformer"

    def __init__(self, folder: Path, batching: str) -> None:
        self.recipe = recipe_of(str(folder)).load(str(folder), audio=True, trained=self.trained)
        self.recipe.transformer.double()
        self.shown = [0, 1, 2, 3] if batching == "pack" else [0, 1]
        sizes = [Size(124, 32, 64), Size(124, 64, 32), Size(124, 32, 32), Size(124, 32, 64)]
        sizes = [sizes[0 if batching == "bucket" else row] for row in self.shown]
        generator = torch.Generator().manual_seed(0)
        clips = [torch.randint(0, 256, (3, *size), generator=generator) / 127.5 - 1 for size in sizes]
        sounds = [torch.rand(2, 200 * 800 + 5600, generator=generator) * 2 - 1 for _ in sizes]
        self.sizes = sizes
        self.batch = {
            "pixel_values": torch.stack(clips) if batching == "bucket" else clips,
            "caption": ["from it", "to it", "", "between"][: len(clips)],
            "index": list(range(len(clips))),
            "fps": [24.0] * len(clips),
            "source": [str(row) for row in self.shown],
            "shown": {"audio": sounds},
        }
        condition = read_conditions(";".join(f"{row}={CONDITIONS[row]}" for row in self.shown))
        settings = {"recipe": self.recipe, "objective": self.recipe.objective(**OPTIONS)}
        settings |= self.show(condition)
        if batching == "pack":
            packing = enable_packing(self.recipe.transformer, strip_length=8)
            self.step: Any = PackStep(packing=packing, audio_weight=0.5, **settings)
        else:
            self.step = BucketStep(audio_weight=0.5, **settings)

    def loss_by_hand(self, pipeline: Any, row: int) -> torch.Tensor:
        """Return the loss of a sample, from what the pipeline passes when it is called with its pictures."""
        step, key, size = self.step, (0, 0, row), self.sizes[row]
        latents = self.recipe.encode_latents(torch.as_tensor(self.batch["pixel_values"][row])[None])
        noised = step.objective(list(latents), indices=[row], epoch=0)
        sound = self.recipe.encode_audio(self.batch["shown"]["audio"][row])
        audio = step.objective.audio([sound], timesteps=noised.timesteps, keys=[key])
        generator = torch.Generator().manual_seed(integer_seed(Purpose.CONDITION_NOISE, *key))
        draw = before_denoise.randn_tensor

        def randn(shape: Any, **options: Any) -> torch.Tensor:
            return torch.randn(shape, generator=generator) if shape[2] == 1 else draw(shape, **options)

        with patch.object(before_denoise, "randn_tensor", randn):
            call = recorded_call(
                pipeline,
                transformer=self.trained,
                prompt=self.batch["caption"][row] or " ",
                latents=noised.latents[0][None],
                audio_latents=audio.latents[0].unflatten(0, (2, -1)).transpose(1, 2),
                num_inference_steps=4,
                height=size.height,
                width=size.width,
                num_frames=size.frames,
                **self.shown_arguments(row),
            )
        call = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        own = len(call["video_indices"]) - latents[0, 0].numel() // 4
        call["timestep"], call["timestep_indices"] = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            call["video_indices"],
            call["audio_indices"],
            own,
            0,
            len(call["text_indices"]),
            video_timestep=float(1 - noised.timesteps / 1000),
            audio_timestep=float(1 - audio.timesteps / 1000),
            condition_video_timestep=max(float(1 - noised.timesteps / 1000), pipeline.keyframe_noise_aug),
            condition_audio_timestep=1.0,
        )
        video, heard = getattr(pipeline, self.trained)(**call, return_dict=False)
        predicted = -latent_of_rows(video[0, own:], latents[0], patch=(1, 2, 2))
        loss = (predicted - noised.targets[0]).square().mean()
        return loss + 0.5 * (-heard[0] - audio.targets[0]).square().mean()

    def show(self, condition: Any) -> dict[str, Any]:
        """Return the settings of a step that shows samples something, and give the batch what else they are shown."""
        return {"condition": condition}

    def shown_arguments(self, row: int) -> dict[str, Any]:
        """Return what the pipeline is called with to show a sample the same."""
        ends = pictures(self.batch["pixel_values"][row][:, [0, -1]].transpose(0, 1))
        names, kinds = ("image", "last_image"), CONDITIONS[self.shown[row]]
        return {name: end for name, end, kind in zip(names, ends, CONDITIONS, strict=False) if kind in kinds}


class ReferenceStep(KeyframeStep):
    """A step of the transformer of references: samples have one picture, two, one and two, in stacks one each."""

    trained = "transformer_ref"

    def show(self, condition: Any) -> dict[str, Any]:
        rule = self.recipe.reference_rule({"reference_image_short_edge": 64}).in_pixels(self.recipe.spec.multiples)
        stored = [[1, 48, 80], [1, 200, 64]]
        sizes = rule.sizes(stored, self.sizes[:2]).tolist()
        assert sizes == [[1, 64, 96], [1, 192, 64]], "107 pixels are nearer to 96, 200 to 192"
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randint(0, 256, (3, *size), generator=generator) / 127.5 - 1 for size in (*sizes, *sizes)]
        shown = [drawn[:1], drawn[1:3], drawn[3:], drawn[:2]] if len(self.sizes) > 2 else [drawn[:1], drawn[2:3]]
        self.batch["shown"]["reference"] = [tuple(own) for own in shown]
        return {}

    def shown_arguments(self, row: int) -> dict[str, Any]:
        frames = [pictures(pixels.transpose(0, 1)) for pixels in self.batch["shown"]["reference"][row]]
        return self.recipe.reference_arguments(frames, self.sizes[row])


@pytest.mark.cases(slow=("pack-KeyframeStep", "bucket-ReferenceStep"))
@pytest.mark.parametrize("kind", [KeyframeStep, ReferenceStep])
@pytest.mark.parametrize("batching", ["pack", "bucket"])
def test_a_step_with_pictures_has_the_loss_of_the_pipelines_call(
    batching: str, kind: type[KeyframeStep], tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder("minimax-h3")
    case = kind(folder, batching)
    losses = case.step(case.recipe.transformer, case.batch, epoch=0)
    if kind is KeyframeStep:
        assert [sample.appended for sample in losses.drawn] == [(0,), (36,), (), (0, 36)][: len(case.shown)]
    packed = gradients(case.recipe.transformer, losses.values.mean())
    pipeline = stock_pipeline(folder)
    model = getattr(pipeline, case.trained).double()
    by_hand = torch.stack([case.loss_by_hand(pipeline, row) for row in range(len(case.shown))])
    torch.testing.assert_close(losses.values.double(), by_hand.double(), rtol=1e-6, atol=0)
    assert_same_gradients(gradients(model, by_hand.mean()), packed, 1e-6)


@pytest.mark.slow
def test_samples_with_references_with_sound_and_without_have_the_losses_in_packs_that_they_have_alone(
    tiny_folder: Callable[[str], Path],
) -> None:
    case = ReferenceStep(tiny_folder("minimax-h3"), "pack")
    whole = case.step(case.recipe.transformer, case.batch, epoch=0).values
    case.batch["shown"]["audio"][1] = torch.zeros(2, 0)
    packed = case.step(case.recipe.transformer, case.batch, epoch=0).values
    assert torch.equal(whole != packed, torch.tensor([False, True, False, False]))
    disable_packing(case.recipe.transformer)
    step = BucketStep(recipe=case.recipe, objective=case.step.objective, audio_weight=0.5)
    for row, loss in enumerate(packed):
        shown = {name: values[row : row + 1] for name, values in case.batch["shown"].items()}
        alone = {name: values[row : row + 1] for name, values in case.batch.items() if name != "shown"}
        alone |= {"shown": shown, "pixel_values": torch.stack(alone["pixel_values"])}
        (expected,) = step(case.recipe.transformer, alone, epoch=0).values
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_each_transformer_is_shown_what_its_workflow_takes_and_other_data_is_refused_by_name(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = str(tiny_folder("minimax-h3"))
    kind, nothing = recipe_of(folder), Loading(parts=())
    first, second = (kind.load(folder, loading=nothing, trained=kind.transformer_for(shown)) for shown in NAMES)
    assert (first.trained, second.trained) == ("transformer", "transformer_ref")
    for recipe, own, other, why in (
        (first, *NAMES, r"shown no references.*\(--trained_component transformer_ref\)"),
        (second, *NAMES[::-1], "prepare it again with --reference_column"),
    ):
        recipe.check_conditions(own)
        recipe.check_renders(references=len(own), trained=recipe.trained)
        with pytest.raises(BucketingError, match=why):
            recipe.check_conditions(other)
        with pytest.raises(BucketingError, match="`trained_component` transformer_ref is the one that is shown some"):
            recipe.check_renders(references=len(other), trained=recipe.trained)
    second.check_conditions(NAMES[1], references=OfSamples(np.array([1, 9]), [0, 1]))
    with pytest.raises(BucketingError, match="such as row 1: It has no references, but the model needs 1"):
        second.check_conditions(NAMES[1], references=OfSamples(np.array([2, 0]), [0, 1]))
    with pytest.raises(BucketingError, match="`appended_first_frame`, but a MiniMaxH3"):
        second.check_conditions(NAMES[1], drawn=[read_condition("appended_first_frame")], cached=False)
    rule = kind.reference_rule()
    assert (rule.short_side, rule.fault(10), rule.shape_fault(10, 41)) == (
        2048,
        "It has 10 references, but the model takes at most 9",
        "41×10 pixels; the model takes references up to 4 to 1",
    )
    with pytest.raises(BucketingError, match=r"Omit `reference_pixels` .* shorter side of 2048 pixels"):
        RowsConfig(dataset="clips", reference_pixels=64).reference_rule(rule)


NAMES = ((), ("reference",))
"""Conditions of data sets without references and with some."""


def test_plans_count_references_and_as_much_of_text(tiny_folder: Callable[[str], Path]) -> None:
    """Which no text exceeds, labels and the tokens around pictures included."""
    folder = str(tiny_folder("minimax-h3"))
    config = PlanConfig.from_flat(
        trained_component="transformer_ref",
        sample_size=[22, 64, 32],
        reference_sizes="64,96;128,64",
        mixed_precision="bf16",
        train_batch_size=1,
    )
    components = read_components(folder, trained="transformer_ref")
    shape = sample_shape(components, config, Size(22, 64, 32))
    own, shown = 7 * 2, 6 + 8
    assert (shape.tokens, shape.text_tokens) == (own + shown, 512 + shown + 2 * 118)
    (one,) = sample_shape(components, changed(config, reference_sizes=None), Size(22, 64, 32)).references
    assert one == (1, 128, 64), "at least one, of the sample's shape"
    with pytest.raises(BucketingError, match="It has 2 references, but the model takes none"):
        sample_shape(read_components(folder), changed(config, trained_component="transformer"), Size(22, 64, 32))
    kind, nothing = recipe_of(folder), Loading(parts=("trained", "text_encoders"))
    recipe = kind.load(folder, trained="transformer_ref", loading=nothing)
    rule = kind.reference_rule(components.settings).in_pixels(recipe.spec.multiples)
    prepared: Any = SimpleNamespace(conditions=NAMES[1], references=rule, audio=None)
    counting = ModelTokens.of(recipe).rules_of(prepared)
    references = counting.rows({REFERENCE_SIZES: [[1, 640, 960, 1, 40, 20]]}, num_rows=1).references
    counted = int(references.num_tokens([(22, 64, 32)], spec=recipe.spec)[0])
    assert counted == 2 * shown + 2 * 118
    pixels = [torch.rand(3, *size) for size in references.sizes([(22, 64, 32)])[0]]
    text = recipe.encode_text(["a " * 600], [pixels])
    assert 512 + 2 * 2 < int(text.mask.sum()) <= shape.text_tokens
    assert bool(text.others[PICTURE_TOKENS].any())


def test_first_and_last_frames_are_read_from_no_cache_as_texts_see_them(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("minimax-h3")
    recipe = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=()))
    for condition in CONDITIONS:
        shares = read_condition(condition)
        recipe.check_conditions((), drawn=[shares], cached=False)
        if condition == "none":
            recipe.check_conditions((), drawn=[shares], cached=True)
        else:
            with pytest.raises(BucketingError, match=r"encodes the frames that it is shown.*not from a cache"):
                recipe.check_conditions((), drawn=[shares], cached=True)
    with pytest.raises(BucketingError, match="`first_frame`, but a MiniMaxH3"):
        recipe.check_conditions((), drawn=[read_condition("first_frame")], cached=False)


def test_texts_are_padded_until_processes_divide_text_and_sound() -> None:
    model = CASES["minimax-h3"].model()
    layout = PackedLayout(
        grids=((1, 2, 2), (1, 1, 1)), text_lengths=(3, 4), strip_length=4, audio_lengths=(6, 0), processes=4
    )
    _, padded = family_of(model).fit_text(model, layout, pad_to=None, pad_text_to=None)
    assert padded == 10, "with 6 of sound, 16 rows"


def test_a_frame_that_is_neither_first_nor_last_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    """A stack whose first sample appends a frame appends one of a sample, too, whose source appends none."""
    folder = tiny_folder("minimax-h3")
    recipe = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=()))
    conditions = read_conditions("none;clips=appended_last_frame")
    draws = [conditions.of("stills").draw(0, row, latent_frames=7, stride=4, appended=(6,)) for row in range(9)]
    places = [[recipe.keyframe_of(latent) for latent in draw.appended] for draw in draws]
    assert {len(frames) for frames in places} == {1}
    noised = Noised([torch.zeros(4, 7, 2, 2)] * 9, [], torch.zeros(9), [])
    text = TextEmbeddings(torch.zeros(9, 1, 1))
    samples = RecipeSamples(noised=noised, text=text, fps=torch.ones(9), conditions={"keyframe_places": places})
    with pytest.raises(BucketingError, match="is shown first and last frames alone"):
        recipe.conditioning(samples)
    ends = replace(samples, conditions={"keyframe_places": [[0, 21]] * 9})
    assert recipe.conditioning(ends)[AT_END].tolist() == [[0, 1]] * 9
