"""Runs that train models other than LTX-2 on video with its audio: losses by hand, resume, caches, cards, renders."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import Kandinsky6TI2VAPipeline, ModularPipeline
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.batching.ways import make_step
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.loaders import resume
from hf_bucketing.models.loading import Loading
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.synthetic.media import Clip
from hf_bucketing.training.loop import Trainer
from tests.conftest import as_flags, run_script_here
from tests.models.families.kandinsky6 import with_audio
from tests.models.families.minimax_h3 import minimax_h3_with_audio, text_of
from tests.training.audio_runs import (
    BASE_PREDICTIONS,
    SILENT,
    Predict,
    cache,
    check_base_predictions,
    check_sound,
    encoded,
    kind_of,
    loss_by_hand,
    prepare,
    write_clips,
)
from tests.training.training_cases import STABLE, in_process, run, run_card, train

TEXT_TOKENS = 64
OBJECTIVE: dict[str, Any] = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class AudioRun:
    """Runs of a model with audio.

    Args:
        clip: Size of the clips.
        rule: Rule of the model's audio.
        tokens: Tokens of a clip's video, and of its audio.
        lora: Whether the stock pipeline loads LoRA.
        predict: Calls the stock transformer, see [`Predict`].
        audio_level: Noise level of audio beside video of a level.
        rendered: Size of the renders.
        load: Loads a pipeline with the transformer of a run.
        audio_only: Part of the name of a weight that serves audio alone.
    """

    clip: Clip
    rule: AudioRule
    tokens: tuple[int, int]
    lora: bool
    predict: Predict
    audio_level: Callable[[float], float]
    rendered: Clip
    load: Callable[[Path], Any]
    audio_only: str

    @property
    def packs(self) -> dict[str, Any]:
        """Settings of packs that hold three samples, of which two have sound."""
        fits = 2 * (sum(self.tokens) + TEXT_TOKENS) + self.tokens[0] + TEXT_TOKENS
        return {"batching": "pack", "max_tokens": fits + 3 * 8, "strip_length": 8, **COMMON}


COMMON: dict[str, Any] = {"max_sequence_length": TEXT_TOKENS, "learning_rate": 1e-3}
BUCKETS: dict[str, Any] = {"train_batch_size": 2, **COMMON}


minimax_h3_text = lru_cache(text_of)


def minimax_h3_predict(
    pipeline: Any, caption: str, fps: float, *, latent: torch.Tensor, timestep: torch.Tensor, **audio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    text = minimax_h3_text(pipeline, caption).to(latent)
    return minimax_h3_with_audio(pipeline.transformer, latent, timestep, text, **audio)


def minimax_h3_audio_level(level: float) -> float:
    """Return the level of audio where that of its video is given: schedules of one step, shifted by 12 and by 3."""
    unshifted = level / (12 - 11 * level)
    return 3 * unshifted / (1 + 2 * unshifted)


def kandinsky6_predict(
    pipeline: Any, caption: str, fps: float, *, latent: torch.Tensor, **others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    embeds, pooled, mask, *_ = pipeline.encode_prompt(
        caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
    )
    return with_audio(
        pipeline.transformer,
        latent,
        text=embeds[0, mask[0]].to(latent),
        pooled_projections=pooled[0].to(latent),
        visual_cond=latent.new_zeros(len(latent) + 1, *latent.shape[1:]),
        **others,
    )


def load_modular(folder: Path) -> Any:
    pipeline = ModularPipeline.from_pretrained(folder)
    pipeline.load_components()
    return pipeline


RUNS = {
    "minimax-h3": AudioRun(
        clip=Clip(22, 32, 64, 24),
        rule=AudioRule(rate=32000, samples_per_token=800, tokens_at_once=2),
        tokens=(14, 2 * 37),
        lora=True,
        predict=minimax_h3_predict,
        audio_level=minimax_h3_audio_level,
        rendered=Clip(124, 32, 64, 24),
        load=load_modular,
        audio_only="audio_proj_out.weight",
    ),
    "kandinsky6": AudioRun(
        clip=Clip(9, 32, 64, 8),
        rule=AudioRule(rate=16000, samples_per_token=640, rounds_up=True),
        tokens=(24, 29),
        lora=False,
        predict=kandinsky6_predict,
        audio_level=lambda level: level,
        rendered=Clip(9, 32, 64, 8),
        load=Kandinsky6TI2VAPipeline.from_pretrained,
        audio_only="audio_dec_block",
    ),
}


@pytest.fixture(scope="module", params=RUNS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def audio_run(name: str) -> AudioRun:
    return RUNS[name]


@pytest.fixture(scope="module")
def pipeline(name: str, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(name)


@pytest.fixture(scope="module")
def prepared(audio_run: AudioRun, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    clips, output = tmp_path_factory.mktemp("clips"), tmp_path_factory.mktemp("prepared") / "audio"
    return prepare(write_clips(clips, audio_run.clip), pipeline, output, "--with_audio", clip=audio_run.clip)


@pytest.fixture(scope="module")
def cached(prepared: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache(prepared, pipeline, tmp_path_factory.mktemp("cached"), max_sequence_length=TEXT_TOKENS)


@pytest.fixture
def recipe(pipeline: Path) -> Recipe:
    """A recipe in float64, in which losses are compared to 1e-6."""
    recipe = recipe_of(str(pipeline)).load(str(pipeline), max_sequence_length=TEXT_TOKENS, audio=True)
    for module in (recipe.transformer, recipe.pipeline.vae):
        module.double()
    return recipe


@pytest.mark.cases(fast=("kandinsky6",), slow=("*",))
def test_columns_say_which_rows_have_sound_and_plans_count_its_tokens(
    audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    rows = PreparedDataset.load(prepared)
    assert rows.audio == audio_run.rule
    config = in_process(pipeline, prepared, tmp_path, **audio_run.packs)
    data = make_data(config, rows.spec, ModelTokens.of(recipe))
    own, heard = audio_run.tokens
    assert rows.dataset["num_tokens"] == [own] * 4
    assert (data.num_tokens - own).tolist() == [0 if row == SILENT else heard for row in range(4)]


@pytest.mark.cases(slow=("minimax-h3-pack", "kandinsky6-bucket"))
@pytest.mark.parametrize("batching", ["pack", "bucket"])
def test_each_modality_is_generated_shown_or_absent_and_has_the_loss_by_hand(
    batching: str, audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    shares = "video:0.25,audio:0.25,no_audio:0.2,none:0.3"
    batches = audio_run.packs if batching == "pack" else BUCKETS
    config = in_process(pipeline, prepared, tmp_path, **batches, audio_weight=0.5, condition=shares)
    data, step = make_data(config, recipe.spec, ModelTokens.of(recipe)), make_step(config, recipe)
    rows = [0, SILENT, 2, 3] if batching == "pack" else [0, 2, 3]
    batch = data.loader.collate_fn([data.dataset[row] for row in rows])
    assert [sound.shape[1] for sound in batch["shown"]["audio"]] == [
        0 if row == SILENT else audio_run.rule.num_samples(audio_run.tokens[1]) for row in rows
    ]
    batch = encoded(recipe, batch)
    by_hand = partial(loss_by_hand, audio_run.predict, recipe.pipeline, step, batch, audio_level=audio_run.audio_level)
    kinds = set()
    for epoch in range(5):
        shown = [*map(kind_of, step.draw(batch, [(step.seed, epoch, row) for row in rows]))]
        kinds |= {*shown}
        with torch.no_grad():
            losses = step(recipe.transformer, batch, epoch=epoch).values
            with step.unpacked():
                expected = [by_hand(row, weight=0.5, epoch=epoch, shown=kind) for row, kind in enumerate(shown)]
        assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    assert kinds == {"no_audio", "video", "audio", "none"}


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["pack", pytest.param("bucket", marks=pytest.mark.every)])
def test_base_predictions_are_targets_of_both_modalities(
    batching: str, audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    batches = audio_run.packs if batching == "pack" else BUCKETS
    config = in_process(pipeline, prepared, tmp_path, **batches, **BASE_PREDICTIONS)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    rows = [0, SILENT, 2, 3] if batching == "pack" else [0, 2, 3]
    batch = data.loader.collate_fn([data.dataset[row] for row in rows])
    check_base_predictions(audio_run.predict, recipe, config, batch, audio_level=audio_run.audio_level)


@pytest.mark.cases(fast=("kandinsky6",), slow=("*",))
def test_audio_latents_are_as_many_as_the_pipeline_makes(audio_run: AudioRun, pipeline: Path, recipe: Recipe) -> None:
    heard = audio_run.tokens[1]
    generator = torch.Generator().manual_seed(0)
    sound = torch.rand(2, audio_run.rule.num_samples(heard), generator=generator) * 2 - 1
    latents = recipe.encode_audio(sound)
    assert len(latents) == heard
    assert len(recipe.encode_audio(sound[:, :0])) == 0
    assert torch.allclose(
        recipe.encode_audio(sound.flip(0)),
        latents.roll(heard // 2, 0) if audio_run.rule.tokens_at_once == 2 else latents,
    )
    # Loaded as people load it: diffusers keeps modules in float32 that a cast of the whole would round.
    vae = recipe.pipeline.audio_vae
    recipe.pipeline.audio_vae = type(vae).from_pretrained(pipeline, subfolder="audio_vae", torch_dtype=torch.bfloat16)
    error = recipe.encode_audio(sound).float() - latents
    assert error.norm() < 0.1 * latents.norm()


@pytest.mark.cases(slow=("kandinsky6",))
def test_training_from_a_cache_is_training_from_files(
    audio_run: AudioRun, prepared: Path, cached: Path, pipeline: Path, tmp_path: Path
) -> None:
    views = {"random_crop": False, "frame_picking": "start"}
    from_files = run(in_process(pipeline, prepared, tmp_path / "files", **audio_run.packs, **views))
    from_cache = run(in_process(pipeline, cached, tmp_path / "cache", **audio_run.packs))
    assert from_files == pytest.approx(from_cache, rel=1e-5)


@pytest.mark.cases(slow=("kandinsky6",))
def test_a_stream_counts_its_sound_and_resumes_exactly(
    audio_run: AudioRun, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    clips, run_folder = tmp_path / "clips", tmp_path / "run"
    clips.mkdir()
    write_clips(clips, audio_run.clip)
    stream = prepare(clips, pipeline, tmp_path / "stream", "--with_audio", "--streaming", clip=audio_run.clip)
    settings = {**audio_run.packs, "streaming": True, "max_train_steps": 4, "checkpointing_steps": 3}
    whole = run(in_process(pipeline, stream, run_folder, **settings))
    assert run(in_process(pipeline, stream, run_folder, **settings, resume_from_checkpoint="latest")) == whole
    accelerator = Accelerator(cpu=True)
    config = in_process(pipeline, stream, tmp_path / "counted", **settings)
    data = make_streamed_data(config, recipe.spec, ModelTokens.of(recipe), opened=open_stream(config, accelerator))
    loader = resume(accelerator, data.loader)
    rows = [data.rows_of(loader, batch, epoch=0) for batch in itertools.islice(loader, 4)]
    own, heard = (audio_run.tokens[0] + TEXT_TOKENS, audio_run.tokens[1])
    assert {count for row in rows for count in row.tokens.tolist()} == {own, own + heard}


@pytest.mark.cases(slow=("minimax-h3-pack", "kandinsky6-bucket"))
@pytest.mark.parametrize("batching", ["pack", "bucket"])
def test_two_epochs_resume_exactly_and_train_all_weights(
    batching: str, audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    batches = audio_run.packs if batching == "pack" else BUCKETS
    settings = {**batches, "num_train_epochs": 2, "max_train_steps": None, "checkpointing_steps": 2}
    whole = run(in_process(pipeline, prepared, tmp_path, **settings))
    checkpoints = sorted(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    assert len(whole) > 2
    again = run(in_process(pipeline, prepared, tmp_path, **settings, resume_from_checkpoint=str(checkpoints[0])))
    assert again == whole
    trained, before = (dict(audio_run.load(folder).transformer.named_parameters()) for folder in (tmp_path, pipeline))
    same = [name for name, values in trained.items() if torch.equal(values, before[name])]
    assert not any(audio_run.audio_only in name for name in same)
    assert len(same) < 0.2 * len(trained)


@pytest.mark.cases(slow=("kandinsky6",))
def test_what_is_trained_is_saved_and_rendered_with_sound(
    audio_run: AudioRun, cached: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = audio_run.rendered
    validation = {
        "validation_prompts": ["a red circle"],
        "validation_sizes": f"{clip.frames},{clip.height},{clip.width}",
        "validation_fps": clip.fps,
        "validation_steps": 2,
        "validation_inference_steps": 2,
    }
    shares = "video:0.2,audio:0.2,none:0.6"
    adapters = {"lora_rank": 2} if audio_run.lora else {}
    run(in_process(pipeline, cached, tmp_path, **audio_run.packs, **validation, **adapters, condition=shares))
    if audio_run.lora:
        weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
        assert all(bool(values.any()) for values in weights.values())
    size = f"{clip.frames}x{clip.height}x{clip.width}"
    check_sound(tmp_path / "validation" / "step-2" / f"{size}-a-red-circle.mp4", clip)
    card = (tmp_path / "README.md").read_text()
    assert "Video and its audio are trained together; samples without a track of sound train video alone." in card
    assert "Some samples train sound for their video or video for their sound" in card
    place = tmp_path / "place"
    place.mkdir()
    for folder in (pipeline, tmp_path):  # the card names them by the last part of their paths
        (place / folder.name).symlink_to(folder)
    monkeypatch.chdir(place)
    run_card(tmp_path, dtype="float32", steps=2)
    check_sound(place / "video.mp4", clip)
    run_script_here(
        "sample_video.py",
        pipeline if audio_run.lora else tmp_path,
        "--with_audio",
        **({"lora_weights": tmp_path} if audio_run.lora else {}),
        output=tmp_path / "clip.mp4",
        height=clip.height,
        width=clip.width,
        num_frames=clip.frames,
        num_inference_steps=2,
        fps=clip.fps,
    )
    check_sound(tmp_path / "clip.mp4", clip)


@pytest.mark.slow
def test_sound_beside_other_frame_rates_than_minimax_h3_has_is_refused_before_the_first_step(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows, a cache and a stream of clips at half the rate of the model."""
    pipeline, slow = tiny_folder("minimax-h3"), Clip(5, 32, 64, 12)
    clips = tmp_path / "clips"
    clips.mkdir()
    write_clips(clips, Clip(22, 32, 64, 24))
    rows = prepare(clips, pipeline, tmp_path / "rows", "--with_audio", clip=slow)
    stream = prepare(clips, pipeline, tmp_path / "stream", "--with_audio", "--streaming", clip=slow)
    cached = cache(rows, pipeline, tmp_path / "cached", max_sequence_length=TEXT_TOKENS)
    packs = {**RUNS["minimax-h3"].packs, "max_train_steps": 1}
    for folder, count, row in ((rows, 3, "0"), (cached, 3, "0"), (stream, 2, "one of the first")):
        config = in_process(pipeline, folder, tmp_path / "out", **packs, streaming=folder == stream)
        with pytest.raises(
            BucketingError, match=rf"24 frames per second, but {count} of {count} .* row {row} with 12"
        ):
            Trainer(config)


def test_a_sample_of_a_stream_with_sound_at_another_frame_rate_is_refused_by_its_step(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = tiny_folder("minimax-h3")
    recipe = recipe_of(str(folder)).load(str(folder), loading=Loading(parts=()), audio=True)
    step = BucketStep(recipe=recipe, objective=recipe.objective(**OBJECTIVE))
    sounds = [torch.zeros(0, 4), torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)]
    batch = {"fps": [12.0, 0.0, 23.976, 30.0], "index": [5, 6, 7, 8]}
    with pytest.raises(BucketingError, match=r"but 1 of 2 samples with sound have others, such as row 8 with 30"):
        step._check_audio_rates(batch, {"audio": sounds})
    step._check_audio_rates({**batch, "fps": [12.0, 0.0, 23.976, 24.0]}, {"audio": sounds})


@pytest.mark.cases(slow=("minimax-h3-pack", "kandinsky6-bucket"))
@pytest.mark.parametrize("batching", ["pack", "bucket"])
def test_processes_with_and_without_sound_in_one_step_wait_for_no_gradient(
    batching: str, audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    """All weights are trained by two processes, of which one has the silent clip alone, the other one with sound."""
    settings = {**(audio_run.packs if batching == "pack" else BUCKETS), "max_train_steps": 2}
    settings |= {"max_tokens": sum(audio_run.tokens) + TEXT_TOKENS + 16} if batching == "pack" else {}
    flags = as_flags(**{**settings, "train_batch_size": 1})
    train(pipeline, prepared, tmp_path, *flags, num_processes=2)
    logs = [
        [row["index"] for row in map(json.loads, (tmp_path / "logs" / name).read_text().splitlines())]
        for name in ("samples-0.jsonl", "samples-1.jsonl")
    ]
    steps = list(zip(*logs, strict=True))
    assert sorted(row for step in steps for rows in step for row in rows) == [0, 1, 2, 3]
    assert [step for step in steps if [SILENT] in step], "the silent clip meets one that has sound"
    assert all(math.isfinite(loss) for loss in losses_of(tmp_path))


@pytest.mark.cases(fast=("kandinsky6",), slow=("*",))
def test_captions_of_sound_are_trained_with_rows_that_have_some(
    audio_run: AudioRun, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    flags = ("--with_audio", "--audio_caption_column", "sound", "--caption_column", "text")
    rows = prepare(write_clips(clips, audio_run.clip), pipeline, tmp_path / "rows", *flags, clip=audio_run.clip)
    config = in_process(pipeline, rows, tmp_path / "run", **audio_run.packs)
    data, step = make_data(config, recipe.spec, ModelTokens.of(recipe)), make_step(config, recipe)
    batch = encoded(recipe, data.loader.collate_fn([data.dataset[row] for row in (0, SILENT)]))
    assert batch["caption"] == ["a red circle a tone of 300 Hz", "a green circle"]
    with torch.no_grad():
        losses = step(recipe.transformer, batch, epoch=0).values.tolist()
        with step.unpacked():
            by_hand = partial(loss_by_hand, audio_run.predict, recipe.pipeline, step, weight=1.0)
            levels = {"audio_level": audio_run.audio_level}
            told = [by_hand(batch, row, **levels) for row in (0, 1)]
            untold = by_hand({**batch, "caption": ["a red circle"]}, 0, **levels)
    assert losses == pytest.approx(told, rel=1e-6)
    assert losses[0] != pytest.approx(untold, rel=1e-6)


@pytest.mark.cases(slow=("kandinsky6",))
def test_the_held_out_loss_weighs_conditions_as_training_does(
    audio_run: AudioRun, prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    """Other files of the same clips are held out; what each is shown follows from its index."""
    weights = {"video": 3.0, "audio": 0.25, "none": 1.0}
    clips = tmp_path / "clips"
    clips.mkdir()
    write_clips(clips, audio_run.clip)
    held_out = prepare(clips, pipeline, tmp_path / "held", "--with_audio", clip=audio_run.clip)
    settings = {
        **audio_run.packs,
        "condition": "video:0.3:3,audio:0.4:0.25,none:0.3",
        "validation_dataset_dir": str(held_out),
        "validation_noise_levels": 2,
        "max_train_steps": 1,
    }
    run(in_process(pipeline, prepared, tmp_path / "run", **settings))
    found = read_log(tmp_path / "run", "validation")[-1]
    parts = found["by_condition"]
    assert sum(part["samples"] for part in parts) == 4
    assert len(parts) > 1
    counts = [part["samples"] * weights[part["condition"]] for part in parts]
    expected, equal = (
        np.average([part["loss"] for part in parts], weights=shares)
        for shares in (counts, [part["samples"] for part in parts])
    )
    assert found["validation_loss"] == pytest.approx(expected, rel=1e-6)
    assert found["validation_loss"] != pytest.approx(equal, rel=1e-3)


@pytest.mark.slow
def test_two_processes_that_share_packs_with_sound_have_the_losses_of_one(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """MiniMax-H3, in packs whose rows two processes do not divide before texts are padded."""
    pipeline, audio_run = tiny_folder("minimax-h3"), RUNS["minimax-h3"]
    clips = tmp_path / "clips"
    clips.mkdir()
    rows = prepare(
        write_clips(clips, audio_run.clip), pipeline, tmp_path / "rows", "--with_audio", clip=audio_run.clip
    )
    settings = {**audio_run.packs, "max_train_steps": 4, "condition": "audio:0.2,video:0.2,none:0.6", **STABLE}
    expected = run(in_process(pipeline, rows, tmp_path / "one", **settings))
    train(pipeline, rows, tmp_path / "two", *as_flags(**settings), "--context_parallel_degree", 2, num_processes=2)
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
