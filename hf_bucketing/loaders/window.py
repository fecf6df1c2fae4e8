"""Random states at the start of a window of gradient accumulation, for checkpoints made inside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator


class WindowRandom:
    """Remembers the global random states with which the present window began, and saves them with accelerate's state.

    accelerate saves those of the moment. But a window that was not finished starts again, since no checkpoint holds
    gradients, and its dropout has to as well.

    Args:
        accelerator (`Accelerator`): Its `save_state` and `load_state` are followed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._states: dict[str, Any] | None = None
        self._loaded: Path | None = None
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(Path(folder)))
        accelerator.register_load_state_pre_hook(lambda models, folder: self._find(Path(folder)))

    def note(self) -> None:
        """Remember the present states: a window begins."""
        if self.accelerator.gradient_accumulation_steps > 1:
            self._states = _random_states()

    def restore(self) -> None:
        """Set the states of the window's start, if the checkpoint that is being loaded was made inside one."""
        if self._loaded is not None and self._loaded.is_file():
            _set_random_states(torch.load(self._loaded, weights_only=False))
        self._loaded = None

    def _save(self, folder: Path) -> None:
        if self._states is not None and not self.accelerator.sync_gradients:
            torch.save(self._states, self._file(folder))
        else:
            self._file(folder).unlink(missing_ok=True)

    def _find(self, folder: Path) -> None:
        self._loaded = self._file(folder)

    def _file(self, folder: Path) -> Path:
        return folder / f"window_random_{self.accelerator.process_index}.pkl"


def _random_states() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
