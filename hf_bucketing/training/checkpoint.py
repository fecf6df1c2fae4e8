"""Checkpoints and outputs that appear under their final name only when they are complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..errors import BucketingError
from ..files import complete_folder, complete_parts, partial_path

PROGRESS = "progress.json"

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""Ways of training in which no process holds all weights."""


def save_checkpoint(accelerator: Accelerator, folder: Path, progress: Mapping[str, Any], *, limit: int | None) -> None:
    """Save accelerate's state and the progress of the run as `folder/checkpoint-{global_step}`.

    Args:
        accelerator (`Accelerator`): With everything prepared or registered that is to be saved.
        folder (`Path`): Output folder of the run.
        progress (mapping): JSON values; holds `global_step`.
        limit (`int`, *optional*): Checkpoints to keep, this one included; older ones are removed.
    """
    final = folder / f"checkpoint-{progress['global_step']}"
    with complete_folder(final) if accelerator.is_main_process else nullcontext(partial_path(final)) as partial:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / PROGRESS).write_text(json.dumps(progress))
    if accelerator.is_main_process:
        for old in list_checkpoints(folder)[: -limit if limit else 0]:
            shutil.rmtree(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if (path / PROGRESS).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def load_checkpoint(accelerator: Accelerator, folder: Path, name: str) -> dict[str, Any] | None:
    """Load a checkpoint and return its progress; None if `"latest"` is asked for and there is none yet.

    Raises:
        BucketingError: If a checkpoint named by its path does not exist or is incomplete.
    """
    checkpoints = list_checkpoints(folder)
    if name == "latest":
        if not checkpoints:
            return None
        path = checkpoints[-1]
    else:
        path = Path(name) if (Path(name) / PROGRESS).is_file() else folder / name
    if not (path / PROGRESS).is_file():
        raise BucketingError(
            f"{path} is no complete checkpoint; {folder} has {[found.name for found in checkpoints] or 'none'}. "
            'Name one of them, or "latest".'
        )
    accelerator.load_state(str(path))
    progress: dict[str, Any] = json.loads((path / PROGRESS).read_text())
    return progress


def gather_weights(accelerator: Accelerator, transformer: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return all weights of a model that is sharded over processes, in the main one; None of one that is not.

    Call it on every process.
    """
    if accelerator.distributed_type not in SHARDED:
        return None
    state: dict[str, torch.Tensor] = accelerator.get_state_dict(transformer)
    return state


def save_pipeline(
    pipeline: Any, folder: Path, *, weights: dict[str, torch.Tensor] | None = None, component: str = "transformer"
) -> None:
    """Save a diffusers pipeline into `folder`, `model_index.json` last: with it, the pipeline is complete.

    Args:
        pipeline (`DiffusionPipeline`): With the trained transformer.
        folder (`Path`): Where to write.
        weights (mapping, *optional*): From [`gather_weights`]: those of a transformer that is sharded.
        component (`str`): Name of the transformer in the pipeline.
    """
    if weights is not None:
        sharded = getattr(pipeline, component)
        whole = type(sharded).from_config(sharded.config)
        whole.load_state_dict(weights)
        setattr(pipeline, component, whole)
    with complete_parts(folder, last="model_index.json") as partial:
        pipeline.save_pretrained(str(partial))
