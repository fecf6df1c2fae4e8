"""Training in the process of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.conftest import run_script_here


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Remove the state that accelerate keeps in a process, before each test and after it."""
    reset()  # what fixtures that live longer have left
    yield
    reset()


@pytest.fixture
def cached_dir(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> Path:
    """Return the prepared folder with its latents and texts cached."""
    run_script_here(
        "cache_latents.py",
        dataset_dir=prepared_dir,
        pretrained_model_name_or_path=pipeline_dir,
        cache_dir=tmp_path / "cache",
        output_dir=tmp_path / "cached",
        max_sequence_length=32,
    )
    return tmp_path / "cached"


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
