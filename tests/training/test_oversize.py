"""Rows that fit no pack: a few are rejected by name and counted, and more end the run with a file and a way out."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_bucketing import BucketTable, LatentSpec, Size
from hf_bucketing.batching.rows import make_data, make_held_out_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.buckets.open_table import open_table
from hf_bucketing.columns import BucketColumns, PreparedDataset, map_columns
from hf_bucketing.errors import BucketingError, OversizeError
from hf_bucketing.training.loop import Trainer
from tests.training.training_cases import in_process

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
PACKED = {"batching": "pack", "strip_length": 16, "max_train_steps": 3}


def refuse(grid: tuple[int, int, int]) -> str | None:
    """Refuse what the positions of the tiny Wan model do not reach."""
    return f"A sample has a token grid of {grid}." if max(grid) > 128 else None


LIMITED, UNLIMITED = ModelTokens(width=96, refuse=refuse), ModelTokens(width=96)


def prepared(folder: Path, *, panoramas: int, width: int = 4096) -> Path:
    """Write a prepared folder of 40 images of 48 tokens, and panoramas of 256 tokens in their middle."""
    names = [*(f"{row}.png" for row in range(20)), *(f"pano{row}.png" for row in range(panoramas))]
    names += [f"{row}.png" for row in range(20, 40)]
    wide = np.array(["pano" in name for name in names])
    sizes = {
        "width": np.where(wide, width, 128),
        "height": np.where(wide, 16, 96),
        "num_frames": np.ones(len(names), int),
    }
    table = BucketTable(sizes=(Size(1, 96, 128),))
    rows = map_columns(Dataset.from_dict({"file_name": names, "caption": names, **sizes}), BucketColumns(table, SPEC))
    data = PreparedDataset(
        dataset=rows,
        table=table,
        open_table=open_table(SPEC),
        column="file_name",
        caption_column="caption",
        root="/media",
    )
    data.save(folder)
    return folder


@pytest.mark.parametrize(("tokens", "max_tokens", "why"), [
    (LIMITED, 700, r"A sample has a token grid of \(1, 1, 256\)\. Make the files smaller"),
    (UNLIMITED, 255, r"The largest takes 256 tokens, and a pack 255; raise --max_tokens"),
])  # fmt: skip
def test_one_row_that_fits_no_pack_is_rejected_by_name(
    tokens: ModelTokens,
    max_tokens: int,
    why: str,
    pipeline_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = prepared(tmp_path / "prepared", panoramas=1)
    config = in_process(pipeline_dir, folder, tmp_path, **PACKED, max_tokens=max_tokens)
    with caplog.at_level(logging.WARNING):
        data = make_data(config, SPEC, tokens)
    assert data.rejections.tolist().count("too_large") == 1
    assert "1 row fits no pack and is rejected as too_large: pano0.png." in caplog.text
    assert caplog.text.count("1 too_large") == 1, "the sampler counts it among the rejected rows"
    assert re.search(why, caplog.text)
    plan = data.sampler.plan(0)
    assert sorted(plan.indices.tolist()) == [row for row in range(41) if row != 20]
    assert plan.drop_reasons == {"rejected": 1}
    assert data.bucket_counts() == {int(data.bucket_ids[0]): 40}


def test_a_run_without_such_rows_is_unchanged(pipeline_dir: Path, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared(tmp_path / "p", panoramas=0), tmp_path, **PACKED, max_tokens=255)
    with_limits, without = (make_data(config, SPEC, tokens) for tokens in (LIMITED, UNLIMITED))
    assert with_limits.dataset._fingerprint == without.dataset._fingerprint
    assert with_limits.sampler.plan(0).indices.tolist() == without.sampler.plan(0).indices.tolist()
    assert with_limits.sampler.state_dict() == without.sampler.state_dict()


def test_many_rows_that_fit_no_pack_are_an_error_that_names_the_largest(pipeline_dir: Path, tmp_path: Path) -> None:
    """Two of 42 are few, and three of 43 are not."""
    for panoramas in (2, 3):
        folder = prepared(tmp_path / str(panoramas), panoramas=panoramas)
        config = in_process(pipeline_dir, folder, tmp_path, **PACKED, max_tokens=255)
        if panoramas == 2:
            assert make_data(config, SPEC, UNLIMITED).sampler.plan(0).kept == 40
            continue
        refused = r"pano0\.png takes 256 tokens and exceeds .*255` \(3 of 43.*--batching bucket"
        with pytest.raises(OversizeError, match=refused):
            make_data(config, SPEC, UNLIMITED)
    config = in_process(pipeline_dir, tmp_path / "3", tmp_path, **PACKED, max_tokens=700)
    with pytest.raises(BucketingError, match=r"cannot take the 3 samples of .*, such as pano0\.png: A sample has"):
        Trainer(config)


def test_held_out_rows_beyond_a_pack_are_measured_alone_and_those_beyond_the_model_rejected(
    pipeline_dir: Path, tmp_path: Path
) -> None:
    folder, other = (prepared(tmp_path / name, panoramas=number) for name, number in (("train", 0), ("held out", 1)))
    renamed = PreparedDataset.load(other)
    replace(renamed, root="/held-out").save(other)
    settings = {**PACKED, "max_tokens": 255, "validation_dataset_dir": str(other)}
    for tokens, kept in ((LIMITED, 40), (UNLIMITED, 41)):
        held_out = make_held_out_data(in_process(pipeline_dir, folder, tmp_path, **settings), SPEC, tokens)
        assert held_out is not None
        assert held_out.sampler.plan(0).kept == kept


def test_a_row_of_more_tokens_than_ids_of_sizes_hold_is_rejected_too(pipeline_dir: Path, tmp_path: Path) -> None:
    folder = prepared(tmp_path / "prepared", panoramas=1, width=16 * 2049)
    data = make_data(in_process(pipeline_dir, folder, tmp_path, **PACKED, max_tokens=255), SPEC, UNLIMITED)
    assert data.sampler.plan(0).kept == 40
    assert data.rejections.tolist().count("too_large") == 1
