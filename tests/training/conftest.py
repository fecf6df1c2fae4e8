"""Training in the process of the tests."""

from __future__ import annotations

import pytest
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Remove the state that accelerate keeps in a process, after each test."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
