"""What trackers receive of a run, without a network: the wandb here is a stub."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import accelerate.tracking
import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.utils import LoggerType
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_bucketing import BucketingError
from hf_bucketing.configuration.outputs import ReportingConfig
from hf_bucketing.media.write import write_video
from hf_bucketing.training.trackers import chosen_tracker, start_trackers, track_rendering
from tests.training.training_cases import in_process, run

FRAMES = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((1, 32, 48, 3), 40, np.uint8)
TAGS = ["cats", "rank 8"]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Install a wandb that notes what it receives."""
    told = SimpleNamespace(begun={}, settings={}, logged=[])
    stub = ModuleType("wandb")
    stub.init = lambda **options: (
        told.begun.update(options)
        or SimpleNamespace(  # type: ignore[attr-defined]
            log=lambda values, step: told.logged.append((step, values)), finish=lambda: None
        )
    )
    stub.config = SimpleNamespace(update=lambda values, **_: told.settings.update(values))  # type: ignore[attr-defined]
    stub.Video = lambda path, format: (Path(path).read_bytes()[4:8], format)  # type: ignore[attr-defined]
    stub.Image = np.asarray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    return told


def test_wandb_gets_project_name_tags_losses_and_videos(wandb, pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    named = {"tracker_project_name": "cats", "tracker_run_name": "first", "tracker_tags": TAGS}
    rendered = {"validation_prompts": ["red"], "validation_steps": 1, "validation_inference_steps": 1}
    config = in_process(
        pipeline_dir, prepared_dir, tmp_path, report_to="wandb", max_train_steps=1, validation_sizes="5,32,48",
        **named, **rendered,
    )  # fmt: skip
    (loss,) = run(config)
    assert wandb.begun == {"project": "cats", "name": "first", "tags": TAGS}
    assert (wandb.settings["tracker_tags"], wandb.settings["tracker_run_name"]) == ("cats; rank 8", "first")
    assert wandb.logged[0][0] == 1
    assert wandb.logged[0][1]["train_loss"] == loss
    assert wandb.logged[1] == (1, {"5x32x48-red": (b"ftyp", "mp4")})


def test_a_tracker_of_pictures_gets_pictures(wandb, pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=chosen_tracker("wandb"))
    start_trackers(accelerator, in_process(pipeline_dir, prepared_dir, tmp_path, report_to="wandb"))
    track_rendering(accelerator.trackers[0], tmp_path / "a.png", FRAMES[:1], fps=8, step=2)
    ((step, logged),) = wandb.logged
    assert step == 2
    assert np.array_equal(logged["a"][0], FRAMES[0])
    assert wandb.begun == {"project": "text-to-video"}


def test_tensorboard_shows_a_video_and_a_picture(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=chosen_tracker("tensorboard"), project_dir=tmp_path)
    config = in_process(
        pipeline_dir, prepared_dir, tmp_path, report_to="tensorboard", tracker_project_name="cats", tracker_tags=TAGS
    )
    start_trackers(accelerator, config)
    (tracker,) = accelerator.trackers
    write_video(tmp_path / "clip.mp4", FRAMES, fps=8)
    track_rendering(tracker, tmp_path / "clip.mp4", FRAMES, fps=8, step=3)
    track_rendering(tracker, tmp_path / "picture.png", FRAMES[2:3], fps=8, step=3)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "cats"))
    events.Reload()
    ((clip,), (picture,)) = (events.Images(tag) for tag in ("clip", "picture"))
    assert (clip.step, clip.width, clip.height) == (3, 48, 32)
    shown = Image.open(io.BytesIO(clip.encoded_image_string))
    assert (shown.format, shown.n_frames, shown.info["duration"]) == ("GIF", 5, 120)  # of 125, in hundredths
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.encoded_image_string))), FRAMES[2])


def test_a_tracker_that_is_unknown_or_not_installed_is_refused() -> None:
    assert (chosen_tracker("none"), chosen_tracker("all")) == (None, "all")
    with pytest.raises(BucketingError, match="no tracker of accelerate; did you mean tensorboard"):
        chosen_tracker("tensorbord")
    with pytest.raises(BucketingError, match="`report_to` is comet_ml, which is not installed: pip install comet-ml"):
        chosen_tracker("comet_ml")
    with pytest.raises(BucketingError, match="Omit `tracker_tags`: no effect with `report_to=none`"):
        ReportingConfig(report_to="none", tracker_tags=TAGS)
