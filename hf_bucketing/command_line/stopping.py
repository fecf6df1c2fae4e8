"""Ctrl-C and SIGTERM while training: the first one lets the step end, so that it can be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_SECONDS_OF_ONE_CTRL_C = 3.0
"""torchrun's launcher sends its processes again what the terminal has sent to all of them."""


class StopSignals:
    """Note the first SIGINT or SIGTERM inside a `with` block; a second one does at once what it would do outside.

    Which process gets a signal differs: a terminal sends to all, a scheduler often to the first. So processes must
    compare [`number`][StopSignals] before they act on it.

    Signals reach a program's main thread alone; in other threads nothing is noted.

    Attributes:
        number (`int`): Number of the signal, 0 until there is one.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that was forked from this one has nothing to save
            os._exit(128 + number)
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            if int(os.environ.get("RANK", 0)) == 0:
                # print may be interrupted by this handler and would then raise.
                os.write(2, b"\nStopping after this step, to save it; Ctrl-C again ends at once.\n")
        elif "TORCHELASTIC_RUN_ID" not in os.environ or now - self._since > _SECONDS_OF_ONE_CTRL_C:
            self._restore()
            signal.raise_signal(number)
