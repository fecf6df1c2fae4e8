"""Settings of what a run computes between its steps: the loss of held-out samples, and renderings of prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..buckets.sizes import Size
from ..errors import BucketingError, quoted
from ..settings import check_at_least, not_default, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutConfig:
    """Samples held out of training, and how often their loss is computed.

    They are taken without augmentation, each with its own caption, and with the same noise every time. One that cannot
    be read ends the run; with `on_error="replace"` it does not count, and is named.

    Args:
        validation_dataset_dir (`str`, *optional*): Prepared folder of samples whose loss is computed while training,
            made as that of `dataset_dir`, and cached if that is. By default there is none.
        validation_split (`float`, *optional*): Share of the rows of `dataset_dir`, above 0 and below 1, held out of
            training for that loss, in place of a folder. Whole files are held out, of images and of videos the same
            share, and the same files whatever the seed.
        validation_loss_steps (`int`): Optimizer steps between two computations of the held-out loss; the last step is
            followed by one too.
        validation_loss_on_start (`bool`): Whether it is also computed before the first step, of the model that the run
            begins with, to which later losses are compared by size and noise level.
        validation_noise_levels (`int`): Noise levels of each held-out sample, one of each of as many equally likely
            ranges of those that training draws.

    Raises:
        BucketingError: On an impossible value, both a folder and a share, or settings without effect.
    """

    validation_dataset_dir: str | None = None
    validation_split: float | None = setting(
        None,
        on_resume="equal",  # or the model would train on what was held out
        needs_rows="a share of rows can be held out only where all are known; give `validation_dataset_dir`",
    )
    validation_loss_steps: int = 500
    validation_loss_on_start: bool = True
    validation_noise_levels: int = 4

    def __post_init__(self) -> None:
        check_at_least(1, self, "validation_loss_steps", "validation_noise_levels")
        share = self.validation_split
        if share is not None and not 0 < share < 1:
            raise BucketingError(f"`validation_split` must be above 0 and below 1, got {share}.")
        if share is not None and self.validation_dataset_dir is not None:
            raise BucketingError(
                "`validation_dataset_dir` names the held-out samples, and `validation_split` takes them from "
                "`dataset_dir`; give one of them."
            )
        of_no_effect = ("validation_loss_steps", "validation_loss_on_start", "validation_noise_levels")
        if not self.given and (unused := not_default(self, *of_no_effect)):
            raise BucketingError(
                f"Omit {quoted(unused)}: no effect without `validation_dataset_dir` or `validation_split`."
            )

    @property
    def given(self) -> bool:
        """Whether samples are held out."""
        return self.validation_split is not None or self.validation_dataset_dir is not None


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
        validation_steps (`int`): Optimizer steps between renderings; the last step is followed by one too.
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
