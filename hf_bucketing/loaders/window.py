"""The start of a window of gradient accumulation, for checkpoints made inside it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import Accelerator

from ..errors import PlanError
from .trust import refuse_code

VERSION = 1
"""Version of the file of random states."""

Place = TypeVar("Place")


class AccumulationWindow(Generic[Place]):
    """Remember the place and the random states with which the present window of gradient accumulation began.

    A window that was not finished starts again, since no checkpoint holds gradients. Its dropout has to as well, but
    accelerate saves the random states of the moment; these are saved beside them. Each loader of an accelerator has
    its own place, and all share the random states.

    Args:
        accelerator (`Accelerator`): Its `save_state` and `load_state` are followed.
        start: The place at which the window begins.
    """

    def __init__(self, accelerator: Accelerator, start: Place) -> None:
        self.accelerator = accelerator
        self.start = start
        self._random = _RandomStates.of(accelerator)

    def enter(self, place: Place) -> None:
        """Begin a window at a place, unless the present one continues; call it before each batch is handed out."""
        if self.accelerator.sync_gradients:
            self.start = place
            if self.accelerator.gradient_accumulation_steps > 1:
                self._random.states = _random_states()

    def resume_from(self, place: Place) -> Place:
        """Return the place to save: `place` between two windows, else the start of the present one."""
        return place if self.accelerator.sync_gradients else self.start

    def restore(self, place: Place) -> None:
        """Begin a window at a loaded place, with the random states of its start if it was left unfinished."""
        self.start = place
        # accelerate keeps its place in the accumulation window in a file per process: absent where there are more
        # processes than before, and wrong for a window that starts again.
        self.accelerator.step = 0
        self._random.restore()


class _RandomStates:
    """Save the random states of the start of an accelerator's window, and load them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.states: dict[str, Any] | None = None
        self._loaded: Path | None = None
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(Path(folder)))
        accelerator.register_load_state_pre_hook(lambda models, folder: self._find(Path(folder)))

    @classmethod
    def of(cls, accelerator: Accelerator) -> _RandomStates:
        """Return those of an accelerator, the same for all its loaders."""
        if not hasattr(accelerator, "_window_random_states"):
            accelerator._window_random_states = cls(accelerator)
        states: _RandomStates = accelerator._window_random_states
        return states

    def restore(self) -> None:
        if self._loaded is not None and self._loaded.is_file():
            _set_random_states(_read_window(self._loaded))
        self._loaded = None

    def _save(self, folder: Path) -> None:
        if self.states is not None and not self.accelerator.sync_gradients:
            self._file(folder).write_text(json.dumps(self.states))
        else:
            self._file(folder).unlink(missing_ok=True)

    def _find(self, folder: Path) -> None:
        refuse_code(folder)
        self._loaded = self._file(folder)
        if self._loaded.with_suffix(".pkl").is_file():
            raise PlanError(
                f"An earlier release wrote {self._loaded.with_suffix('.pkl')}; resume with it, or from a checkpoint "
                "between two windows of gradient accumulation."
            )

    def _file(self, folder: Path) -> Path:
        return folder / f"window_random_{self.accelerator.process_index}.json"


def _random_states() -> dict[str, Any]:
    """Return the states as JSON values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "version": VERSION,
        "random": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None,
    }


def _read_window(path: Path) -> dict[str, Any]:
    try:
        states: dict[str, Any] = json.loads(path.read_text())
        version = states["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} does not hold random states: {error}; take the checkpoint anew.") from error
    if version != VERSION:
        raise PlanError(
            f"{path.name} has version {version}, this release reads version {VERSION}; resume with the release that "
            "saved it, or from a checkpoint between two windows of gradient accumulation."
        )
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    kind, keys, gauss = states["random"]
    random.setstate((kind, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
