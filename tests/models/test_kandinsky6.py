"""Kandinsky 6: what its pipeline passes with sound and with a picture to begin with, and what is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import Kandinsky6TI2VAPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from hf_bucketing import BucketingError, PackingError, Size
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.steps import Step
from hf_bucketing.caching.settings import CacheConfig
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.conditions.names import KEYFRAMES
from hf_bucketing.conditions.shares import read_condition, read_conditions
from hf_bucketing.models import enable_packing
from hf_bucketing.models.families.kandinsky6 import FAMILY
from hf_bucketing.models.first_frame import pictures
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing import packed_forward, packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from hf_bucketing.packing.batch import Rows
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import plan_components, sample_shape, step_shape
from hf_bucketing.planner.settings import PlanConfig
from tests.models.audio_cases import AudioSamples
from tests.models.cases import assert_same_gradients, gradients, largest_difference
from tests.models.families.kandinsky6 import make, with_exact_positions
from tests.models.pipeline_calls import mean_squares, record_call


def test_distilled_models_are_refused_by_name(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "distilled"
    shutil.copytree(tiny_folder("kandinsky6"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "PiflowScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BucketingError, match="is distilled: it predicts a velocity for each step"):
        recipe_of(str(folder)).load(str(folder))


def test_pipelines_without_an_audio_vae_make_no_sound(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    shutil.copytree(tiny_folder("kandinsky6"), folder, ignore=shutil.ignore_patterns("audio_vae", "vocoder"))
    index = json.loads((folder / "model_index.json").read_text())
    for name in ("audio_vae", "vocoder"):
        index[name] = [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    silent, heard = (recipe_of(str(path)).read_audio_rule(str(path)) for path in (folder, tiny_folder("kandinsky6")))
    assert silent is None
    assert heard == AudioRule(rate=16000, samples_per_token=640, rounds_up=True)


@pytest.mark.parametrize("frames", [1, 5, 9, 121])
@pytest.mark.parametrize("fps", [7.5, 8.0, 24.0])
def test_audio_has_as_many_tokens_as_the_pipeline_makes(frames: int, fps: float) -> None:
    rule = AudioRule(rate=44100, samples_per_token=1024, rounds_up=True)
    assert int(rule.num_tokens(frames, fps)) == math.ceil(frames / fps * 44100 / 1024)


def test_sound_longer_than_the_positions_is_refused_by_name() -> None:
    samples = AudioSamples("kandinsky6", lengths=(2049, 0, 0, 0, 0, 0))
    with pytest.raises(PackingError, match="The audio of sample 0 has 2049 tokens; this model has 2048 positions"):
        samples.packed()


class Request(NamedTuple):
    """What the pipeline is asked for: a clip of a size, and whether it begins with a picture."""

    prompt: str
    size: Size
    begins: bool = False


SOUNDS = (Request("a red square", Size(5, 32, 48)), Request("the ringing of a loud bell", Size(9, 32, 32)))
PICTURES = (
    Request("from a still", Size(5, 32, 48), begins=True),
    Request("a loud bell", Size(9, 32, 32)),
    Request("a picture", Size(1, 48, 32)),
    Request("from another still, far away", Size(9, 48, 32), begins=True),
)


class RecordedCalls:
    """Samples as the pipeline passes them to its model, each at a timestep of its own, in float64."""

    def __init__(self, folder: Path, requests: Sequence[Request], *, sound: bool) -> None:
        pipeline = Kandinsky6TI2VAPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        self.requests, self.calls = requests, []
        for number, request in enumerate(requests):
            frames, height, width = request.size
            call = record_call(
                pipeline,
                prompt=request.prompt,
                image=picture(number) if request.begins else None,
                num_frames=frames,
                height=height,
                width=width,
                max_sequence_length=64,
                num_inference_steps=2,
                guidance_scale=1.0,
                sample_audio=sound,
                frame_rate=8.0,
                generator=torch.Generator().manual_seed(number),
            )
            call["timestep"] = call["timestep"] * (1 - 0.1 * number)
            self.calls.append({name: in_float64(value) for name, value in call.items() if value is not None})
        self.model = with_exact_positions(pipeline.transformer)
        self.channels = self.model.config.in_visual_dim
        self.frames = [(request.size.frames + 3) // 4 for request in requests]

    def sample_outputs(self) -> list[torch.Tensor]:
        """Return what the model predicts of the video of each sample, without its picture, then of its sound."""
        outputs = [self.model(**{**call, "return_dict": False}) for call in self.calls]
        videos = [video[0, :frames] for (video, *_), frames in zip(outputs, self.frames, strict=True)]
        heard = [sounds[0][0] for _, *sounds in outputs if sounds]
        return [part for pair in zip(videos, heard, strict=True) for part in pair] if heard else videos

    def grids(self) -> list[torch.Tensor]:
        return [call["hidden_states"][0].movedim(-1, 0) for call in self.calls]

    def pictures(self) -> list[list[torch.Tensor]]:
        """Return the latent of the picture of each sample."""
        behind = [grid[: self.channels, frames:] for grid, frames in zip(self.grids(), self.frames, strict=True)]
        return [[latent] if latent.shape[1] else [] for latent in behind]

    def packed(self, *, silent: bool = False) -> list[torch.Tensor]:
        """Return the outputs of a pack of all in the same order, and if `silent` of the last again without sound."""
        calls = [*self.calls, *([self.calls[-1]] * silent)]
        grids = [grid[:, :frames] for grid, frames in zip(self.grids(), self.frames, strict=True)]
        grids, pictures = ([*values, *([values[-1]] * silent)] for values in (grids, self.pictures()))
        timesteps, audio = torch.cat([call["timestep"] for call in calls]), None
        if "audio_hidden_states" in calls[0]:
            sounds = [call["audio_hidden_states"][0] for call in calls]
            sounds = [*sounds[:-1], sounds[-1][:0]] if silent else sounds
            audio = Audio(latents=sounds, timesteps=timesteps, video_timesteps=timesteps)
        batch = enable_packing(self.model, strip_length=4).pack(
            [grid[: self.channels] for grid in grids],
            timesteps=timesteps,
            text=[call["encoder_hidden_states"][0, call["encoder_attention_mask"][0]] for call in calls],
            references=pictures,
            conditioning={
                "pooled_projections": torch.cat([call["pooled_projections"] for call in calls]),
                "visual_cond": [grid[self.channels :] for grid in grids],
            },
            audio=audio,
        )
        if audio is None:
            return [video.movedim(0, -1) for video in batch.unpack(packed_forward(self.model, batch))]
        strips, heard = packed_forward_with_audio(self.model, batch)
        videos = [video.movedim(0, -1) for video in batch.unpack(strips)]
        return [part for pair in zip(videos, heard, strict=True) for part in pair]


def picture(number: int) -> Image.Image:
    """Return a picture of noise of other sides than the clips have."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (40, 56, 3), dtype=np.uint8))


def in_float64(value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1
    return value.double() if is_real else value


def test_a_pack_with_sound_is_what_the_pipelines_calls_of_the_model_give(tiny_folder: Callable[[str], Path]) -> None:
    recorded = RecordedCalls(tiny_folder("kandinsky6"), SOUNDS, sound=True)
    expected = recorded.sample_outputs()
    alone = gradients(recorded.model, mean_squares(expected))
    *outputs, again, silence = recorded.packed(silent=True)
    assert largest_difference(expected, outputs) <= 1e-11
    assert not len(silence)
    assert largest_difference([outputs[2]], [again]) > 1e-3, "video attends to its sound"
    types = recorded.model.visual_token_type_embeddings.weight
    (gradient,) = torch.autograd.grad(mean_squares(outputs), types, retain_graph=True)
    assert not gradient.any(), "of 0, for which other processes may wait"
    found = gradients(recorded.model, mean_squares(outputs))
    assert_same_gradients(alone, found, 1e-6, without_gradient=FAMILY.reference_parts)


@pytest.mark.parametrize("sound", [False, True], ids=["silent", "with sound"])
def test_a_pack_with_pictures_is_what_the_pipelines_calls_of_the_model_give(
    sound: bool, tiny_folder: Callable[[str], Path]
) -> None:
    recorded = RecordedCalls(tiny_folder("kandinsky6"), PICTURES, sound=sound)
    assert [len(shown) for shown in recorded.pictures()] == [1, 0, 0, 1]
    assert ["visual_token_type_ids" in call for call in recorded.calls] == [True, False, False, True]
    expected = recorded.sample_outputs()
    alone = gradients(recorded.model, mean_squares(expected))
    outputs = recorded.packed()
    assert largest_difference(expected, outputs) <= 1e-11
    found = gradients(recorded.model, mean_squares(outputs))
    assert float(found["visual_token_type_embeddings.weight"].abs().amin(1).max()) > 0
    assert_same_gradients(alone, found, 1e-6, without_gradient=() if sound else FAMILY.audio_parts)


@pytest.mark.parametrize("sound", [False, True], ids=["silent", "with sound"])
def test_a_stack_is_called_as_the_pipeline_calls_the_model(sound: bool, tiny_folder: Callable[[str], Path]) -> None:
    recorded = RecordedCalls(tiny_folder("kandinsky6"), PICTURES, sound=sound)
    model, expected = recorded.model, recorded.sample_outputs()
    for call, frames, shown in zip(recorded.calls, recorded.frames, recorded.pictures(), strict=True):
        grid, audio = call["hidden_states"].movedim(-1, 1)[:, :, :frames], None
        if sound:
            audio = Audio(
                latents=call["audio_hidden_states"], timesteps=call["timestep"], video_timesteps=call["timestep"]
            )
        rows = Rows(
            latents=grid[:, : recorded.channels],
            timesteps=call["timestep"],
            text=call["encoder_hidden_states"],
            patch=(1, 2, 2),
            text_mask=call["encoder_attention_mask"],
            references=[latent[None] for latent in shown],
            conditioning={
                "pooled_projections": call["pooled_projections"], "visual_cond": grid[:, recorded.channels :],
            },
            audio=audio,
        )  # fmt: skip
        outputs = FAMILY.run_with_audio(model, rows) if sound else (FAMILY.run(model, rows), [])
        found = [outputs[0][0].movedim(0, -1), *outputs[1]]
        assert largest_difference(expected[: len(found)], found) <= 1e-11
        del expected[: len(found)]
        (gradient,) = torch.autograd.grad(mean_squares(found), model.visual_token_type_embeddings.weight)
        assert bool(gradient.any()) == bool(shown), "of 0 without a picture, for which other processes may wait"
    assert not expected


def test_types_are_trained_by_runs_that_draw_pictures_alone(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("kandinsky6"))
    for references in (False, True):
        recipe = recipe_of(folder).load(folder, references=references)
        assert recipe.transformer.visual_token_type_embeddings.weight.requires_grad == references
        assert not recipe.transformer.audio_embeddings.in_layer.weight.requires_grad


@pytest.mark.parametrize("changes", [{"visual_cond": False}, {"visual_token_type_num_embeddings": 1}])
def test_models_that_the_pipeline_shows_no_picture_are_shown_none(
    changes: dict[str, Any], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_folder("kandinsky6"), folder, ignore=shutil.ignore_patterns("transformer"))
    settings = {"visual_token_type_num_embeddings": 2, **changes}
    make(**settings, in_audio_dim=6).save_pretrained(folder / "transformer")
    recipe = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=()))
    with pytest.raises(BucketingError, match="`appended_first_frame`, but a Kandinsky6TI2VAPipeline"):
        recipe.check_conditions((), drawn=[read_condition("appended_first_frame:0.5,none:0.5")], cached=False)
    with pytest.raises(PackingError, match=r"A sample has a picture, for which this Kandinsky6.*lacks"):
        FAMILY.check_grid(make(**settings), (2, 3, 4), shown=((1, 3, 4),))


def test_a_picture_of_another_size_than_its_sample_is_refused_by_name() -> None:
    model = make(visual_token_type_num_embeddings=2)
    FAMILY.check_grid(model, (2, 3, 4), shown=((1, 3, 4),))
    with pytest.raises(PackingError, match=r"has a token grid of \(1, 4, 3\); as its first frame.* \(1, 3, 4\)"):
        FAMILY.check_grid(model, (2, 3, 4), shown=((1, 4, 3),))


FIRST = "appended_first_frame"


class PictureStep:
    """A training step of clips, some of which begin with a picture, by a model in float64.

    Args:
        shown: What each sample is shown, a name of a condition; those of a stack are of one size.
    """

    def __init__(self, folder: Path, shown: Sequence[str], *, sound: bool, stacked: bool) -> None:
        recipe = recipe_of(str(folder)).load(str(folder), max_sequence_length=64, audio=sound, references=True)
        self.model = with_exact_positions(recipe.transformer)
        recipe.pipeline.vae.double()
        self.shown = shown
        sizes = [request.size for request in ([PICTURES[0]] * len(shown) if stacked else PICTURES)]
        generator = torch.Generator().manual_seed(0)
        levels = [torch.randint(0, 256, (3, *size), generator=generator) for size in sizes]
        clips = [values / 127.5 - 1 for values in levels]
        rule = recipe.read_audio_rule(str(folder))
        counts = [int(rule.num_tokens(size.frames, 8.0)) for size in sizes]
        sounds = [torch.rand(2, rule.num_samples(count), generator=generator) * 2 - 1 for count in counts]
        self.batch = {
            "pixel_values": torch.stack(clips) if stacked else clips,
            "caption": [request.prompt for request in PICTURES][: len(shown)],
            "index": list(range(len(shown))),
            "fps": [8.0] * len(shown),
            "source": [str(row) for row in range(len(shown))],
            "shown": {"audio": sounds} if sound else {},
        }
        common: dict[str, Any] = {
            "recipe": recipe,
            "objective": recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0),
            "condition": read_conditions(";".join(f"{row}={name}" for row, name in enumerate(shown))),
            "audio_weight": 0.5,
        }
        self.step: Step = BucketStep(**common)
        if not stacked:
            self.step = PackStep(**common, packing=enable_packing(self.model, strip_length=8))

    def losses(self) -> torch.Tensor:
        losses = self.step(self.model, self.batch, epoch=0)
        assert [sample.name for sample in losses.drawn] == [name.replace("+", "_and_") for name in self.shown], (
            "each source has one condition"
        )
        return losses.values

    def loss_by_hand(self, pipeline: Any, row: int) -> torch.Tensor:
        """Return the loss of a sample, from what the pipeline passes when it is called with its picture."""
        step, pixels, shown = self.step, torch.as_tensor(self.batch["pixel_values"][row]), self.shown[row]
        (latent,) = step.recipe.encode_latents(pixels[None])
        noised = step.objective([latent], indices=[row], epoch=0)
        frames, height, width = pixels.shape[1:]
        audio = None
        if "audio" in self.batch["shown"] and "no_audio" not in shown:
            sound = step.recipe.encode_audio(self.batch["shown"]["audio"][row])
            audio = step.objective.audio([sound.double()], timesteps=noised.timesteps, keys=[(0, 0, row)])
        with mock.patch.object(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()):
            call = record_call(
                pipeline,
                prompt=self.batch["caption"][row],
                image=pictures(pixels[:, :1].transpose(0, 1))[0] if FIRST in shown and frames > 1 else None,
                latents=noised.latents[0][None],
                audio_latents=None if audio is None else audio.latents[0].T[None],
                num_frames=frames,
                height=height,
                width=width,
                max_sequence_length=64,
                num_inference_steps=2,
                guidance_scale=1.0,
                sample_audio=audio is not None,
                frame_rate=8.0,
            )
        call = {name: in_float64(value) for name, value in call.items()}
        call |= {"timestep": noised.timesteps, "return_dict": False}
        video, *heard = pipeline.transformer(**call)
        target = noised.targets[0].movedim(0, -1)
        loss = (video[0, : len(target)] - target).square().mean()
        return loss if audio is None else loss + 0.5 * (heard[0][0] - audio.targets[0]).square().mean()


@pytest.mark.parametrize(
    "sound", [pytest.param(False, id="silent", marks=pytest.mark.slow), pytest.param(True, id="with sound")]
)
@pytest.mark.parametrize("batching", ["pack", "stack", "stack without a picture"])
def test_a_step_with_pictures_has_the_loss_of_the_pipelines_call(
    batching: str, sound: bool, tiny_folder: Callable[[str], Path]
) -> None:
    folder, alone = tiny_folder("kandinsky6"), f"{FIRST}+no_audio" if sound else FIRST
    shown = {"pack": [FIRST, "none", FIRST, alone], "stack": [FIRST] * 2, "stack without a picture": ["none"] * 2}
    case = PictureStep(folder, shown[batching], sound=sound, stacked=batching != "pack")
    losses = case.losses()
    of_step = gradients(case.model, losses.mean())
    pipeline = Kandinsky6TI2VAPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    with_exact_positions(pipeline.transformer)
    pipeline.vae.double()
    by_hand = torch.stack([case.loss_by_hand(pipeline, row) for row in range(len(losses))])
    torch.testing.assert_close(losses.double(), by_hand.double(), rtol=1e-6, atol=0)
    unused = () if sound else FAMILY.audio_parts
    missing = unused if "picture" not in batching else (*unused, *FAMILY.reference_parts)
    assert_same_gradients(gradients(pipeline.transformer, by_hand.mean()), of_step, 1e-6, without_gradient=missing)


def test_the_first_sample_of_a_stack_decides_whether_all_begin_with_a_picture(
    tiny_folder: Callable[[str], Path],
) -> None:
    for shown in ([FIRST, "none"], ["none", FIRST]):
        case = PictureStep(tiny_folder("kandinsky6"), shown, sound=False, stacked=True)
        losses = case.step(case.model, case.batch, epoch=0)
        assert [sample.appended for sample in losses.drawn] == [(0,) if shown[0] == FIRST else ()] * 2


def test_a_cache_holds_first_frames_as_a_step_encodes_them(tiny_folder: Callable[[str], Path]) -> None:
    recipe = recipe_of(str(tiny_folder("kandinsky6"))).load(str(tiny_folder("kandinsky6")), max_sequence_length=64)
    held = {read_conditions(f"{FIRST}:0.5,none:0.5{others}").appended_frames for others in ("", ";stills=none")}
    assert held == {"first"}
    config = CacheConfig(folder="cache", appended_frames="first")
    clips = [torch.rand(3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1 for _, size, _ in PICTURES]
    cached = [
        recipe.encode_media(clip[None], recipe.keyframes_at([config.appended_at(1 + clip.shape[1] // 4)]))
        for clip in clips
    ]
    batch = {
        "latents": [entry["latents"][0] for entry in cached],
        "conditions": {KEYFRAMES: [entry[KEYFRAMES][0] for entry in cached]},
    }
    assert [len(frames) for frames in batch["conditions"][KEYFRAMES]] == [1, 1, 0, 1]
    for appended in ([(0,), (), (), (0,)], [()] * 4):
        files, entries = (media_of(recipe, of, appended=appended) for of in ({"pixel_values": clips}, batch))
        assert files.keys() == entries.keys()
        for own, entry in zip(files.get(KEYFRAMES, []), entries.get(KEYFRAMES, []), strict=True):
            assert len(own) == len(entry)
            assert all(torch.equal(*pair) for pair in zip(own, entry, strict=True))
    first = files["latents"][1][:, :1]
    assert not torch.allclose(first, batch["conditions"][KEYFRAMES][1][0], atol=1e-3), "as in a clip, it is another"


@pytest.mark.slow
def test_plans_count_a_picture_as_a_frame(tiny_folder: Callable[[str], Path]) -> None:
    components, size = read_components(str(tiny_folder("kandinsky6"))), Size(9, 32, 64)
    with_, without = (
        PlanConfig.from_flat(
            device="cpu", mixed_precision="no", max_sequence_length=16, condition=condition, train_batch_size=1
        )
        for condition in (f"{FIRST}:0.1,none:0.9", None)
    )
    assert sample_shape(components, with_, size).tokens == sample_shape(components, without, size).tokens + 2 * 4
    assert sample_shape(components, with_, size._replace(frames=1)).tokens == 2 * 4
    plans = [plan_components(components, config, step_shape(components, config, size)) for config in (with_, without)]
    shown, alone = (plan.phases["backward"] for plan in plans)
    assert shown.activations > alone.activations
    assert shown.optimizer - alone.optimizer == 2 * 4 * 2 * 64, "the types of tokens are trained too"
