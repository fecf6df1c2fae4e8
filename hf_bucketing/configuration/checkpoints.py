"""Settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import check_at_least, setting


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
