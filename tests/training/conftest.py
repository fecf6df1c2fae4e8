"""Training in the process of the tests."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Remove the state that accelerate keeps in a process, before each test and after it."""
    reset()  # what fixtures that live longer have left
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
