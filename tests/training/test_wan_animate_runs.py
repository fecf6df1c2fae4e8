"""Runs of Wan-Animate from files to a render: rows with and without masks, in batches and packs, also resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_bucketing import BucketingError
from hf_bucketing.media import MediaSource, probe, write_video
from hf_bucketing.runs.review import losses_of
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from tests.conftest import run_script_here
from tests.training.training_cases import count_samples, in_process, run

pytestmark = pytest.mark.slow

NUM_SAMPLES = 8
CLIPS = (Clip(9, 64, 96, 4), Clip(9, 96, 64, 4), Clip(5, 64, 96, 4), Clip(1, 64, 96))
COMMON = {"max_sequence_length": 512, "lora_rank": 2, "num_train_epochs": 2, "max_train_steps": None}
RUNS = {
    "bucket": {"train_batch_size": 2},
    "pack": {"batching": "pack", "max_tokens": 160, "strip_length": 8, "train_batch_size": 1},
}


def write(file: Path, frames: np.ndarray, fps: float) -> str:
    """Write a video, or an image if there is one frame, and return its name."""
    if len(frames) > 1:
        write_video(file.with_suffix(".mp4"), frames, fps=fps)
        return file.with_suffix(".mp4").name
    Image.fromarray(frames[0]).save(file.with_suffix(".png"))
    return file.with_suffix(".png").name


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight videos and images with poses, faces of 24×20 pixels, characters, and masks of every other one."""
    folder = tmp_path_factory.mktemp("media") / "clips"
    make_media_dataset(folder, num_samples=NUM_SAMPLES, clips=CLIPS)
    metadata, rows = folder / "metadata.jsonl", []
    for line in metadata.read_text().splitlines():
        row = json.loads(line)
        number = int(Path(row["file_name"]).stem)
        clip, rng = CLIPS[number % len(CLIPS)], np.random.default_rng(number)
        moving = rng.integers(0, 256, (clip.frames, clip.height, clip.width, 3), dtype=np.uint8)
        mask = np.zeros_like(moving)
        mask[:, :, clip.width // 2 :] = 255
        Image.fromarray(moving[0]).resize((72, 64)).save(folder / f"{number}-character.png")
        rows.append(
            row
            | {
                "pose": write(folder / f"{number}-pose", moving, clip.fps),
                "face": write(folder / f"{number}-face", moving[:, :20, :24], clip.fps),
                "mask": write(folder / f"{number}-mask", mask, clip.fps) if number % 2 else None,
                "character": f"{number}-character.png",
            }
        )
    metadata.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def prepared(clips: Path, tiny_folder: Callable[[str], Path]) -> Path:
    output = clips.parent / "prepared"
    columns = {"control": "pose", "face": "face", "mask": "mask", "reference": "character"}
    run_script_here(
        "prepare_dataset.py",
        dataset=clips,
        output_dir=output,
        pretrained_model_name_or_path=tiny_folder("wan-animate"),
        target_fps=4,
        buckets="32,48;48,32",
        bucket_frames="1,5,9",
        **{f"{name}_column": column for name, column in columns.items()},
    )
    return output


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", RUNS)
def test_a_run_of_both_modes_resumes_exactly_and_its_cache_trains_as_the_files(
    batching: str, prepared: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder("wan-animate")
    run_script_here(
        "cache_latents.py",
        dataset_dir=prepared,
        cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached",
        pretrained_model_name_or_path=pipeline,
        batching=batching,
        max_sequence_length=512,
    )
    settings = {**COMMON, **RUNS[batching], "checkpointing_steps": 2}
    losses = {}
    for name, data, own in (("files", prepared, {"random_crop": False}), ("cached", tmp_path / "cached", {})):
        out = tmp_path / name
        losses[name] = run(in_process(pipeline, data, out, **settings, **own))
        assert np.isfinite(losses[name]).all()
        assert [epoch.seen for epoch in count_samples(out)] == [NUM_SAMPLES] * 2
        run(in_process(pipeline, data, out, **settings, **own, resume_from_checkpoint="checkpoint-2"))
        assert losses_of(out) == losses[name]
    assert losses["cached"] == pytest.approx(losses["files"], rel=1e-4)
    card = (tmp_path / "files" / "README.md").read_text()
    for argument in ('pose_video=load_video("control.mp4")', 'face_video=load_video("face.mp4")'):
        assert argument in card
    assert 'image=load_image("reference.png")' in card


def test_a_run_shows_the_end_of_the_segment_before_and_refuses_prompts(
    prepared: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = {**COMMON, **RUNS["pack"], "max_train_steps": 2, "num_train_epochs": None}
    arguments = (tiny_folder("wan-animate"), prepared, tmp_path / "out")
    plain = run(in_process(*arguments, **settings))
    shown = run(in_process(*arguments, **settings, condition="prefix@1"))
    assert np.isfinite(shown).all()
    assert shown != plain
    with pytest.raises(BucketingError, match=r"Omit `validation_prompts`: .* needs videos of `control`, `face`"):
        run(in_process(*arguments, **settings, validation_prompts=["x"], validation_sizes="5,32,48"))


def test_the_script_animates_and_replaces(clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    common = {"control": clips / "0-pose.mp4", "face": clips / "0-face.mp4", "reference": clips / "0-character.png"}
    common |= {"num_inference_steps": 1, "max_sequence_length": 512, "height": 32, "width": 48, "fps": 4}
    pipeline = tiny_folder("wan-animate")
    for name, frames, shown in (
        ("animate", 5, {}),
        ("replace", 9, {"mask": clips / "1-mask.mp4", "background": clips / "0-pose.mp4"}),
    ):
        output = tmp_path / f"{name}.mp4"
        run_script_here("sample_video.py", pipeline, output=output, num_frames=frames, **common, **shown)
        assert probe(MediaSource.from_cell(str(output))).num_frames == frames
    for flags, message in (
        ({"mask": clips / "1-mask.mp4"}, "A mask says what stays of the background"),
        ({"background": clips / "0-pose.mp4"}, "A mask says what stays of the background"),
        ({"face": ""}, "give --face"),
    ):
        arguments = {**common, **flags, "num_frames": 5}
        failed = run_script_here("sample_video.py", pipeline, output=tmp_path / "no.mp4", **arguments, check=False)
        assert message in failed.stderr


@pytest.mark.every
def test_wan_animate_2_trains_in_half_precision_and_the_script_loads_its_lora(
    clips: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline = tiny_folder("wan-animate-2")
    run_script_here(
        "prepare_dataset.py",
        dataset=clips,
        output_dir=tmp_path / "prepared",
        pretrained_model_name_or_path=pipeline,
        target_fps=4,
        buckets="32,48;48,32",
        bucket_frames="1,5,9",
        control_column="pose",
        reference_column="character",
    )
    settings = {**COMMON, "max_train_steps": 2, "num_train_epochs": None, "condition": "prefix@1:0.5,none:0.5"}
    settings |= {"mixed_precision": "bf16", "gradient_checkpointing": True}
    for batching in RUNS.values():
        losses = run(in_process(pipeline, tmp_path / "prepared", tmp_path / "out", **settings, **batching))
        assert np.isfinite(losses).all()
    output = tmp_path / "animated.mp4"
    run_script_here(
        "sample_video.py",
        pipeline,
        adapter=tmp_path / "out",
        output=output,
        control=clips / "0-pose.mp4",
        reference=clips / "0-character.png",
        num_inference_steps=1,
        max_sequence_length=512,
        height=32,
        width=48,
        num_frames=5,
        fps=4,
    )
    assert probe(MediaSource.from_cell(str(output))).num_frames == 5
