"""Refuse checkpoints whose pickles could run code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.utils import load

from ..errors import BucketingError


def refuse_code(folder: Path) -> None:
    """Check the pickles of a checkpoint before accelerate loads them.

    What is registered with `register_for_checkpointing` accelerate unpickles whatever it holds, and a file of random
    states that holds code it passes over in silence. Its other files it reads as plain values, or as safetensors.

    Raises:
        BucketingError: If a file holds more than plain values, tensors and numpy arrays.
    """
    for path in sorted(folder.glob("*.pkl")):
        with only_values(path):
            load(str(path), map_location="cpu", mmap=True)  # weights_only, without reading the tensors


@contextmanager
def only_values(path: Path) -> Iterator[None]:
    """Turn what unpickling without running code says of a file in a `with` block into an error that names it.

    Raises:
        BucketingError: If the file holds more than plain values, tensors and numpy arrays.
    """
    try:
        yield
    except Exception as error:  # damaged pickles raise errors of every kind
        raise BucketingError(
            f"{path} holds more than plain values and tensors, or is damaged, so loading it could run code; it "
            "was not loaded. Take the checkpoint from the run that saved it."
        ) from error
