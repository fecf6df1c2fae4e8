"""Transformers whose weights lie in one file equal those of a pipeline's folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bucketing import BucketingError
from hf_bucketing.models.loading import Loading, empty_transformer
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.weight_files import TransformerFile, read_weights_of
from tests.models.weight_file_cases import (
    ORIGINAL_NAMES,
    PREFIX,
    matrices,
    original_state,
    scaled_float8,
    weights_of,
    write_file,
    write_gguf,
)


def load(folder: Path, file: Path | None = None, *, dtype: torch.dtype = torch.float32) -> Any:
    loading = Loading(
        parts=("trained",),
        trained_dtype=dtype,
        transformer_file=None if file is None else TransformerFile(path=str(file)),
    )
    return recipe_of(str(folder)).load(str(folder), loading=loading).transformer


def assert_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    one, two = model.state_dict(), other.state_dict()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.dtype == two[name].dtype, name
        torch.testing.assert_close(value, two[name], rtol=0, atol=0, msg=name)


def configurations_of(folder: Path, target: Path) -> Path:
    """Return a copy of a pipeline without the weights of its transformer."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("diffusion_pytorch_model*"))
    return target


@pytest.mark.parametrize("family", ORIGINAL_NAMES)
def test_a_file_of_original_names_equals_the_folder(
    family: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder(family)
    without = configurations_of(folder, tmp_path / "configs")
    file = write_file(tmp_path / "model.safetensors", original_state(family, weights_of(folder)))
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal(load(without, file, dtype=dtype), load(folder, dtype=dtype))
