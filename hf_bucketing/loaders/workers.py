"""How the worker processes of a `DataLoader` start and end."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any


def worker_options(num_workers: int) -> dict[str, Any]:
    """Return options of a `DataLoader` with which its workers start from a process without threads.

    A worker that is forked from the training process copies the locks that its other threads hold just then. Before
    Python 3.12 one of them is the lock of the interpreter's list of threads, which the threads of torch.distributed
    take for a moment after each collective: the worker may wait forever, and training with it. A fork server, which
    is `multiprocessing`'s default on Linux from Python 3.14, imports the library once and forks the workers from
    there. They end with the training process, even if that is killed.

    The data set and the collator travel to the workers by pickle, and each worker imports the script: it needs its
    `if __name__ == "__main__":`, and starts sooner if it imports in `main` what only training needs.

    Args:
        num_workers (`int`): Worker processes of the loader.

    Returns:
        `dict`: `num_workers`, and for workers from a server `multiprocessing_context` and `worker_init_fn`.

    Example:
        ```py
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, **worker_options(4))
        ```
    """
    if not num_workers or "forkserver" not in multiprocessing.get_all_start_methods():
        return {"num_workers": num_workers}  # Windows spawns workers, which copies no locks either
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__package__])
    return {"num_workers": num_workers, "multiprocessing_context": context, "worker_init_fn": _end_with_parent}


def _end_with_parent(worker_id: int) -> None:
    threading.Thread(target=_wait_for_parent, name="wait_for_parent", daemon=True).start()


def _wait_for_parent() -> None:
    """End this process when the one that asked for it is gone; torch watches the fork server instead."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)
