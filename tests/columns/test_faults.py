"""All that is wrong with the rows of a data set is reported at once, and captions and files are treated apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_bucketing import LatentSpec
from hf_bucketing.columns.faults import Faults
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared_stream import prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig, Treatment
from hf_bucketing.errors import BucketingError, ColumnError, MediaError, RowsError
from hf_bucketing.media import write_video
from tests.conftest import run_script_here
from tests.media.test_media import numbered_frames

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = TableConfig(buckets="48,80", bucket_frames=[1, 9])
ROWS = [
    {"file_name": "good.mp4", "mask": "good.mp4"},
    {"file_name": "good.mp4", "mask": "good.mp4", "caption": None},
    {"file_name": "broken.mp4", "mask": "good.mp4", "caption": " "},
    {"file_name": "gone.mp4", "mask": "good.mp4"},
    {"file_name": "good.mp4", "mask": "good.mp4", "end": 9.0},
    {"file_name": "good.mp4", "mask": "gone.mp4"},
    {"file_name": "good.mp4", "mask": "gone.mp4", "caption": None},
]
LINES = [
    "3 of 7 captions in the column 'caption' are not text: 2 missing (row 1: good.mp4, row 6: good.mp4); "
    "1 empty (row 2: broken.mp4).",
    "2 of 7 files cannot be read: row 2: ",
    "1 clips do not lie in their files: row 4: 0.0 to 9.0 s of 2.000 s, good.mp4.",
    "2 of 7 rows have conditions that do not fit: row 5 (good.mp4): ",
]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """Rows of which only the first is good: the others lack a caption, file, clip or mask, some two of them."""
    write_video(tmp_path / "good.mp4", numbered_frames(24), fps=12)
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    lines = [json.dumps({"caption": "c", "start": 0.0, "end": 1.0, **row}) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows.jsonl"


def source(path: Path, **settings: Any) -> SourceConfig:
    return SourceConfig(dataset=str(path), table=TABLE, target_fps=12, clips="scenes", mask_column="mask", **settings)


def of_rows(config: SourceConfig) -> list[tuple[str, str]]:
    rows = prepare(config, spec=SPEC, say=lambda sentence: None).dataset
    return list(zip(rows["caption"][:], rows["rejection"][:], strict=True))


def of_stream(config: SourceConfig) -> list[tuple[str, str]]:
    stream, _ = prepare_stream(config, spec=SPEC, say=lambda sentence: None)
    return [(row["caption"], row["rejection"]) for row in stream.open()]


@pytest.mark.parametrize("read", [of_rows, of_stream])
def test_everything_is_counted_and_named_in_one_error(read: Callable, faulty: Path) -> None:
    with pytest.raises(RowsError) as raised:
        read(source(faulty))
    lines = sorted(str(raised.value).splitlines(), key=lambda line: [line.startswith(start) for start in LINES[::-1]])
    assert len(lines) == 4
    for line, start in zip(lines, LINES, strict=True):
        assert line.startswith(start)
    assert "broken.mp4" in lines[1]
    assert "gone.mp4 does not exist" in lines[1]
    assert "; row 6 (good.mp4): " in lines[3]
    assert [type(error) for error in raised.value.errors].count(ColumnError) == 2


@pytest.mark.parametrize("read", [of_rows, of_stream])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"on_error": "reject", "on_caption_error": "empty"},
            [("c", "none"), ("", "none"), ("", "unreadable"), ("c", "unreadable"), ("c", "clip"), ("c", "condition"),
             ("", "condition")],
        ),
        (
            {"on_error": "reject"},
            [("c", "none"), ("", "caption"), ("", "caption"), ("c", "unreadable"), ("c", "clip"), ("c", "condition"),
             ("", "caption")],
        ),
    ],
)  # fmt: skip
def test_captions_are_treated_apart_from_files(settings, expected, read: Callable, faulty: Path) -> None:
    assert read(source(faulty, **settings)) == expected


@pytest.mark.parametrize("read", [of_rows, of_stream])
@pytest.mark.parametrize(
    ("settings", "error", "kinds"),
    [
        ({"on_error": "empty"}, RowsError, ["files", "clips", "conditions"]),
        ({"on_caption_error": "reject"}, RowsError, ["files", "clips", "conditions"]),
        ({"on_error": "reject", "on_caption_error": "raise"}, ColumnError, ["captions"]),
    ],
)
def test_one_setting_ends_the_preparation_and_the_other_does_not(settings, error, kinds, read, faulty: Path) -> None:
    with pytest.raises(BucketingError) as raised:
        read(source(faulty, **settings))
    assert type(raised.value) is error
    words = {"captions": "are not text", "files": "files cannot be read", "clips": "do not lie", "conditions": "fit:"}
    assert [kind for kind, word in words.items() if word in str(raised.value)] == kinds


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert Treatment.of("empty", None) == Treatment.of("empty", "empty") == ("raise", "empty")
    for captions in ("raise", "reject"):
        with pytest.raises(BucketingError, match=f'`on_error="empty"` and `on_caption_error="{captions}"` contradict'):
            source(Path("rows.jsonl"), on_error="empty", on_caption_error=captions)
    with pytest.raises(BucketingError, match="`on_caption_error` must be one of"):
        source(Path("rows.jsonl"), on_caption_error="ignore")


def test_columns_that_differ_from_files_are_reported_with_missing_captions(faulty: Path) -> None:
    sizes = {"width": 80, "height": 48, "num_frames": 24, "fps": 12.0}
    rows = [{"file_name": "good.mp4", "caption": text, **sizes} for text in ("a", None, "b", "c")]
    rows[2]["width"] = rows[3]["height"] = 8
    faulty.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(RowsError) as raised:
        prepare(SourceConfig(dataset=str(faulty), table=TABLE), spec=SPEC, say=lambda sentence: None)
    captions, columns = str(raised.value).splitlines()
    assert captions.startswith("1 of 4 captions")
    assert columns.startswith("2 of 4 files that were checked have other sizes than their columns: row 2 (good.mp4)")
    assert "; row 3 (good.mp4) has " in columns


def test_the_faults_of_all_sources_are_reported_with_their_names(faulty: Path) -> None:
    config = SourceConfig(dataset=str(faulty), table=TABLE, name="first")
    gone = SourceConfig(dataset=str(faulty.parent / "nowhere"), table=TABLE, name="second")
    with pytest.raises(RowsError) as raised:
        prepare([config, gone], spec=SPEC, say=lambda sentence: None)
    first, second, third = str(raised.value).splitlines()
    assert first.startswith("first: 3 of 7 captions")
    assert second.startswith("first: 2 of 7 files cannot be read")
    assert third.startswith("second: ")
    assert "nowhere" in third


def test_the_script_prints_a_line_with_flags_for_each_kind(faulty: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    flags = ("--buckets", "48,80", "--bucket_frames", "1,9", "--target_fps", 12, "--clips", "scenes")
    common = ("--pretrained_model_name_or_path", pipeline_dir, *flags, "--mask_column", "mask", "--dataset", faulty)
    common = ("prepare_dataset.py", *common, "--output_dir", tmp_path / "out")
    ended = run_script_here(*common, check=False)
    assert ended.returncode == 1
    *_, captions, files, clips, conditions = ended.stderr.strip().splitlines()
    assert captions.endswith("--on_caption_error reject, or train them without a text with --on_caption_error empty.")
    assert files.endswith("Correct the files or their paths, or reject their rows with --on_error reject.")
    assert clips.endswith("or leave the clips out with --on_error reject.")
    assert conditions.endswith("or reject the rows with --on_error reject.")
    done = run_script_here(*common, "--on_error", "reject", "--on_caption_error", "empty")
    assert "rejected: caption" not in done.stdout
    assert "rejected: unreadable" in done.stdout


def collect(*reported: BucketingError, ends: Exception | None = None) -> None:
    with Faults() as faults:
        for error in reported:
            faults.report(error)
        if ends is not None:
            raise ends


def test_an_error_that_ends_the_block_is_raised_with_those_that_were_kept() -> None:
    collect()
    caption, file = ColumnError("A caption is missing."), MediaError("A file is gone.")
    for raised_alone in ({"ends": file}, {"ends": KeyError()}):
        with pytest.raises(type(raised_alone["ends"])):
            collect(**raised_alone)
    with pytest.raises(MediaError, match="A file is gone"):
        collect(file)
    for both in ([caption, file], [caption]):
        with pytest.raises(RowsError) as raised:
            collect(*both, ends=None if len(both) == 2 else file)
        assert raised.value.errors == (caption, file)
    with pytest.raises(KeyError):
        collect(file, ends=KeyError())
