"""Checkpoints and outputs that appear under their final name only when they are complete."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from safetensors import safe_open

from ..adapters.files import ADAPTER_FILES
from ..errors import BucketingError
from ..files import complete_folder, complete_parts, partial_path, remove_folders
from ..models.experts import transformers_of
from ..models.index import INDEX, MODULAR_INDEX, copy_index, read_index
from ..models.loading import vae_from_file
from ..models.recipe import Recipe
from ..placement.sharding import SHARDED

logger = get_logger(__name__)

PROGRESS = "progress.json"

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
"""Name of a folder that a run saves. Other names, as of copies, are those of their owner, and are left alone."""

LAYOUT = 4
"""Number that is raised when the files of a checkpoint, or their meaning, change. Layout 1 had no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a run that a checkpoint holds beside accelerate's own.

    Attributes:
        global_step (`int`): Finished optimizer steps.
        log (`dict`): State of [`RunLog`][hf_bucketing.runs.run_log.RunLog].
        settings (`dict`): Settings, from [`settings_of`][hf_bucketing.configuration.on_resume.settings_of].
        weights (`dict`): [`weights_fingerprints`][hf_bucketing.caching.fingerprints.weights_fingerprints] of the
            pipeline that the run began with.
    """

    global_step: int
    log: dict[str, int]
    settings: dict[str, Any]
    weights: dict[str, str]


class Checkpoint(NamedTuple):
    """A complete checkpoint to load."""

    path: Path
    progress: Progress


def save_checkpoint(accelerator: Accelerator, folder: Path, progress: Progress, *, limit: int | None) -> None:
    """Save accelerate's state and the progress of the run as `folder/checkpoint-{global_step}`.

    If there are then more than `limit` checkpoints, the oldest are removed.
    """
    start = time.perf_counter()
    final = folder / f"checkpoint-{progress.global_step}"
    is_main = accelerator.is_main_process
    with complete_folder(final, lock=False) if is_main else nullcontext(partial_path(final)) as partial:
        accelerator.wait_for_everyone()
        with without_accelerates_lines():
            deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
            accelerator.save_state(str(partial), **({"exclude_frozen_parameters": True} if deepspeed else {}))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / PROGRESS).write_text(json.dumps({"layout": LAYOUT, **asdict(progress)}))
            size = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    if accelerator.is_main_process:
        saved = [path for path in list_checkpoints(folder) if not path.is_symlink()]
        remove_folders(saved[: -limit if limit else 0])
        logger.info(f"Saved {final.name} ({size / 2**20:.1f} MiB) in {time.perf_counter() - start:.1f} s")


def load_state(accelerator: Accelerator, checkpoint: Path) -> None:
    """Load what [`save_checkpoint`] saved.

    Raises:
        BucketingError: If a file of the checkpoint is missing or damaged; the message names it.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    # accelerate passes over missing random states in silence. Those of the first process are in every checkpoint.
    needed = ["random_states_0.pkl", *(f"custom_checkpoint_{i}.pkl" for i in range(len(accelerator._custom_objects)))]
    for name in needed:
        if not (checkpoint / name).is_file():
            raise _unusable(checkpoint, f"there is no {name}")
    try:
        accelerator.load_state(str(checkpoint), **({"load_module_strict": False} if deepspeed else {}))
    except BucketingError:
        raise
    except FileNotFoundError as error:
        raise _unusable(checkpoint, f"there is no {Path(str(error.filename)).name}") from error
    except Exception as error:
        if damaged := [path for path in sorted(checkpoint.rglob("*")) if _is_damaged(path)]:
            raise _unusable(checkpoint, f"{damaged[0].relative_to(checkpoint)} is damaged or cut off") from error
        raise


def _is_damaged(path: Path) -> bool:
    """Return whether a file of tensors cannot be read; of torch's, all bytes are compared with their checksums."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return False
        if path.suffix in (".bin", ".pkl", ".pt"):
            with zipfile.ZipFile(path) as archive:
                return archive.testzip() is not None
    except Exception:  # damage raises errors of every kind
        return True
    return False


def _unusable(checkpoint: Path, reason: str) -> BucketingError:
    others = [path.name for path in list_checkpoints(checkpoint.parent) if path.name != checkpoint.name]
    return BucketingError(
        f"{checkpoint} cannot be loaded: {reason}. Copy it anew if it is a copy, give another checkpoint "
        f"({', '.join(others) or 'there is none'}) as `resume_from_checkpoint`, or start a new run in another "
        "`output_dir`."
    )


@contextmanager
def without_accelerates_lines() -> Iterator[None]:
    """Silence accelerate's INFO line per saved file inside a `with` block; warnings still show."""
    accelerates = logging.getLogger("accelerate")
    level = accelerates.level
    accelerates.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        accelerates.setLevel(level)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest first."""
    steps = {path: step for path in folder.glob("checkpoint-*") if (step := checkpoint_step(path)) is not None}
    return sorted((path for path in steps if (path / PROGRESS).is_file()), key=steps.__getitem__)


def checkpoint_step(path: Path) -> int | None:
    """Return the optimizer step in the name of a checkpoint; None if a run gives no such name."""
    name = _NAME.fullmatch(path.name)
    return None if name is None else int(name[1])


def list_results(folder: Path) -> list[str]:
    """Return the files in a folder that are the result of a finished run."""
    of_experts = (f"{name}/{file}" for name in transformers_of("both") for file in ADAPTER_FILES)
    return [name for name in (INDEX, MODULAR_INDEX, *ADAPTER_FILES, *of_experts) if (folder / name).is_file()]


def find_checkpoint(folder: Path, name: str) -> Checkpoint | None:
    """Return the checkpoint of a run by its name or path; None for `"latest"` if a new run must start.

    Job scripts that restart themselves ask for the latest checkpoint from their first start on, and may be stopped
    before one is saved. So `"latest"` without a checkpoint starts a new run with a warning, unless that would replace
    the result of a finished run.

    Raises:
        BucketingError: If the named checkpoint does not exist, is incomplete, damaged, renamed, of another run or of
            an earlier release, or there is none in a folder that holds a finished run.
    """
    checkpoints = list_checkpoints(folder)
    if name == "latest":
        if not checkpoints:
            _warn_of_new_run(folder)
            return None
        path = checkpoints[-1]
    else:
        path = Path(name) if (Path(name) / PROGRESS).is_file() else folder / name
    if not (path / PROGRESS).is_file():
        raise BucketingError(
            f"{path} is no complete checkpoint; {folder} has {[saved.name for saved in checkpoints] or 'none'}. "
            'Name one of them, or "latest".'
        )
    if path.resolve().parent != folder.resolve():
        raise BucketingError(
            f"{path} belongs to the run in {path.resolve().parent}, and a resumed run continues its logs and "
            f"checkpoints; give that folder as --output_dir, not {folder}."
        )
    progress = _read_progress(path)
    if checkpoint_step(path) not in (None, progress.global_step):
        raise BucketingError(
            f"{path} was saved after optimizer step {progress.global_step} and renamed since. Name it "
            f"checkpoint-{progress.global_step}, or checkpoint-{progress.global_step}-copy if it is a copy."
        )
    return Checkpoint(path, progress)


def _warn_of_new_run(folder: Path) -> None:
    """Warn that there is nothing to resume.

    Raises:
        BucketingError: If the folder holds the result of a finished run.
    """
    if results := list_results(folder):
        raise BucketingError(
            f"{folder} holds the result of a finished run ({', '.join(results)}) and no complete checkpoint; starting "
            "a new run would replace it. Give another --output_dir, or omit --resume_from_checkpoint to replace it."
        )
    losses = folder / "logs" / "losses.jsonl"
    lost = len(losses.read_text().splitlines()) if losses.is_file() else 0
    details = f"; the {lost} optimizer steps in its logs were not saved and are lost" if lost else ""
    logger.warning(f"{folder} has no checkpoint to resume{details}. Starting a new training run.")


def _read_progress(path: Path) -> Progress:
    try:
        values: dict[str, Any] = json.loads((path / PROGRESS).read_text())
    except ValueError as error:
        raise _unusable(path, f"{PROGRESS} is damaged or cut off") from error
    layout = values.pop("layout", 1)
    if layout != LAYOUT:
        raise BucketingError(
            f"{path} has layout {layout} of another release of hf_bucketing; this one reads layout {LAYOUT}. Resume "
            "with the release that saved it, or start a new run in another --output_dir."
        )
    return Progress(**values)


def gather_weights(accelerator: Accelerator, transformer: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return all weights of a sharded model in the main process, or None; call it on every process."""
    if accelerator.distributed_type not in SHARDED:
        return None
    state: dict[str, torch.Tensor] = accelerator.get_state_dict(transformer)
    return state


def save_pipeline(
    recipe: Recipe, folder: Path, *, source: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Save a recipe's pipeline into `folder`, its index last, whose presence marks the pipeline as complete.

    What was not trained is copied from `source`, the folder that the pipeline was loaded from: it may be in memory in
    less precision, or not at all; a VAE that came from a file of its own, from there. Weights of a sharded transformer
    come from [`gather_weights`].
    """
    trained = {expert.trained: expert.transformer for expert in recipe.experts}
    if weights is not None:
        transformer = type(recipe.transformer).from_config(recipe.transformer.config)
        transformer.load_state_dict(weights)
        trained = {recipe.trained: transformer}
    saved = trained if recipe.vae_file is None else {**trained, "vae": vae_from_file(str(source), recipe.vae_file)}
    index = read_index(str(source))
    with complete_parts(folder, last=index.file_name) as partial:
        for name, model in saved.items():
            model.save_pretrained(str(partial / name))
        for name, entry in index.components.items():
            if entry.is_below(source) and name not in saved:
                shutil.copytree(source / entry.subfolder, partial / name)
        copy_index(source, partial, place=str(folder))
