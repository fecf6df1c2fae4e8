"""Training image-to-video: from files and from caches, in both ways of batching, and what stock diffusers renders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_bucketing import BucketingError
from hf_bucketing.media import MediaSource, iter_frames, probe
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from hf_bucketing.training.loop import Trainer
from tests.conftest import run_script_here
from tests.training.training_cases import in_process, run

CLIPS = (Clip(9, 64, 96, 8), Clip(5, 96, 64, 8), Clip(9, 64, 64, 8))
PACK = {"batching": "pack", "max_tokens": 300, "strip_length": 16, "train_batch_size": 4}
TEXT = {"max_sequence_length": None}
"""With image embeddings, captions have 512 tokens."""


@pytest.fixture(scope="module")
def folders(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Videos, images beside videos, and three pipelines."""
    folder = tmp_path_factory.mktemp("image-to-video")
    made = {name: tiny_folder(name) for name in ("wan-i2v", "wan-2.2-ti2v")}
    made |= {"videos": folder / "videos", "mixed": folder / "mixed"}
    make_media_dataset(made["videos"], num_samples=6, clips=CLIPS)
    make_media_dataset(made["mixed"], num_samples=6, clips=(*CLIPS[:2], Clip(1, 64, 64)))
    return made


def prepare(folders: dict[str, Path], data: str, pipeline: str) -> Path:
    output = folders[data].with_name(f"{data} for {pipeline}")
    if not output.exists():
        flags = ("--target_fps", 8, "--bucket_frames", "1,5,9", "--buckets", "64,96;96,64;64,64")
        run_script_here(
            "prepare_dataset.py",
            *flags,
            dataset=folders[data],
            pretrained_model_name_or_path=folders[pipeline],
            output_dir=output,
        )
    return output


@pytest.mark.slow
def test_training_from_a_cache_of_conditions_is_training_from_files(folders, tmp_path: Path) -> None:
    prepared = prepare(folders, "videos", "wan-i2v")
    run_script_here(
        "cache_latents.py",
        dataset_dir=prepared,
        pretrained_model_name_or_path=folders["wan-i2v"],
        cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached",
        batching="pack",
    )
    settings = {**PACK, **TEXT, "lora_rank": 2, "max_train_steps": 4, "validation_split": 0.3}
    losses = run(in_process(folders["wan-i2v"], prepared, tmp_path / "files", random_crop=False, **settings))
    trainer = Trainer(in_process(folders["wan-i2v"], tmp_path / "cached", tmp_path / "out", **settings))
    assert trainer.recipe.pipeline.vae is None
    assert trainer.recipe.pipeline.image_encoder is None
    trainer.run()
    assert len(losses) == 4
    assert losses_of(tmp_path / "out") == pytest.approx(losses, abs=1e-4)
    files, cached = (Logs(tmp_path / name).held_out[-1] for name in ("files", "out"))
    assert cached["samples"] == files["samples"] == 2
    assert cached["validation_loss"] == pytest.approx(files["validation_loss"], abs=1e-4)
    save_first_frame(folders["videos"], tmp_path / "first.png")
    flags = ("--image", tmp_path / "first.png", "--num_frames", 5, "--height", 64, "--width", 96)
    lora = ("--lora_weights", tmp_path / "out", "--num_inference_steps", 1)
    run_script_here("sample_video.py", folders["wan-i2v"], *lora, *flags, "--output", tmp_path / "clip.mp4")
    assert probe(MediaSource.from_cell(str(tmp_path / "clip.mp4"))).num_frames == 5


def save_first_frame(data: Path, path: Path) -> None:
    video = next(iter(sorted(data.rglob("*.mp4"))))
    (frame,) = iter_frames(MediaSource.from_cell(str(video)), [0.0])
    Image.fromarray(frame).save(path)


@pytest.mark.slow
@pytest.mark.parametrize("batching", [{}, PACK], ids=["bucket", "pack"])
def test_a_trained_model_begins_with_the_image_as_closely_as_the_vae_returns_it(batching, folders, tmp_path) -> None:
    """Two epochs on videos and images, with renderings of an image; the saved pipeline is stock diffusers'."""
    from diffusers import WanImageToVideoPipeline

    prepared = prepare(folders, "mixed", "wan-2.2-ti2v")
    save_first_frame(folders["mixed"], tmp_path / "first.png")
    losses = run(in_process(
        folders["wan-2.2-ti2v"], prepared, tmp_path / "out", **batching, max_train_steps=None, num_train_epochs=2,
        validation_prompts=["a circle"], validation_images=[str(tmp_path / "first.png")], validation_steps=2,
        validation_sizes="5,64,96", validation_inference_steps=1, validation_guidance_scale=1.0,
    ))  # fmt: skip
    assert all(0 < loss < 10 for loss in losses), "neither silent zeros nor NaN, also of images"
    assert list((tmp_path / "out" / "validation").rglob("5x64x96-a-circle.mp4"))
    pipeline = WanImageToVideoPipeline.from_pretrained(tmp_path / "out")
    before = WanImageToVideoPipeline.from_pretrained(folders["wan-2.2-ti2v"])
    image = Image.open(tmp_path / "first.png").resize((96, 64))
    frames = [rendered(model, image) for model in (pipeline, before)]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    with torch.no_grad():
        decoded = before.vae.decode(before.vae.encode(pixels).latent_dist.mode()).sample[0, :, 0]
    expected = (decoded.clamp(-1, 1) / 2 + 0.5).permute(1, 2, 0).numpy()
    for clip in frames:
        assert np.abs(clip[0] - expected).max() < 1e-4
    assert np.abs(frames[0][1:] - frames[1][1:]).max() > 1e-3, "the model was trained"


@pytest.mark.slow
@pytest.mark.parametrize("batching", [{}, PACK], ids=["bucket", "pack"])
def test_a_run_of_mixed_conditions_resumes_exactly(batching, folders, tmp_path: Path) -> None:
    """Images, first frames, prefixes, keyframes and plain videos meet in a step."""
    prepared, pipeline = prepare(folders, "mixed", "wan-2.2-ti2v"), folders["wan-2.2-ti2v"]
    settings = {**batching, "max_train_steps": 4, "checkpointing_steps": 2, "lora_rank": 2}
    settings["condition"] = "first_frame:0.3,prefix:0.2,keyframes+last_frame:0.2,none:0.3"
    whole = run(in_process(pipeline, prepared, tmp_path / "out", **settings))
    resumed = run(in_process(pipeline, prepared, tmp_path / "out", **settings, resume_from_checkpoint="checkpoint-2"))
    assert resumed == whole
    assert whole != run(in_process(pipeline, prepared, tmp_path / "default", **{**settings, "condition": None}))


def test_a_condition_that_the_model_is_not_shown_ends_the_run_before_training(folders, tmp_path: Path) -> None:
    prepared = prepare(folders, "videos", "wan-i2v")
    settings = {**TEXT, "condition": "prefix:0.5,none:0.5"}
    with pytest.raises(BucketingError, match="must have one of `first_frame`, `prefix`"):
        Trainer(in_process(folders["wan-i2v"], prepared, tmp_path / "out", **settings))


def rendered(pipeline, image: Image.Image) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt="a circle", image=image, height=64, width=96, num_frames=5, num_inference_steps=1, guidance_scale=1.0,
        max_sequence_length=32, generator=torch.Generator().manual_seed(0),
    ).frames[0]  # fmt: skip


def test_images_are_refused_before_training_where_they_leave_nothing_to_predict(folders, tmp_path: Path) -> None:
    prepared = prepare(folders, "mixed", "wan-i2v")
    with pytest.raises(BucketingError, match=r"2 of the samples have fewer than the 2 frames.*without images"):
        Trainer(in_process(folders["wan-i2v"], prepared, tmp_path / "out", **TEXT))


def test_a_validation_prompt_without_its_image_is_refused_before_weights_are_loaded(
    folders, tmp_path: Path, monkeypatch
) -> None:
    from hf_bucketing.models.families.wan import WanImageToVideoRecipe

    monkeypatch.setattr(WanImageToVideoRecipe, "load", lambda *args, **options: pytest.fail("weights were loaded"))
    prepared = prepare(folders, "videos", "wan-i2v")
    settings = {**TEXT, "validation_prompts": ["red"], "validation_sizes": "5,64,96"}
    with pytest.raises(BucketingError, match="takes 1 per prompt in `validation_images`"):
        Trainer(in_process(folders["wan-i2v"], prepared, tmp_path / "out", **settings))
