"""Every documented layout of data is read without changes to its files, and docs/formats.md lists it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hf_bucketing.columns import MediaMetadata, PreparedDataset, check_captions, load_source, map_columns
from tests.columns.formats import FORMATS, SIZES, TEXTS, Format
from tests.conftest import ROOT, run_script_here

HEADER = "| data | documented by | `--dataset` |\n|---|---|---|\n"


def rows(loaded) -> list[tuple]:
    """Return caption, width, height and frames of each row."""
    captions = check_captions(loaded.dataset, loaded.caption_column)
    sized = map_columns(captions.dataset, MediaMetadata(loaded.column, root=loaded.root), overwrite=True)
    return [(row[captions.column], row["width"], row["height"], row["num_frames"]) for row in sized]


def given(case: Format, folder: Path) -> str:
    """Return what the case says to give as `--dataset`."""
    return shlex.split(case.give)[0].replace("FOLDER", str(folder))


@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_is_read_as_its_trainer_documents_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FORMATS[name]
    if name == "URLs":
        monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", f"file://{tmp_path}")
    case.write(tmp_path)
    loaded = load_source(given(case, tmp_path), **case.options)
    assert rows(loaded) == [(TEXTS[file], *SIZES[file]) for file in case.files]
    layout, example = loaded.describe().splitlines()
    assert f"{len(case.files)} " in layout
    assert TEXTS[case.files[0]] in example


def test_the_page_of_formats_lists_the_layouts_that_are_tested() -> None:
    table = HEADER + "".join(f"| {case.title} | {case.who} | `{case.give}` |\n" for case in FORMATS.values())
    assert table in (ROOT / "docs" / "formats.md").read_text(), f"docs/formats.md should hold:\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_script_prepares_what_the_table_says(
    name: str, tmp_path: Path, pipeline_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FORMATS[name]
    if name == "URLs":
        monkeypatch.setenv("HF_BUCKETING_ALLOWED_PATHS", f"file://{tmp_path}")
    folder = tmp_path / "data"
    folder.mkdir()
    case.write(folder)
    words = [word.replace("FOLDER", str(folder)) for word in shlex.split(case.give)]
    result = run_script_here(
        "prepare_dataset.py",
        *("--dataset", *words, "--pretrained_model_name_or_path", pipeline_dir, "--output_dir", tmp_path / "out"),
        *("--buckets", "16,32;32,48;48,16", "--bucket_frames", "1,5", "--target_fps", 8, "--max_upscale", 4),
    )
    prepared = PreparedDataset.load(tmp_path / "out")
    assert prepared.dataset[prepared.caption_column][:] == [TEXTS[file] for file in case.files]
    assert min(prepared.dataset["bucket_id"]) >= 0
    assert "row 0: " in result.stdout
