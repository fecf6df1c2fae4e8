"""Trackers of accelerate: what they receive of a run, and pictures and videos for them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from PIL import Image

from ..configuration.outputs import ReportingConfig
from ..configuration.run import TrainingConfig
from ..errors import BucketingError, did_you_mean

_TRACKED_FRAMES = 8
"""Frames of a video that a tracker without videos receives as pictures."""


def chosen_tracker(name: str) -> str | None:
    """Return the tracker that a run reports to, as accelerate takes it.

    Raises:
        BucketingError: If accelerate has no tracker of this name, or its package is not installed.
    """
    known = [str(kind) for kind in LoggerType]
    if name == "none":
        return None
    if name not in known:
        raise BucketingError(f"`report_to` is {name}, which is no tracker of accelerate{did_you_mean(name, known)}")
    if name != "all" and name not in map(str, get_available_trackers()):
        raise BucketingError(f"`report_to` is {name}, which is not installed: pip install {name.replace('_', '-')}.")
    return name


def start_trackers(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Begin the run in its trackers, with its settings."""
    reporting: ReportingConfig = config.reporting
    named = {"name": reporting.tracker_run_name, "tags": reporting.tracker_tags}
    accelerator.init_trackers(
        reporting.tracker_project_name,
        config=_as_trackers_take_it(config.flat()),
        init_kwargs={"wandb": {name: value for name, value in named.items() if value is not None}},
    )


def _as_trackers_take_it(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as text and numbers."""
    values = {name: "none" if value is None else value for name, value in settings.items()}
    return {name: "; ".join(value) if isinstance(value, list) else value for name, value in values.items()}


def track_rendering(
    tracker: GeneralTracker, file: Path, frames: npt.NDArray[np.uint8], *, fps: float, step: int
) -> None:
    """Give a rendering to a tracker: a video to those that show one, else a picture or some frames.

    Args:
        tracker (`GeneralTracker`): Tracker of accelerate.
        file (`Path`): File of the rendering, whose name it has.
        frames (`uint8` array of shape `(frames, height, width, 3)`): Its frames.
        fps (`float`): Frames per second.
        step (`int`): Optimizer step after which it was rendered.
    """
    if len(frames) > 1 and tracker.name == "wandb":
        import wandb

        tracker.log({file.stem: wandb.Video(str(file), format="mp4")}, step=step)
    elif len(frames) > 1 and tracker.name == "tensorboard":
        tracker.writer.file_writer.add_summary(_animated(file.stem, frames, fps=fps), step)
    elif hasattr(tracker, "log_images"):
        indices = np.linspace(0, len(frames) - 1, min(_TRACKED_FRAMES, len(frames))).round().astype(int)
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        tracker.log_images({file.stem: frames[indices]}, step=step, **layout)


def _animated(name: str, frames: npt.NDArray[np.uint8], *, fps: float) -> Any:
    """Return a video as tensorboard shows one: an animated GIF among its images, without moviepy."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    first, *others = map(Image.fromarray, frames)
    data = io.BytesIO()
    first.save(data, "gif", save_all=True, append_images=others, duration=round(1000 / fps), loop=0)
    image = Summary.Image(
        height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=data.getvalue()
    )
    return Summary(value=[Summary.Value(tag=name, image=image)])
