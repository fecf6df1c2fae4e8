"""Settings of what a run saves, tells and uploads."""

from __future__ import annotations

from dataclasses import dataclass

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
