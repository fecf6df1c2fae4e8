"""Kandinsky 6: distilled models and sound are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of


def test_distilled_models_are_refused_by_name(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "distilled"
    shutil.copytree(tiny_folder("kandinsky6"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "PiflowScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BucketingError, match="is distilled: it predicts a velocity for each step"):
        recipe_of(str(folder)).load(str(folder))


def test_sound_is_refused_by_name(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("kandinsky6"))
    recipe = recipe_of(folder).load(folder)
    recipe.check_conditions(["mask"])
    with pytest.raises(BucketingError, match="Kandinsky6TI2VAPipeline is not shown `audio`"):
        recipe.check_conditions(["audio"])
