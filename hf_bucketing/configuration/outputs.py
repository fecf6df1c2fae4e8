"""Settings of what comes of a run: held-out losses, renderings, checkpoints, reports, uploads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..buckets.sizes import Size
from ..errors import BucketingError, quoted
from ..settings import check_at_least, not_default, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: how often to save, how many to keep, and which one to resume.

    Args:
        checkpointing_steps (`int`, *optional*): Optimizer steps between checkpoints; by default none are saved.
        checkpoints_total_limit (`int`, *optional*): Number of checkpoints to keep; older ones are removed. By default
            all are kept.
        resume_from_checkpoint (`str`, *optional*): Name or path of the checkpoint to resume, or "latest", which starts
            a new run where none has been saved. By default a new run is started.

    Raises:
        BucketingError: On a number below 1.
    """

    checkpointing_steps: int | None = setting(None, common=True)
    checkpoints_total_limit: int | None = None
    resume_from_checkpoint: str | None = setting(None, common=True)

    def __post_init__(self) -> None:
        check_at_least(1, self, "checkpointing_steps", "checkpoints_total_limit")


_NO_NAME = 'expected "name" or "owner/name" of letters, digits, -, _ and .'


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Upload to the Hugging Face hub.

    The token is that of `hf auth login`, or the environment variable HF_TOKEN; it is written nowhere.

    Args:
        push_to_hub (`bool`): Whether to upload the pipeline or the adapters, with their model card, after training.
        hub_model_id (`str`, *optional*): Repository as "name" or "owner/name"; by default the name of `output_dir`, in
            the account that the token belongs to.
        hub_private_repo (`bool`, *optional*): Whether a repository that does not exist yet becomes private; by default
            what its owner chose for new repositories.

    Raises:
        BucketingError: If the repository has no usable name, or there is one without `push_to_hub`.
    """

    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = None

    def __post_init__(self) -> None:
        if not self.push_to_hub and (unused := not_default(self, "hub_model_id", "hub_private_repo")):
            raise BucketingError(f"Omit {quoted(unused)}: no effect without `push_to_hub`.")
        if self.hub_model_id is not None:
            from huggingface_hub.utils import HFValidationError, validate_repo_id

            try:
                validate_repo_id(self.hub_model_id)
            except HFValidationError as error:
                raise BucketingError(f"`hub_model_id` is {self.hub_model_id!r}; {_NO_NAME}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingConfig:
    """Trackers, and the page of a run.

    Args:
        report_to (`str`): Tracker of accelerate that receives losses and renderings, such as `"wandb"` or
            `"tensorboard"`, `"all"` for those that are installed, or `"none"`.
        tracker_project_name (`str`): Project of the run in its tracker, which for tensorboard is a folder.
        tracker_run_name (`str`, *optional*): Name of the run in wandb, and among the settings in all trackers; by
            default the tracker's own.
        tracker_tags (`list` of `str`, *optional*): Tags of the run in wandb, and among the settings in all trackers.
        page_steps (`int`, *optional*): Optimizer steps between writings of the run's page, run.html in `output_dir`,
            which refreshes itself in a browser while the run trains; by default none is written.
        log_tflops (`bool`, *optional*): Whether each step's log line has its TFLOP/s per process, for which a forward
            and a backward pass are traced before the first step, some seconds long; by default on GPUs alone.

    Raises:
        BucketingError: If a number of steps is below 1, or something is named for a tracker and there is none.
    """

    report_to: str = "tensorboard"
    tracker_project_name: str = "text-to-video"
    tracker_run_name: str | None = None
    tracker_tags: list[str] | None = None
    page_steps: int | None = None
    log_tflops: bool | None = None

    def __post_init__(self) -> None:
        check_at_least(1, self, "page_steps")
        unused = not_default(self, "tracker_project_name", "tracker_run_name", "tracker_tags")
        if self.report_to == "none" and unused:
            raise BucketingError(f"Omit {quoted(unused)}: no effect with `report_to=none`.")


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
