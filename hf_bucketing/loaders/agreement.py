"""Check that all processes of a run read and write the same: machines may have disks of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import BucketingError


def check_same(accelerator: Accelerator, values: Mapping[str, str], *, what: str, advice: str) -> None:
    """Raise on every process unless all hold the same values; call it on every process.

    Args:
        accelerator (`Accelerator`): The run's accelerator.
        values (mapping of `str` to `str`): What must be equal, by name.
        what (`str`): What processes may have of their own, such as "rows".
        advice (`str`): What the person can do.

    Raises:
        BucketingError: If the values of a process differ from those of the first.
    """
    if accelerator.num_processes == 1:
        return
    first, *others = gather_object([values])
    for process, other in enumerate(others, 1):
        names = [name for name in first if first[name] != other.get(name)]
        if names:
            differences = ", ".join(f"{name} {first[name]} and {other.get(name)}" for name in names)
            raise BucketingError(
                f"Processes 0 and {process} have different {what}: {differences}. If they are on machines with disks "
                f"of their own, {advice}."
            )


def check_shared(accelerator: Accelerator, folder: Path, *, advice: str) -> None:
    """Raise on every process unless all see the same folder; call it on every process.

    Args:
        accelerator (`Accelerator`): The run's accelerator.
        folder (`Path`): The folder, which the main process makes where it is missing.
        advice (`str`): Why it must be one folder, and what the person can do.

    Raises:
        BucketingError: If a process does not see a file that the main process writes there.
    """
    if accelerator.num_processes == 1:
        return
    trial = folder / broadcast_object_list([f".seen-by-all-{time.time_ns()}"])[0]
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
    accelerator.wait_for_everyone()
    seen = gather_object([trial.exists()])
    if accelerator.is_main_process:
        trial.unlink()
    if not all(seen):
        raise BucketingError(
            f"Process {seen.index(False)} does not see what the main process writes to {folder}; {advice}."
        )
