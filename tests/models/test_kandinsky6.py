"""Kandinsky 6: distilled models are refused by name, and sound without an audio VAE."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import Kandinsky6TI2VAPipeline

from hf_bucketing import BucketingError, PackingError
from hf_bucketing.media.row_audio import AudioRule
from hf_bucketing.models import enable_packing
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.packing import packed_forward_with_audio
from hf_bucketing.packing.audio import Audio
from tests.models.audio_cases import AudioSamples
from tests.models.cases import assert_same_gradients, gradients, largest_difference
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


def test_a_pack_with_sound_is_what_the_pipelines_calls_of_the_model_give(tiny_folder: Callable[[str], Path]) -> None:
    pipeline = Kandinsky6TI2VAPipeline.from_pretrained(tiny_folder("kandinsky6"))
    settings = {"num_inference_steps": 2, "guidance_scale": 1.0, "sample_audio": True, "frame_rate": 8.0}
    sizes = {"a red square": (5, 32, 48), "the ringing of a loud bell": (9, 32, 32)}
    calls = []
    for prompt, (frames, height, width) in sizes.items():
        size = {"num_frames": frames, "height": height, "width": width, "max_sequence_length": 64}
        generator = torch.Generator().manual_seed(len(calls))
        call = record_call(pipeline, prompt=prompt, generator=generator, **size, **settings)
        calls.append({name: in_float64(value) for name, value in call.items() if isinstance(value, torch.Tensor)})
    model = pipeline.transformer.double()
    for name, module in model.named_modules():
        if name.endswith("rope_embeddings"):
            module.float()  # as in a loaded model
    channels = model.config.in_visual_dim
    expected = [output[0] for call in calls for output in model(**call, return_dict=False)]
    alone = gradients(model, mean_squares(expected))
    calls.append({**calls[1], "audio_hidden_states": calls[1]["audio_hidden_states"][:, :0]})
    grids = [call["hidden_states"][0].movedim(-1, 0) for call in calls]
    timesteps = torch.cat([call["timestep"] for call in calls])
    batch = enable_packing(model, strip_length=4).pack(
        [grid[:channels] for grid in grids],
        timesteps=timesteps,
        text=[call["encoder_hidden_states"][0, call["encoder_attention_mask"][0]] for call in calls],
        conditioning={
            "pooled_projections": torch.cat([call["pooled_projections"] for call in calls]),
            "visual_cond": [grid[channels:] for grid in grids],
        },
        audio=Audio(
            latents=[call["audio_hidden_states"][0] for call in calls], timesteps=timesteps, video_timesteps=timesteps
        ),
    )
    strips, sounds = packed_forward_with_audio(model, batch)
    videos = [video.movedim(0, -1) for video in batch.unpack(strips)]
    outputs = [videos[0], sounds[0], videos[1], sounds[1]]
    assert largest_difference(expected, outputs) <= 1e-11
    assert largest_difference([videos[1]], [videos[2]]) > 1e-3, "video attends to its sound"
    found = gradients(model, mean_squares(outputs))
    assert_same_gradients(alone, found, 1e-6, without_gradient=("visual_token_type_embeddings",))


def in_float64(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() and value.ndim > 1 else value
