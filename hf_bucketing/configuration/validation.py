"""Settings of renderings while training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..buckets.sizes import Size
from ..errors import BucketingError
from ..settings import check_at_least, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Prompts rendered while training.

    Args:
        validation_prompts (`list` of `str`, *optional*): Prompts to render, to mp4 or png files and the tracker; by
            default none.
        validation_images (`list` of `str`, *optional*): Files of the images that an image-to-video model begins the
            renderings with, one per prompt; with its last frame after it where the model takes both. Each is cropped
            to the sizes.
        validation_references (`list` of `str`, *optional*): Files of the references that edit and in-context models
            are shown with the prompts: as many for each prompt, those of the first prompt first. They have the sizes
            that references of the data set have.
        validation_sizes (`str`): Sizes to render each prompt at, as "frames,height,width;…" in pixels.
        validation_steps (`int`): Optimizer steps between renderings.
        validation_inference_steps (`int`): Scheduler steps of a rendering.
        validation_guidance_scale (`float`): Scale of classifier-free guidance in a rendering.
        validation_fps (`float`): Frame rate of the rendered files.

    Raises:
        BucketingError: If a number of steps is below 1, or there are images or references without prompts.
    """

    validation_prompts: list[str] | None = setting(None, common=True)
    validation_images: list[str] | None = None
    validation_references: list[str] | None = None
    validation_sizes: str = "17,480,832"
    validation_steps: int = 500
    validation_inference_steps: int = 30
    validation_guidance_scale: float = 5.0
    validation_fps: float = 16.0

    def __post_init__(self) -> None:
        check_at_least(1, self, "validation_steps", "validation_inference_steps")
        for name in ("validation_images", "validation_references"):
            if getattr(self, name) and not self.validation_prompts:
                raise BucketingError(f"Omit `{name}`: no effect without `validation_prompts`.")


def rendering_name(prompts: Sequence[str], number: int, size: Size) -> str:
    """Return the name, without its ending, of the file that a prompt, given by its position, is rendered to."""
    words = [re.sub(r"[^\w]+", "-", prompt).strip("-")[:60] or "empty" for prompt in prompts[: number + 1]]
    alike = words.count(words[number])
    return f"{size.frames}x{size.height}x{size.width}-{words[number]}{f'-{alike}' if alike > 1 else ''}"
