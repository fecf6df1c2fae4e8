"""docs/formats.md lists every layout of data that is tested, and the script prepares each as the page says.

`test_rows_and_streams.py` reads each of them, as rows and as a stream.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_bucketing.columns import PreparedDataset
from tests.columns.formats import FORMATS, TEXTS
from tests.conftest import ROOT, run_script_here

HEADER = "| data | documented by | `--dataset` |\n|---|---|---|\n"


def test_the_page_of_formats_lists_the_layouts_that_are_tested() -> None:
    table = HEADER + "".join(f"| {case.title} | {case.who} | `{case.give}` |\n" for case in FORMATS.values())
    assert table in (ROOT / "docs" / "formats.md").read_text(), f"docs/formats.md should hold:\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_script_prepares_what_the_table_says(
    name: str, tmp_path: Path, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
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
        dataset=words,
        pretrained_model_name_or_path=tiny_folder("wan" if case.references is None else "ltx"),
        output_dir=tmp_path / "out",
        buckets="16,32;32,48;48,16",
        bucket_frames="1,5",
        target_fps=8,
        max_upscale=4,
    )
    prepared = PreparedDataset.load(tmp_path / "out")
    assert prepared.dataset[prepared.caption_column][:] == [TEXTS[file] for file in case.files]
    assert min(prepared.dataset["bucket_id"]) >= 0
    if case.references is not None:
        assert [len(sizes) // 3 for sizes in prepared.dataset["reference_sizes"]] == list(case.references)
        assert "References: " in result.stdout
    assert "row 0: " in result.stdout
