"""Pipelines that cannot be trained: the reason is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.models.registry import recipe_of, refused_pipelines


@pytest.mark.parametrize("name", sorted(refused_pipelines()))
def test_a_pipeline_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(BucketingError, match=f"{name}, which cannot be trained: {refused_pipelines()[name][:40]}"):
        recipe_of(str(tmp_path))


def test_a_pipeline_without_a_recipe_is_refused_with_what_its_transformer_does(tmp_path: Path) -> None:
    index = {"_class_name": "SanaPipeline", "transformer": ["diffusers", "SanaTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        BucketingError, match=r"is a SanaPipeline; .* Its SanaTransformer2DModel .* attention is linear"
    ):
        recipe_of(str(tmp_path))
