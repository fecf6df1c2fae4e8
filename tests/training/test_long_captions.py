"""Preparing, caching and training say once how many captions are longer than the text encoder takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import run_script_here


@pytest.mark.slow
def test_preparing_caching_and_training_count_captions_that_are_too_long(
    pipeline_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    captions = {"a.png": "a b " * 400, "b.png": "short", "c.png": "a b " * 600}
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in captions.items()]
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join(lines))
    for name in captions:
        Image.new("RGB", (64, 64)).save(tmp_path / "data" / name)
    model = {"pretrained_model_name_or_path": pipeline_dir}
    prepared, cached, out = (tmp_path / name for name in ("prepared", "cached", "out"))
    said = run_script_here(
        "prepare_dataset.py", dataset=tmp_path / "data", buckets="64,64", bucket_frames=1, output_dir=prepared, **model
    )
    counted = "Of 3 captions looked at, {} have more than the {} tokens (max_sequence_length)"
    assert said.stdout.count(counted.format(2, 512)) == 1
    assert "the longest, of row 2 (c.png), has " in said.stdout
    said = run_script_here(
        "cache_latents.py", dataset_dir=prepared, cache_dir=tmp_path / "cache", output_dir=cached, **model,
        max_sequence_length=3,
    )  # fmt: skip
    assert said.stdout.count(counted.format(3, 3)) == 1
    for folder in (prepared, cached):
        caplog.clear()
        run_script_here(
            "train_text_to_video.py", dataset_dir=folder, output_dir=out, dry_run=True, max_sequence_length=3,
            lora_rank=2, **model,
        )  # fmt: skip
        assert caplog.text.count(counted.format(3, 3)) == 1, folder
