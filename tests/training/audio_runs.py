"""What tests of runs with audio share: clips with sound, their preparation, losses by hand, and renders with sound."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bucketing.adapters.lora import add_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.batching.drawing import media_of, text_of
from hf_bucketing.batching.steps import TARGETS, Step
from hf_bucketing.batching.ways import make_step
from hf_bucketing.conditions.audio import AUDIO
from hf_bucketing.media import MediaSource, probe, write_video
from hf_bucketing.media.audio import read_audio
from hf_bucketing.media.write import Sound
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.synthetic.media import Clip, render
from hf_bucketing.training import TrainingConfig
from tests.conftest import run_script_here

SILENT = 1
"""Row of the clip without a track of sound."""

Predict = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Function of a pipeline, a caption and a frame rate, a latent and its timestep, audio `(tokens, C)` and its timestep.

It calls the transformer as the pipeline's call does, without audio where there are no tokens, and returns what it
predicts of both, in their shapes.
"""


def write_clips(folder: Path, clip: Clip) -> Path:
    """Write four clips, each of another pitch, of which the second has no track of sound."""
    rows = []
    for number, color in enumerate(("red", "green", "blue", "white")):
        frames = list(render(clip, shape="circle", color=color, direction="left"))
        times = np.arange(int(clip.frames / clip.fps * 48000)) / 48000
        tone = 0.5 * np.sin(2 * np.pi * 300 * (number + 1) * times)
        sound = None if number == SILENT else Sound(np.stack([tone, 0.5 * tone]), 48000)
        write_video(folder / f"{number}.mp4", frames, fps=clip.fps, sound=sound)
        tone_of = {} if sound is None else {"sound": f"a tone of {300 * (number + 1)} Hz"}
        rows.append({"file_name": f"{number}.mp4", "text": f"a {color} circle", **tone_of})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepare(clips: Path, pipeline: Path, output: Path, *flags: object, clip: Clip) -> Path:
    """Prepare clips for a pipeline at their own size."""
    run_script_here(
        "prepare_dataset.py",
        *flags,
        dataset=clips,
        output_dir=output,
        pretrained_model_name_or_path=pipeline,
        target_fps=clip.fps,
        buckets=f"{clip.height},{clip.width}",
        bucket_frames=str(clip.frames),
    )
    return output


def cache(prepared: Path, pipeline: Path, folder: Path, *, max_sequence_length: int) -> Path:
    """Encode prepared clips for packs, and return the folder of their rows."""
    run_script_here(
        "cache_latents.py",
        dataset_dir=prepared,
        pretrained_model_name_or_path=pipeline,
        cache_dir=folder / "entries",
        output_dir=folder / "rows",
        batching="pack",
        max_sequence_length=max_sequence_length,
    )
    return folder / "rows"


def encoded(recipe: Recipe, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch as one that comes from a cache."""
    media, text = media_of(recipe, batch), text_of(recipe, batch)
    latents = media.pop("latents")
    about = {name: batch[name] for name in ("fps", "index", "caption")}
    texts = {"text_values": text.values, "text_mask": text.mask, "text_others": text.others}
    return {**about, **texts, "latents": latents, "conditions": media}


def loss_by_hand(
    predict: Predict,
    pipeline: Any,
    step: Step,
    batch: Mapping[str, Any],
    row: int,
    *,
    weight: float,
    epoch: int = 0,
    shown: str = "none",
    audio_level: Callable[[float], float] = lambda level: level,
) -> float:
    """Return the loss of a sample: that of its video, and that of its audio times a weight, from a stock call alone.

    Arguments as of [`call_by_hand`].
    """
    options: dict[str, Any] = {"epoch": epoch, "shown": shown, "audio_level": audio_level}
    (video, of_video), (audio, of_audio) = call_by_hand(predict, pipeline, step, batch, row, **options)
    silent = shown == "no_audio" or not len(of_audio)
    loss = 0.0 if shown == "video" and not silent else float((video - of_video).square().mean())
    return loss if shown == "audio" or silent else loss + weight * float((audio - of_audio).square().mean())


def call_by_hand(
    predict: Predict,
    pipeline: Any,
    step: Step,
    batch: Mapping[str, Any],
    row: int,
    *,
    epoch: int = 0,
    shown: str = "none",
    audio_level: Callable[[float], float] = lambda level: level,
    caption: str | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return what a stock call predicts of a sample's video and audio, each with what it is trained to be.

    The batch is an [`encoded`] one; `audio_level` is the noise level of audio beside video of a level. A caption
    replaces that of the sample.
    """
    clean, sound = batch["latents"][row], batch["conditions"][AUDIO][row]
    sound = (sound[:0] if shown == "no_audio" else sound).to(clean)
    index = batch["index"][row]
    noised = step.objective([clean], indices=[index], epoch=epoch)
    drawn = step.objective.audio([sound], timesteps=noised.timesteps, keys=[(step.seed, epoch, index)])
    noise, level = drawn.targets[0] + sound, float(noised.timesteps) / 1000
    shows_video, shows_audio = (len(sound) > 0 and shown == kind for kind in ("video", "audio"))
    heard = 0.0 if shows_audio else audio_level(level)
    video, audio = predict(
        pipeline,
        batch["caption"][row] if caption is None else caption,
        float(batch["fps"][row]),
        latent=clean if shows_video else noised.latents[0],
        timestep=torch.tensor(0.0 if shows_video else 1000 * level),
        audio=(1 - heard) * sound + heard * noise,
        audio_timestep=torch.tensor(1000 * heard),
    )
    return (video, noised.targets[0]), (audio[: len(sound)], noise - sound)


BASE_PREDICTIONS: dict[str, Any] = {
    "preservation": "prior",
    "preservation_share": 0.5,
    "preservation_weight": 0.5,
    "slider": ["loud|quiet"],
    "slider_strength": 2.0,
    "lora_rank": 2,
    "audio_weight": 0.5,
}
"""Settings by which the targets of all samples are predictions of the base model."""


def check_base_predictions(
    predict: Predict,
    recipe: Recipe,
    config: TrainingConfig,
    batch: Mapping[str, Any],
    *,
    audio_level: Callable[[float], float] = lambda level: level,
) -> None:
    """Check that samples have the losses by hand of their video and of their sound, towards the untouched model."""
    base = copy.deepcopy(recipe.transformer)
    add_adapters(recipe.transformer, AdapterConfig(lora_rank=2), audio=True)
    for name, weight in recipe.transformer.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))).to(weight) / 8
    adapted, (step, latents, seen) = recipe.transformer, (make_step(config, recipe), encoded(recipe, batch), set())

    def call(transformer: Any, row: int, epoch: int, caption: str | None = None) -> list[torch.Tensor]:
        options: dict[str, Any] = {"epoch": epoch, "caption": caption, "audio_level": audio_level}
        with torch.no_grad(), step.unpacked():
            recipe.pipeline.transformer = transformer
            modalities = call_by_hand(predict, recipe.pipeline, step, latents, row, **options)
            recipe.pipeline.transformer = adapted
        return [predicted for predicted, _ in modalities]

    for epoch in range(3):
        losses = step(adapted, batch, epoch=epoch)
        seen |= {TARGETS[target] for target in losses.targets}
        for row, target in enumerate(losses.targets):
            predicted, wanted, weight = call(adapted, row, epoch), call(base, row, epoch), 0.5
            if TARGETS[target] == "slider":
                plus, minus = (call(base, row, epoch, side) for side in ("loud", "quiet"))
                wanted = [own + 2 * (more - less) for own, more, less in zip(wanted, plus, minus, strict=True)]
                weight = 1.0
            pairs = zip(predicted, wanted, strict=True)
            video, *heard = [float((own - other).square().mean()) for own, other in pairs if own.numel()]
            assert float(losses.values[row]) == pytest.approx(weight * (video + 0.5 * sum(heard)), rel=1e-4)
    assert seen == {"preservation", "slider"}


def kind_of(drawn: Any) -> str:
    """Return which modality of a sample is shown or absent, by what was drawn for it."""
    kinds = {"no_audio": drawn.no_audio, "video": drawn.video, "audio": drawn.audio}
    return next((kind for kind, shown in kinds.items() if shown), "none")


def check_sound(path: Path, clip: Clip) -> None:
    """Check that a render has a track as long as its frames, that is not silent."""
    source = MediaSource.from_cell(str(path))
    info = probe(source)
    assert (info.num_frames, info.fps) == (clip.frames, clip.fps)
    rate, seconds = 16000, clip.frames / clip.fps
    heard = read_audio(source, start=0.0, samples=round(2 * seconds * rate), rate=rate)
    assert heard is not None
    loud = np.flatnonzero(np.abs(heard).max(0) > 1e-4)
    assert loud[-1] / rate == pytest.approx(seconds, abs=0.2)
