"""Prompts rendered while training: mp4 files, and frames for the tracker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from ..buckets.sizes import LatentSpec, Size
from ..errors import BucketingError
from ..media.write import write_video
from ..models.recipe import Recipe

_FRAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Renders every prompt at every size with the pipeline that would be saved now.

    Args:
        prompts (sequence of `str`): What to render.
        sizes (sequence of [`Size`][hf_bucketing.Size]): Frames, height and width in pixels.
        num_inference_steps (`int`): Steps of the scheduler.
        guidance_scale (`float`): Of classifier-free guidance.
        fps (`float`): Of the files.
        seed (`int`): Every time the same noise.
        folder (`Path`): Receives `step-{n}/{size}-{prompt}.mp4`.
    """

    prompts: Sequence[str]
    sizes: Sequence[Size]
    num_inference_steps: int
    guidance_scale: float
    fps: float
    seed: int
    folder: Path

    def render(self, recipe: Recipe, accelerator: Accelerator, *, step: int) -> None:
        """Write a file per prompt and size, and log frames of it to the trackers; call it in the main process."""
        folder = self.folder / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        transformer, training = recipe.transformer, recipe.transformer.training
        transformer.eval()
        recipe.pipeline.set_progress_bar_config(disable=True)
        try:
            for size in self.sizes:
                for prompt in self.prompts:
                    with torch.no_grad(), accelerator.autocast():
                        frames = self._sample(recipe, prompt, size)
                    name = f"{size.frames}x{size.height}x{size.width}-{_file_name(prompt)}"
                    write_video(folder / f"{name}.mp4", frames, fps=self.fps)
                    shown = np.linspace(0, len(frames) - 1, min(_FRAMES_SHOWN, len(frames))).round().astype(int)
                    for tracker in accelerator.trackers:
                        if hasattr(tracker, "log_images"):
                            tracker.log_images({name: frames[shown]}, step=step, **_channels_last(tracker.name))
        finally:
            transformer.train(training)

    def _sample(self, recipe: Recipe, prompt: str, size: Size) -> np.ndarray:
        result = recipe.pipeline(
            prompt,
            height=size.height,
            width=size.width,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator().manual_seed(self.seed),
            output_type="np",
            **recipe.duration(size.frames),
        )
        return (np.asarray(result.frames[0]) * 255).round().astype(np.uint8)


def parse_sizes(text: str, spec: LatentSpec) -> list[Size]:
    """Parse `"frames,height,width;…"`.

    Raises:
        BucketingError: If a size is not of that form, or the model cannot make it.
    """
    sizes = []
    for part in text.split(";"):
        if not re.fullmatch(r"\s*\d+\s*,\s*\d+\s*,\s*\d+\s*", part):
            raise BucketingError(f'Expected `validation_sizes` as "frames,height,width;…", got {part!r}.')
        size = Size(*map(int, part.split(",")))
        if spec.snap(size) != size:
            raise BucketingError(
                f"The model cannot make {size}; the nearest that it can is {spec.snap(size)} (`validation_sizes`)."
            )
        sizes.append(size)
    return sizes


def _file_name(prompt: str) -> str:
    return re.sub(r"[^\w]+", "-", prompt).strip("-")[:60] or "empty"


def _channels_last(tracker: str) -> dict[str, str]:
    return {"dataformats": "NHWC"} if tracker == "tensorboard" else {}
