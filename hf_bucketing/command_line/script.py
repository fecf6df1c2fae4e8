"""Run the main function of a script until it ends or is stopped; report any error once, in a line that names flags."""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ..errors import BucketingError, FlagError, Interrupted, WriteError
from ..files import explain
from .environment import keep_error
from .flags import FlagParser

_ENDED_BY = 128
"""Exit code of a program that a signal ended, less the signal's number, by the convention of shells."""

INTERRUPTED = _ENDED_BY + signal.SIGINT

NOTHING_LEFT = "Nothing half-written is left; run the same command again."
"""How to continue a script after Ctrl-C, if it has nothing else to say."""

_SECONDS_TO_CLEAN_UP = 10.0
_SECONDS_FOR_THE_MAIN_PROCESS = 10.0


def run_script(
    main: Callable[[argparse.Namespace], None],
    make_parser: Callable[[], FlagParser],
    *,
    words: Sequence[str] | None = None,
    program: str | None = None,
    interrupted: str = NOTHING_LEFT,
) -> None:
    """Parse the command line and run a script's main function; errors end it with a message instead of a traceback.

    A [`BucketingError`] ends the script with exit code 1, or 2 where the flags are wrong, and a message that names
    flags instead of arguments. Of several processes that `accelerate launch` started, the main one prints it, or a
    process that failed alone. Ctrl-C ends the script and the processes that it started, with exit code 130; a main
    function that handles signals itself raises [`Interrupted`], for 128 plus the signal's number. Progress bars are
    closed before a message.

    Args:
        main (callable): Main function, which takes the parsed flags.
        make_parser (callable): Function that returns the parser. Slow imports belong into it.
        words (sequence of `str`, *optional*): Flags and their values, by default those of this process.
        program (`str`, *optional*): How the script was started, by default as this process was.
        interrupted (`str`): How to continue after Ctrl-C, unless main raises [`Interrupted`] with a message.
    """
    flags: dict[str, str] = {}
    hide_known_lines()
    with _Interruption(interrupted) as interruption, _threads_in_one_line():
        try:
            parser = make_parser()
            parser.prog = program or started_as()
            flags = parser.flags
            main(parser.parse_args(words))
            return
        except (KeyboardInterrupt, Exception) as error:
            close_progress_bars()
            if interruption.happened or isinstance(error, Interrupted):  # libraries may turn it into their own errors
                message = interruption.message(error)
                code = _ENDED_BY + getattr(error, "number", signal.SIGINT)
            else:
                keep_error(error)
                if isinstance(error, BucketingError):
                    message, code = _text(error, flags), 2 if isinstance(error, FlagError) else 1
                elif reason := explain(error):
                    message, code = _text(WriteError(reason), flags), 1
                else:
                    raise
        _end(message, code)


def started_as() -> str:
    """Return how this process was started: `python` and a script, or `python -m` and a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python {sys.argv[0]}" if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


@contextmanager
def _threads_in_one_line() -> Iterator[None]:
    """Say in one line inside a `with` block that a thread, such as a tracker's, could not write a file."""
    before = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        reason = None if failed.exc_value is None else explain(failed.exc_value)
        if reason is None:
            before(failed)
        else:
            name = "A thread" if failed.thread is None else failed.thread.name
            print(f"{name} ended: {reason}", file=sys.stderr, flush=True)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def close_progress_bars() -> None:
    """Close the progress bars of this process, so that the next output starts a new line."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(tqdm.tqdm, "_instances", ())) if tqdm else []:
        bar.close()


def _text(error: BucketingError, flags: dict[str, str]) -> str:
    return f"{type(error).__name__}: {error.in_flags(flags)}"


class _Interruption:
    """Catch Ctrl-C once: raise KeyboardInterrupt, and end this process if that does not.

    Processes that this one forked end at once, as waiting for them may hang.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.happened = False

    def __enter__(self) -> _Interruption:
        self.process = os.getpid()
        self.before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.happened:
            signal.signal(signal.SIGINT, self.before)

    def message(self, error: BaseException | None = None) -> str:
        advice = str(error) if isinstance(error, Interrupted) else ""
        return f"Interrupted. {advice or self.advice}"

    def _interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            os._exit(INTERRUPTED)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.happened = True
        threading.Thread(target=self._end_late, daemon=True).start()
        raise KeyboardInterrupt

    def _end_late(self) -> None:
        time.sleep(_SECONDS_TO_CLEAN_UP)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"\n{self.message()}", file=sys.stderr, flush=True)
        _leave(INTERRUPTED)


def _end(message: str, code: int) -> NoReturn:
    """Print why the script ends, once for all its processes, and end it."""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    elif code < _ENDED_BY:
        # If the main process failed too, it prints its error, and the launcher ends this one meanwhile.
        time.sleep(_SECONDS_FOR_THE_MAIN_PROCESS)
        print(f"Process {rank} of {processes}: {message}", file=sys.stderr, flush=True)
    if processes > 1:
        _tell_launcher(f"See the message of process {rank} above.")
    if processes > 1 or code > _ENDED_BY:
        _leave(code)
    sys.exit(code)


def _tell_launcher(message: str) -> None:
    """Leave torchrun a line for its report, which otherwise advises to look for a traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": text}))


def _leave(code: int) -> NoReturn:
    """End this process and those that it started, without waiting for threads, collectives or pools.

    Exit handlers, such as those that release semaphores, run unless they hang.
    """
    for library in ("multiprocessing", "multiprocess"):  # the second is that of datasets
        if library in sys.modules:
            for child in sys.modules[library].active_children():
                child.kill()
    exiting = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    exiting.start()
    exiting.join(_SECONDS_TO_CLEAN_UP)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Without(logging.Filter):
    """Let all lines pass that do not hold a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


_LOGGED = {
    # One for each image processor that diffusers' imports touch; pipelines had the fallback before there was another.
    "transformers.utils.import_utils": _Without("requires torchvision (not installed); falling back to"),
    # At each import on a CPU, where no weights are in 4 bits.
    "bitsandbytes.backends.cpu.ops": _Without("Failed to load CPU gemm_4bit_forward"),
}
"""Filters, by the names of loggers."""

_WARNED = ("Mismatch dtype between input and weight",)
"""Beginnings of warnings: bf16 activations meet the float32 weights of norms, as diffusers keeps them."""


def hide_known_lines() -> None:
    """Hide these lines in this process and in those that it forks; all others are printed."""
    for name, without in _LOGGED.items():
        logging.getLogger(name).addFilter(without)
    for beginning in _WARNED:
        warnings.filterwarnings("ignore", message=beginning)


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
