"""Runs that train LTX-2 on video with its audio: from files with sound, and without, to a render with sound."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import LTX2VideoTransformer3DModel
from safetensors.torch import load_file
from transformers.audio_utils import mel_filter_bank, spectrogram

from hf_bucketing import BucketingError
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.streamed import make_streamed_data, open_stream
from hf_bucketing.batching.ways import make_step
from hf_bucketing.columns import PreparedDataset, preparation
from hf_bucketing.columns.prepared_stream import PreparedStream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.audio import AUDIO, HAS_AUDIO, AudioRule
from hf_bucketing.loaders import resume
from hf_bucketing.models.families.ltx2 import log_mel_spectrum
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.placement.context_parallel import check_audio
from hf_bucketing.runs.review import losses_of
from hf_bucketing.synthetic.media import Clip
from tests.conftest import as_flags, run_script_here
from tests.training.audio_runs import (
    BASE_PREDICTIONS,
    cache,
    check_base_predictions,
    check_sound,
    encoded,
    kind_of,
    loss_by_hand as hand_loss,
    prepare as prepare_clips,
    write_clips,
)
from tests.training.training_cases import in_process, run, run_card, train

CLIP = Clip(9, 32, 64, 8)
TEXT_TOKENS = 64
PACKS: dict[str, Any] = {
    "batching": "pack",
    "max_tokens": 160,
    "strip_length": 8,
    "max_sequence_length": TEXT_TOKENS,
    "learning_rate": 1e-3,
}
BUCKETS: dict[str, Any] = {"train_batch_size": 3, "max_sequence_length": TEXT_TOKENS, "learning_rate": 1e-3}
RULE = AudioRule(rate=16000, samples_per_token=640)
OWN_TOKENS = 96
TOKENS = 28
"""Tokens of the sound of nine frames at eight a second."""


@pytest.fixture(scope="module")
def pipeline(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("ltx2")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"), CLIP)


prepare = partial(prepare_clips, clip=CLIP)


@pytest.fixture(scope="module")
def prepared(clips: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(clips, pipeline, tmp_path_factory.mktemp("prepared") / "audio", "--with_audio")


@pytest.fixture(scope="module")
def cached(prepared: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache(prepared, pipeline, tmp_path_factory.mktemp("cached"), max_sequence_length=TEXT_TOKENS)


@pytest.fixture
def recipe(pipeline: Path) -> Recipe:
    return recipe_of(str(pipeline)).load(str(pipeline), max_sequence_length=TEXT_TOKENS, audio=True)


def test_columns_say_which_rows_have_sound_and_plans_count_its_tokens(
    prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    rows = PreparedDataset.load(prepared)
    assert rows.audio == RULE
    assert rows.dataset[HAS_AUDIO] == [True, False, True, True]
    config = in_process(pipeline, prepared, tmp_path, **PACKS)
    data = make_data(config, rows.spec, ModelTokens.of(recipe))
    own = np.array(rows.dataset["num_tokens"])
    assert (data.num_tokens - own).tolist() == [TOKENS, 0, TOKENS, TOKENS]
    assert data.learned_tokens.tolist() == own.tolist()


def test_losses_of_both_modalities_are_those_by_hand(
    prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    """A sample of a pack has the loss of its video, and that of its audio times a weight, from stock calls alone."""
    config = in_process(pipeline, prepared, tmp_path, **PACKS, audio_weight=0.5)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    batch = data.loader.collate_fn([data.dataset[row] for row in range(4)])
    assert batch["shown"][AUDIO][1].shape == (2, 0)
    step = make_step(config, recipe)
    with torch.no_grad():
        losses = step(recipe.transformer, batch, epoch=0).values
        batch = encoded(recipe, batch)
        with step.unpacked():
            expected = [loss_by_hand(recipe.pipeline, step, batch, row, weight=0.5) for row in range(4)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


def test_stacks_hold_samples_with_audio_or_without_and_have_the_losses_by_hand(
    prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    config = in_process(pipeline, prepared, tmp_path, **BUCKETS, audio_weight=0.5)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    plan = data.sampler.plan(0)
    batches = [plan.batch(number).tolist() for number in range(plan.num_batches)]
    assert all((1 in rows) == (rows == [1]) for rows in batches), "the silent clip is stacked with none that has sound"
    assert sorted(row for rows in batches for row in rows) == [0, 1, 2, 3]
    step = make_step(config, recipe)
    for rows in ([0, 2, 3], [1]):
        batch = data.loader.collate_fn([data.dataset[row] for row in rows])
        losses = step(recipe.transformer, batch, epoch=0).values
        with torch.no_grad():
            batch = encoded(recipe, batch)
            expected = [loss_by_hand(recipe.pipeline, step, batch, row, weight=0.5) for row in range(len(rows))]
        assert losses.tolist() == pytest.approx(expected, rel=1e-5)
        recipe.transformer.zero_grad()
        losses.sum().backward()
        lacking = [
            name
            for name, weight in recipe.transformer.named_parameters()
            if weight.requires_grad and weight.grad is None
        ]
        assert lacking == [], "another process may wait for them"


def predict(
    pipeline: Any,
    caption: str,
    fps: float,
    *,
    latent: torch.Tensor,
    timestep: torch.Tensor,
    audio: torch.Tensor,
    audio_timestep: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    states, mask, _, _ = pipeline.encode_prompt(
        caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS
    )
    text, audio_text, mask = pipeline.connectors(states, mask, padding_side="left")
    silent, (frames, height, width) = not len(audio), latent.shape[1:]
    video, heard = pipeline.transformer(
        hidden_states=pipeline._pack_latents(latent[None]),
        audio_hidden_states=audio.new_zeros(1, 1, 4) if silent else audio[None],
        encoder_hidden_states=text,
        audio_encoder_hidden_states=audio_text,
        timestep=timestep[None],
        audio_timestep=audio_timestep[None],
        sigma=timestep[None],
        audio_sigma=audio_timestep[None],
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=frames,
        height=height,
        width=width,
        fps=fps,
        audio_num_frames=1 if silent else len(audio),
        isolate_modalities=silent,
        use_cross_timestep=True,
        return_dict=False,
    )
    return pipeline._unpack_latents(video, frames, height, width)[0], heard[0]


loss_by_hand = partial(hand_loss, predict)


@pytest.mark.cases(fast=("packs",), slow=("*",))
@pytest.mark.parametrize("batches", [PACKS, BUCKETS], ids=["packs", "buckets"])
def test_each_modality_is_generated_shown_or_absent_by_sample(
    batches: dict[str, Any], prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    shares = "video:0.25,audio:0.25,no_audio:0.25,none:0.25"
    config = in_process(pipeline, prepared, tmp_path, **batches, audio_weight=0.5, condition=shares)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    step = make_step(config, recipe)
    rows = [0, 1, 2, 3] if batches is PACKS else [0, 2, 3]
    batch = encoded(recipe, data.loader.collate_fn([data.dataset[row] for row in rows]))
    kinds = set()
    for epoch in range(6):
        drawn = step.draw(batch, [(step.seed, epoch, row) for row in rows])
        shown = [*map(kind_of, drawn)]
        if batches is BUCKETS:
            assert len({kind == "no_audio" for kind in shown}) == 1, "samples of a stack have audio, or none has"
        kinds |= {*shown}
        with torch.no_grad():
            losses = step(recipe.transformer, batch, epoch=epoch).values
            with step.unpacked():
                expected = [
                    loss_by_hand(recipe.pipeline, step, batch, row, weight=0.5, epoch=epoch, shown=kind)
                    for row, kind in enumerate(shown)
                ]
        assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert kinds == {"no_audio", "video", "audio", "none"}


@pytest.mark.slow
@pytest.mark.parametrize("batches", [PACKS, BUCKETS], ids=["packs", "buckets"])
def test_base_predictions_are_targets_of_both_modalities(
    batches: dict[str, Any], prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    config = in_process(pipeline, prepared, tmp_path, **batches, **BASE_PREDICTIONS)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    rows = [0, 1, 2, 3] if batches is PACKS else [0, 2, 3]
    check_base_predictions(predict, recipe, config, data.loader.collate_fn([data.dataset[row] for row in rows]))


@pytest.mark.slow
def test_sounds_are_as_long_as_the_clips_of_sizes_that_are_drawn(
    prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    config = in_process(pipeline, prepared, tmp_path, **PACKS, random_resize=16, audio_weight=0.5)
    data = make_data(config, recipe.spec, ModelTokens.of(recipe))
    counts, step = set(), make_step(config, recipe)
    for epoch in range(3):
        data.loader.collate_fn.set_epoch(epoch)
        batch = data.loader.collate_fn([data.dataset[row] for row in range(4)])
        own = [recipe.spec.num_tokens(size) for size in batch["size"]]
        heard = [waveform.shape[1] // RULE.samples_per_token for waveform in batch["shown"][AUDIO]]
        assert heard == [TOKENS, 0, TOKENS, TOKENS]
        assert data.tokens_of(np.arange(4), epoch=epoch).tolist() == np.add(own, heard).tolist()
        assert data.learned_tokens(epoch).tolist() == own
        counts |= {*own}
        with torch.no_grad():
            losses = step(recipe.transformer, batch, epoch=epoch).values
            latents = encoded(recipe, batch)
            with step.unpacked():
                expected = [
                    loss_by_hand(recipe.pipeline, step, latents, row, weight=0.5, epoch=epoch) for row in range(4)
                ]
        assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(counts) > 2


def test_shown_modalities_need_audio(clips: Path, pipeline: Path, tmp_path: Path) -> None:
    silent = prepare(clips, pipeline, tmp_path / "silent")
    with pytest.raises(BucketingError, match="`condition` shows the model `audio`, but a LTX2Pipeline"):
        run(in_process(pipeline, silent, tmp_path / "run", **PACKS, condition="audio:0.5,none:0.5"))


def test_audio_latents_are_those_that_the_pipeline_would_start_from(recipe: Recipe) -> None:
    """As many as the call makes for as many seconds; decoded again, they are a spectrum of as many frames."""
    waveform = torch.rand(2, TOKENS * RULE.samples_per_token) * 2 - 1
    latents = recipe.encode_audio(waveform)
    assert latents.shape == (TOKENS, 4)
    assert round(CLIP.frames / CLIP.fps * 25) == TOKENS
    vae = recipe.pipeline.audio_vae
    vae.latents_mean.add_(1)
    vae.latents_std.mul_(2)
    assert torch.allclose(recipe.encode_audio(waveform), (latents - 1) / 2, atol=1e-6)
    assert recipe.encode_audio(waveform[:, :0]).shape == (0, 4)


def test_the_spectrum_is_that_of_another_implementation() -> None:
    waveform, hop, bins = torch.randn(2, 6400, generator=torch.Generator().manual_seed(0)), 160, 64
    filters = mel_filter_bank(513, bins, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    settings = {"frame_length": 1024, "hop_length": hop, "power": 1.0, "mel_filters": filters, "mel_floor": 1e-5}
    expected = [
        spectrogram(channel, np.hanning(1025)[:-1], log_mel="log", **settings).T for channel in waveform.numpy()
    ]
    assert np.allclose(log_mel_spectrum(waveform, rate=16000, hop=hop, bins=bins), np.stack(expected), atol=1e-4)


def test_training_from_a_cache_is_training_from_files(
    prepared: Path, cached: Path, pipeline: Path, tmp_path: Path
) -> None:
    views = {"random_crop": False, "frame_picking": "start"}
    from_files = run(in_process(pipeline, prepared, tmp_path / "files", **PACKS, **views))
    from_cache = run(in_process(pipeline, cached, tmp_path / "cache", **PACKS))
    assert from_files == pytest.approx(from_cache, rel=1e-5)
    trained, before = (
        LTX2VideoTransformer3DModel.from_pretrained(folder, subfolder="transformer").state_dict()
        for folder in (tmp_path / "files", pipeline)
    )
    same = [name for name, values in trained.items() if torch.equal(values, before[name])]
    assert same == [], "audio and attention between both are trained too"


@pytest.mark.cases(fast=("True",), slow=("False",))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_buckets_train_all_weights_and_resume_exactly(
    checkpointing: bool, prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    settings = {**BUCKETS, "max_train_steps": 4, "checkpointing_steps": 3, "gradient_checkpointing": checkpointing}
    whole = run(in_process(pipeline, prepared, tmp_path, **settings))
    again = run(in_process(pipeline, prepared, tmp_path, **settings, resume_from_checkpoint="latest"))
    assert again[-1] == whole[-1]
    trained, before = (
        LTX2VideoTransformer3DModel.from_pretrained(folder, subfolder="transformer").state_dict()
        for folder in (tmp_path, pipeline)
    )
    assert [name for name, values in trained.items() if torch.equal(values, before[name])] == []


@pytest.fixture(scope="module")
def stream(clips: Path, pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(clips, pipeline, tmp_path_factory.mktemp("stream") / "audio", "--with_audio", "--streaming")


@pytest.mark.parametrize("batches", [PACKS, BUCKETS], ids=["packs", "buckets"])
def test_streams_hold_the_samples_of_rows_and_count_their_audio(
    batches: dict[str, Any], stream: Path, prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    described = PreparedStream.load(stream)
    assert (described.audio, described.sample.audio_fps, described.shown) == (RULE, CLIP.fps, (AUDIO,))
    views = {"random_crop": False, "frame_picking": "start"}
    settings = {**batches, **views, "streaming": True, "max_train_steps": 4}
    for folder in (stream, prepared):
        config = in_process(pipeline, folder, tmp_path, **settings)
        accelerator = Accelerator(cpu=True)
        opened = open_stream(config, accelerator)
        data = make_streamed_data(config, recipe.spec, ModelTokens.of(recipe), opened=opened)
        found: dict[str, int] = {}
        loader = resume(accelerator, data.loader)
        for batch in itertools.islice(loader, 4):
            counted = data.rows_of(loader, batch, epoch=0).tokens.tolist()
            lengths = [waveform.shape[1] // RULE.samples_per_token for waveform in batch["shown"][AUDIO]]
            assert counted == [OWN_TOKENS + length for length in lengths]
            assert sum(counted) <= 160 or batches is BUCKETS
            assert len({*lengths}) == 1 or batches is PACKS
            found |= dict(zip(batch["caption"], lengths, strict=True))
        assert found == {f"a {color} circle": TOKENS for color in ("red", "blue", "white")} | {"a green circle": 0}
        largest = data.largest_step()
        assert largest.tokens == len(largest.audio) * (OWN_TOKENS + TOKENS)
        assert {*largest.audio} == {TOKENS}


def test_captions_tell_of_the_sound_of_rows_that_have_some(clips: Path, pipeline: Path, tmp_path: Path) -> None:
    flags = ("--with_audio", "--audio_caption_column", "sound", "--caption_column", "text")
    rows = PreparedDataset.load(prepare(clips, pipeline, tmp_path / "rows", *flags))
    expected = [
        "a red circle a tone of 300 Hz",
        "a green circle",
        "a blue circle a tone of 900 Hz",
        "a white circle a tone of 1200 Hz",
    ]
    assert [*rows.dataset[rows.caption_column]] == expected
    stream = PreparedStream.load(prepare(clips, pipeline, tmp_path / "stream", *flags, "--streaming"))
    assert [row["caption"] for row in stream.open()] == expected
    with pytest.raises(BucketingError, match="Omit `audio_caption_column`: no effect without `with_audio`"):
        SourceConfig(dataset="a", audio_caption_column="sound", table=TableConfig(buckets="32,64"))


@pytest.mark.slow
@pytest.mark.parametrize("batches", [PACKS, BUCKETS], ids=["packs", "buckets"])
def test_a_stream_with_audio_resumes_exactly(
    batches: dict[str, Any], stream: Path, pipeline: Path, tmp_path: Path
) -> None:
    settings = {**batches, "streaming": True, "max_train_steps": 4, "checkpointing_steps": 3, "lora_rank": 2}
    whole = run(in_process(pipeline, stream, tmp_path, **settings))
    weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert any(".audio_attn1." in name and bool(values.any()) for name, values in weights.items())
    again = run(in_process(pipeline, stream, tmp_path, **settings, resume_from_checkpoint="latest"))
    assert again == whole
    card = (tmp_path / "README.md").read_text()
    assert "Video and its audio are trained together" in card


@pytest.mark.slow
def test_processes_with_and_without_audio_in_one_step_wait_for_no_gradient(
    prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    """In the last step, one process has a silent stack and the other one with audio."""
    flags = ("--train_batch_size", 1, "--max_train_steps", 2, "--max_sequence_length", TEXT_TOKENS)
    train(pipeline, prepared, tmp_path, *flags, num_processes=2)
    logs = [
        [row["index"][0] for row in map(json.loads, (tmp_path / "logs" / name).read_text().splitlines())]
        for name in ("samples-0.jsonl", "samples-1.jsonl")
    ]
    steps = [{*step} for step in zip(*logs, strict=True)]
    assert set().union(*steps) == {0, 1, 2, 3}
    assert [step for step in steps if 1 in step and len(step) == 2], "the silent clip meets one that has sound"


@pytest.mark.every
def test_two_processes_that_share_packs_with_audio_have_the_losses_of_one(
    prepared: Path, pipeline: Path, tmp_path: Path
) -> None:
    settings = {**PACKS, "num_train_epochs": 2, "max_train_steps": 4, "condition": "audio:0.2,video:0.2,none:0.6"}
    expected = run(in_process(pipeline, prepared, tmp_path / "one", **settings))
    train(pipeline, prepared, tmp_path / "two", *as_flags(**settings), "--context_parallel_degree", 2, num_processes=2)
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


def test_buckets_with_audio_are_not_shared_by_processes(prepared: Path, pipeline: Path, tmp_path: Path) -> None:
    check_audio(2, recipe_of(str(pipeline)), packed=True)
    with pytest.raises(BucketingError, match=r"Train packs .* it would attend to a part of the video alone"):
        check_audio(2, recipe_of(str(pipeline)), packed=False)


@pytest.mark.every
def test_tokens_that_fit_are_searched_with_audio(
    prepared: Path, cached: Path, pipeline: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, folder in (("files", prepared), ("cache", cached)):
        settings = {**PACKS, "max_tokens": "auto", "max_train_steps": 1}
        assert len(run(in_process(pipeline, folder, tmp_path / name, **settings))) == 1
        found = int(capfd.readouterr().out.split("--max_tokens auto found ")[1].split()[0])
        assert found >= 3 * (OWN_TOKENS + TOKENS), "the whole data set fits"


@pytest.mark.slow
def test_adapters_of_both_modalities_are_saved_and_rendered_with_sound(
    cached: Path, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation = {
        "validation_prompts": ["a red circle"],
        "validation_sizes": "9,32,64",
        "validation_fps": CLIP.fps,
        "validation_steps": 2,
        "validation_inference_steps": 1,
    }
    shares = "video:0.2,audio:0.2,none:0.6"
    run(
        in_process(
            pipeline, cached, tmp_path, **PACKS, **validation, lora_rank=2, validation_split=0.25, condition=shares
        )
    )
    weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    for module in ("attn1", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"):
        changed = [name for name in weights if f".{module}.to_q.lora" in name and bool(weights[name].any())]
        assert len(changed) == 4, module  # A and B of two blocks
    check_sound(tmp_path / "validation" / "step-2" / "9x32x64-a-red-circle.mp4", CLIP)
    card = (tmp_path / "README.md").read_text()
    assert "Video and its audio are trained together; samples without a track of sound train video alone." in card
    assert "Some samples train sound for their video or video for their sound" in card
    assert "| with audio | 2 |" in card, "one of three is held out"
    place = tmp_path / "place"
    place.mkdir()
    for folder in (pipeline, tmp_path):  # the card names them by the last part of their paths
        (place / folder.name).symlink_to(folder)
    monkeypatch.chdir(place)
    run_card(tmp_path, dtype="float32")
    check_sound(place / "video.mp4", CLIP)
    run_script_here(
        "sample_video.py",
        pipeline,
        "--with_audio",
        lora_weights=tmp_path,
        output=tmp_path / "clip.mp4",
        height=32,
        width=64,
        num_frames=9,
        fps=CLIP.fps,
        num_inference_steps=1,
        max_sequence_length=TEXT_TOKENS,
    )
    check_sound(tmp_path / "clip.mp4", CLIP)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frame_picking": "uniform"}, "by which frames are further apart than their sound"),
    ],
)
def test_what_does_not_go_with_audio_is_refused_by_name(
    settings: dict[str, Any], message: str, prepared: Path, pipeline: Path, tmp_path: Path, recipe: Recipe
) -> None:
    config = in_process(pipeline, prepared, tmp_path, **{**PACKS, **settings})
    with pytest.raises(BucketingError, match=message):
        make_data(config, recipe.spec, ModelTokens.of(recipe))


def test_a_weight_of_audio_needs_audio_and_audio_needs_a_model_that_makes_it(
    clips: Path, pipeline: Path, tiny_folder: Callable[[str], Path], tmp_path: Path, recipe: Recipe
) -> None:
    silent = prepare(clips, pipeline, tmp_path / "silent")
    config = in_process(pipeline, silent, tmp_path / "run", **PACKS, audio_weight=0.5)
    with pytest.raises(BucketingError, match=r"Omit `audio_weight`: .* prepared without --with_audio"):
        make_data(config, recipe.spec, ModelTokens.of(recipe))
    with pytest.raises(BucketingError, match="Audio is trained, but this data set has none"):
        recipe.check_conditions([])
    other = recipe_of(str(tiny_folder("wan")))
    with pytest.raises(BucketingError, match="Omit `with_audio`: the model makes video without audio"):
        preparation.prepare(
            SourceConfig(dataset=str(clips), with_audio=True, table=TableConfig(buckets="32,64")),
            spec=recipe.spec,
            audio=other.read_audio_rule(""),
        )
