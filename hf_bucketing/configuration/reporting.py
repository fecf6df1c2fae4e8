"""Settings of what a run tells while it trains."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BucketingError, quoted
from ..settings import check_at_least, not_default


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
        given = not_default(self, "tracker_project_name", "tracker_run_name", "tracker_tags")
        if self.report_to == "none" and given:
            raise BucketingError(f"Omit {quoted(given)}: no effect with `report_to=none`.")
