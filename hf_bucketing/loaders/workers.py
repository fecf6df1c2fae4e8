"""How the worker processes of a `DataLoader` start and end."""

from __future__ import annotations

import ast
import multiprocessing
import multiprocessing.spawn
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ..errors import BucketingError

_PRELOADED = [f"{__package__}.{module}" for module in ("fork_server", "check", "collators", "padding", "planned")]
"""What the fork server imports once for all workers; the package by itself imports nothing before it is used."""


def worker_options(num_workers: int) -> dict[str, Any]:
    """Return options of a `DataLoader` that start its workers from a process without threads.

    A worker that is forked from the training process copies the locks that the other threads hold at that moment.
    Before Python 3.12 this includes the lock of the interpreter's list of threads, which the threads of
    torch.distributed take briefly after each collective: the worker may then wait forever, and training with it. A
    fork server, the default of `multiprocessing` on Linux from Python 3.14 on, imports the library once and forks the
    workers. They end with the training process, even if that is killed, but not by a Ctrl-C or a SIGTERM that a
    terminal or a scheduler sends to them as well: the training process may still need their batches to end its step.

    The data set and the collator are pickled for the workers, and each worker imports the script. The script therefore
    needs `if __name__ == "__main__":`, and workers start sooner if `main` imports what only training needs.

    Args:
        num_workers (`int`): Number of worker processes of the loader.

    Returns:
        `dict`: `num_workers`, and where there is a fork server `multiprocessing_context` and `worker_init_fn`.

    Raises:
        BucketingError: If the running script has no `if __name__ == "__main__":`; importing it in a worker would run
            it again.

    Example:
        ```py
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, **worker_options(4))
        ```
    """
    if not num_workers or "forkserver" not in multiprocessing.get_all_start_methods():
        return {"num_workers": num_workers}  # Windows spawns workers, which copies no locks either
    _check_main_guard(num_workers)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return {"num_workers": num_workers, "multiprocessing_context": context, "worker_init_fn": _end_with_parent}


def _check_main_guard(num_workers: int) -> None:
    """Raise if workers would run the main script again; multiprocessing reports it only after they have failed.

    Programs that multiprocessing does not import (notebooks, `python -c`, a package's `__main__.py`) need no guard.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        return  # a worker that imports the script
    imported = multiprocessing.spawn.get_preparation_data("worker")
    name, file = imported.get("init_main_from_name"), getattr(sys.modules["__main__"], "__file__", None)
    by_path = "init_main_from_path" in imported
    if (name is None and not by_path) or (name or "").rpartition(".")[2] == "__main__" or not file:
        return
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # no source: a frozen or compiled program
        return
    tests = [part.test for part in body if isinstance(part, ast.If)]
    if any(isinstance(node, ast.Name) and node.id == "__name__" for test in tests for node in ast.walk(test)):
        return
    raise BucketingError(
        f'{file} has no `if __name__ == "__main__":`. Workers from a fork server import the script that started them, '
        "and would run it again: move its code into a function, and call that function below this line at the end of "
        f"the file. Or pass num_workers={num_workers} to the DataLoader instead of **worker_options({num_workers})."
    )


def _end_with_parent(worker_id: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in all threads that start from now on
        threading.Thread(target=_end_at_parents_signal, name="wait_for_signal", daemon=True).start()
    threading.Thread(target=_wait_for_parent, name="wait_for_parent", daemon=True).start()


def _end_at_parents_signal() -> None:
    """End this process at a SIGTERM of the process that started it; wait on at one of any other process."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


def _wait_for_parent() -> None:
    """End this process when the process that started it is gone; torch only watches the fork server."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
