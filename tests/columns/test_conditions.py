"""Columns of conditions: which files fit a sample, and what happens to rows whose files do not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from hf_bucketing import BucketingError, ColumnError, LatentSpec, MediaError, PackCollator
from hf_bucketing.buckets.assignment import CONDITION_SIZE, count_rejections
from hf_bucketing.columns import PreparedDataset, map_columns
from hf_bucketing.columns.conditions import ConditionColumns, describe_stored_references
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.prepared_stream import PreparedStream, prepare_stream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.media import MediaColumns, write_video
from tests.conftest import run_script_here

pytestmark = pytest.mark.usefixtures("files_anywhere")

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = TableConfig(buckets="32,48", bucket_frames=[1, 9])


def video(path: Path, *, frames: int = 17, height: int = 40, width: int = 60, fps: int = 8) -> None:
    write_video(path, np.full((frames, height, width, 3), 128, np.uint8), fps=fps)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video of 17 frames at 8 fps, an image of its size, and conditions of all kinds."""
    folder = tmp_path_factory.mktemp("conditions")
    video(folder / "clip.mp4")
    video(folder / "slower.mp4", frames=9, fps=4)
    video(folder / "faster.mp4", frames=51, fps=24)
    video(folder / "small.mp4", height=14, width=20)  # 13⅓ rows, rounded to an even number
    video(folder / "short.mp4", frames=16)
    video(folder / "long.mp4", frames=24)
    video(folder / "wide.mp4", height=40, width=80)
    for name, size in {"image": (60, 40), "large": (121, 80), "square": (50, 50)}.items():
        Pictures.new("RGB", size).save(folder / f"{name}.png")
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


def marked(media: Path, conditions: dict[str, Any], **row: Any) -> str:
    """Return what is wrong with the conditions of a row of `clip.mp4`, by name their files."""
    sizes = {"width": 60, "height": 40, "num_frames": 17, "fps": 8.0}
    names = {name: name for name in conditions}
    columns = ConditionColumns(MediaColumns(column="file", root=str(media), conditions=names), on_error="reject")
    batch = {name: [cell] for name, cell in {"file": "clip.mp4", **sizes, **conditions, **row}.items()}
    result = columns(batch)
    (fault,) = result["condition_fault"]
    assert all(result[name] == [CONDITION_SIZE] for name in ("width", "height", "num_frames")) == bool(fault)
    return fault


def referenced(
    media: Path, cells: dict[str, Any], *, rule: ReferenceRule | None = None, **row: Any
) -> tuple[str, list[int]]:
    """Return what is wrong with the references of a row of `clip.mp4` in two columns, and their sizes."""
    sizes = {"width": 60, "height": 40, "num_frames": 17, "fps": 8.0}
    conditions = {"reference": ",".join(cells)}
    files = MediaColumns(
        column="file", root=str(media), conditions=conditions, references=rule or ReferenceRule(multiples=(16, 16))
    )
    batch = {name: [cell] for name, cell in {"file": "clip.mp4", **sizes, **cells, **row}.items()}
    result = ConditionColumns(files, on_error="reject")(batch)
    return result["condition_fault"][0], result["reference_sizes"][0]


@pytest.mark.parametrize("name", ["control", "mask"])
@pytest.mark.parametrize("file", ["clip.mp4", "slower.mp4", "faster.mp4", "small.mp4", "image.png", "large.png"])
def test_files_of_the_same_shape_and_length_fit(name: str, file: str, media: Path) -> None:
    assert marked(media, {name: file}) == ""


@pytest.mark.parametrize("name", ["control", "mask"])
@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("short.mp4", "has 16 frames at 8 fps, but the last frame of its sample is shown at 2.000 s"),
        ("long.mp4", "has 24 frames at 8 fps, but its sample ends at 2.125 s"),
        ("wide.mp4", "has 80×40 pixels, but its sample 60×40"),
        ("square.png", "has 50×50 pixels, but its sample 60×40"),
        ("broken.mp4", "is neither an image nor a video"),
        ("none.mp4", "does not exist"),
    ],
)
def test_files_of_another_shape_or_length_do_not(name: str, file: str, fault: str, media: Path) -> None:
    text = marked(media, {name: file})
    assert fault in text
    assert file in text


@pytest.mark.parametrize("name", ["first_frame", "last_frame"])
def test_a_video_is_not_a_first_or_last_frame(name: str, media: Path) -> None:
    assert marked(media, {name: "image.png"}) == ""
    assert "is a video, but it must be an image" in marked(media, {name: "clip.mp4"})
    assert "has 50×50 pixels" in marked(media, {name: "square.png"})


def test_only_a_mask_and_references_may_be_missing(media: Path) -> None:
    for cell in (None, {"path": None, "bytes": None}):
        assert marked(media, {"mask": cell}) == ""
        assert marked(media, {"reference": cell}) == ""
        for name in ("first_frame", "last_frame", "control"):
            fault = marked(media, {name: cell})
            assert f"The {name} of it is missing" in fault
            assert fault.endswith(f"(column {name}).")


@pytest.mark.parametrize(
    ("cells", "sizes"),
    [
        ({"a": None, "b": None}, []),
        ({"a": "square.png", "b": None}, [1, 50, 50]),
        ({"a": [], "b": "image.png"}, [1, 40, 60]),
        ({"a": ["wide.mp4", "square.png"], "b": ["image.png", None]}, [17, 40, 80, 1, 50, 50, 1, 40, 60]),
        ({"a": {"path": "long.mp4", "bytes": None}, "b": None}, [24, 40, 60]),
    ],
)
def test_sizes_of_references_are_those_of_their_headers(cells, sizes: list[int], media: Path) -> None:
    assert referenced(media, cells) == ("", sizes)


@pytest.mark.parametrize(
    ("cells", "row", "fault"),
    [
        ({"a": "square.png", "b": ["image.png", "none.mp4"]}, {}, r"none.mp4 does not exist.* \(column b\)\."),
        ({"a": ["broken.mp4"], "b": None}, {}, r"broken.mp4 is neither an image nor a video.* \(column a\)\."),
        ({"a": None, "b": "short.mp4"}, {}, r"has 16 frames at 8 fps, but the last .* \(column b\)\."),
        ({"a": "clip.mp4", "b": None}, {"num_frames": 1, "fps": 0.0}, r"must be an image too.* \(column a\)\."),
    ],
)
def test_faults_of_references_name_file_and_column(cells, row, fault: str, media: Path) -> None:
    found, sizes = referenced(media, cells, **row)
    assert re.fullmatch(f".*{fault}", found)
    assert sizes == []


@pytest.mark.parametrize(
    ("file", "fault"), [("small.mp4", ""), ("square.png", "has 50×50 pixels"), ("long.mp4", "its sample ends at")]
)
def test_references_that_lie_over_their_sample_have_its_shape_and_length(file: str, fault: str, media: Path) -> None:
    found, _ = referenced(media, {"a": file, "b": None}, rule=ReferenceRule(downscale_factor=2))
    assert (fault in found) == (found != "" or fault == "")
    assert referenced(media, {"a": file, "b": None})[0] == ""


def test_a_sentence_says_how_many_references_there_are() -> None:
    cells = [pa.array([[], [1, 64, 96], None]), pa.array([[1, 32, 32, 9, 64, 64]])]
    assert describe_stored_references(cells) == (
        "References: 2 rows have none, 1 has 1, 1 has 2; 2 pictures and 1 video of 32×32 to 96×64 pixels."
    )
    assert describe_stored_references([pa.array([[]], pa.list_(pa.int32()))]) == "References: 1 row has none."


def test_conditions_of_an_image_are_images(media: Path) -> None:
    image = {"num_frames": 1, "fps": 0.0}
    assert marked(media, {"mask": "image.png", "control": "large.png"}, **image) == ""
    assert "it must be an image too, as its sample is one" in marked(media, {"mask": "clip.mp4"}, **image)


def test_a_clip_may_have_the_condition_of_the_whole_video(media: Path) -> None:
    clip = {"num_frames": 9, "clip_start": 1.0}
    assert marked(media, {"mask": "clip.mp4"}, **clip) == ""
    assert marked(media, {"mask": "long.mp4"}, **clip) == ""
    assert "shown at 2.000 s" in marked(media, {"mask": "short.mp4"}, **clip)


def test_rows_that_are_rejected_already_keep_their_reason(media: Path) -> None:
    names = {"mask": "mask"}
    columns = ConditionColumns(MediaColumns(column="file", root=str(media), conditions=names))
    sizes = {"width": [-2], "height": [-2], "num_frames": [-2], "fps": [8.0]}
    assert columns({"mask": ["none.mp4"], **sizes})["width"] == [-2]


ROWS = [
    {"file_name": "clip.mp4", "mask": "clip.mp4", "ref": "square.png"},
    {"file_name": "clip.mp4", "mask": "short.mp4", "ref": "square.png"},
    {"file_name": "image.png", "mask": None, "ref": "square.png"},
    {"file_name": "clip.mp4", "mask": "wide.mp4", "ref": "square.png"},
    {"file_name": "clip.mp4", "mask": "image.png", "ref": "none.png"},
]


@pytest.fixture
def listed(media: Path) -> Path:
    rows = [{**row, "caption": "c", "control": "clip.mp4"} for row in ROWS]
    (media / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return media / "rows.jsonl"


def test_faults_are_counted_and_named_by_row_and_file(listed: Path) -> None:
    source = SourceConfig(dataset=str(listed), table=TABLE, mask_column="mask", reference_column="ref")
    with pytest.raises(MediaError) as error:
        prepare(source, spec=SPEC, say=lambda text: None)
    text = str(error.value)
    assert text.startswith("3 of 5 rows have conditions that do not fit: row 1 (clip.mp4): The mask ")
    assert "short.mp4 has 16 frames" in text
    assert "row 3 (clip.mp4): The mask " in text
    assert "row 4 (clip.mp4): " in text
    assert text.rstrip().splitlines()[0].count("(column mask)") == 2
    assert "none.png does not exist" in text


def test_rows_whose_conditions_do_not_fit_are_rejected_under_a_reason(listed: Path, tmp_path: Path) -> None:
    said: list[str] = []
    source = SourceConfig(
        dataset=str(listed), table=TABLE, mask_column="mask", reference_column="ref", on_error="reject"
    )
    prepared = prepare(source, spec=SPEC, say=said.append)
    assert prepared.dataset["rejection"][:] == ["none", "condition", "none", "condition", "condition"]
    assert count_rejections(prepared.open_table.assign(*(np.full(1, CONDITION_SIZE),) * 3).rejection) == {
        "condition": 1
    }
    assert "Conditions: mask from column mask, reference from column ref; 1 row has no mask" in "\n".join(said)
    assert any(line.startswith("3 of 5 rows have conditions that do not fit: row 1 ") for line in said)
    assert any("The column control is not used; --control_column control" in line for line in said)
    prepared.save(tmp_path / "prepared")
    loaded = PreparedDataset.load(tmp_path / "prepared")
    assert loaded.files == prepared.files
    assert loaded.conditions == {"mask": "mask", "reference": "ref"}
    assert loaded.references == ReferenceRule(multiples=(16, 16))
    assert loaded.dataset["reference_sizes"][:] == [[1, 50, 50], [], [1, 50, 50], [], []]
    assert any(line.startswith("References: 3 rows have none, 2 have 1; 2 pictures of 50×50 pixels") for line in said)
    assert "condition_fault" not in loaded.dataset.column_names


def test_a_column_that_is_missing_or_holds_no_files_is_named(listed: Path) -> None:
    for column, text in (("masks", "There is no mask column 'masks', only"), ("other", "one file per row")):
        source = SourceConfig(dataset=str(listed), table=TABLE, mask_column=column)
        rows = [{**json.loads(line), "other": [1]} for line in listed.read_text().splitlines()]
        listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(ColumnError, match=text):
            prepare(source, spec=SPEC, say=lambda text: None)


def test_images_of_a_hub_data_set_are_conditions_too(media: Path, tmp_path: Path) -> None:
    names = ["image.png", "large.png"]
    rows = Dataset.from_dict({"image": [str(media / name) for name in names], "caption": ["a", "b"]})
    rows = rows.add_column("depth", [str(media / name) for name in reversed(names)])
    rows = rows.cast_column("image", Image()).cast_column("depth", Image())
    rows.to_parquet(tmp_path / "rows.parquet")
    source = SourceConfig(dataset=str(tmp_path), table=TABLE, media_column="image", control_column="depth")
    prepared = prepare(source, spec=SPEC, say=lambda text: None)
    assert prepared.dataset["rejection"][:] == ["none", "none"]
    assert prepared.dataset.features["depth"].decode is False


def test_conditions_of_a_stream_are_checked_by_the_same_function(media: Path) -> None:
    sizes = {"width": 60, "height": 40, "num_frames": 17, "fps": 8.0}
    sized = Dataset.from_list([{**row, **sizes} for row in ROWS]).to_iterable_dataset()
    files = MediaColumns(column="file_name", root=str(media), conditions={"mask": "mask"})
    checked = list(map_columns(sized, ConditionColumns(files, on_error="reject"), overwrite=True))
    assert [row["width"] for row in checked] == [60, CONDITION_SIZE, 60, CONDITION_SIZE, 60]
    with pytest.raises(MediaError, match=r"short\.mp4 has 16 frames"):
        list(map_columns(sized, ConditionColumns(files), overwrite=True))


def test_the_flags_of_the_script(listed: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    common = ("--dataset", listed, "--pretrained_model_name_or_path", pipeline_dir, "--buckets", "32,48")
    common = (*common, "--bucket_frames", "1,9", "--output_dir", tmp_path / "out", "--mask_column", "mask")
    failed = run_script_here("prepare_dataset.py", *common, check=False)
    assert failed.returncode
    assert "row 1 (clip.mp4): The mask" in failed.stderr
    done = run_script_here("prepare_dataset.py", *common, "--on_error", "reject")
    assert "rejected: condition (what they would be shown is missing or does not fit)" in done.stdout


@pytest.mark.parametrize(("name", "taken"), [("flux2", False), ("qwen-image-edit-2509", True)])
def test_the_script_knows_the_references_that_a_pipeline_takes(
    name: str, taken: bool, media: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = write_rows(media / "small.jsonl", [{"file_name": "image.png", "before": "square.png"}])
    common = ("--dataset", rows, "--pretrained_model_name_or_path", tiny_folder(name), "--reference_column", "before")
    done = run_script_here(
        "prepare_dataset.py", *common, "--buckets", "32,48", "--output_dir", tmp_path / "out", check=False
    )
    assert (done.returncode == 0) == taken
    fault = (
        r"row 0 \(image.png\): The reference .*square.png has 50×50 pixels; the model takes references of at least 64"
    )
    assert bool(re.search(rf"{fault} .*\(column before\)", done.stderr)) != taken


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"caption": "c", **row}) + "\n" for row in rows))
    return path


@pytest.fixture
def sources(media: Path, tmp_path: Path) -> list[SourceConfig]:
    """A table with lists, one with two columns, one with bytes in a folder of its own, and one without references."""
    pictures = [Pictures.open(media / name) for name in ("square.png", "image.png")]
    bytes_of = [[{"bytes": (media / "square.png").read_bytes(), "path": None}], []]
    rows = {"image": [str(media / "image.png")] * 2, "caption": ["c"] * 2, "reference": bytes_of}
    features = Features({"image": Value("string"), "caption": Value("string"), "reference": List(Image())})
    (tmp_path / "own").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "own" / "rows.parquet")
    pictures[0].save(tmp_path / "own" / "local.png")
    lists = [{"file_name": "clip.mp4", "shown": ["square.png", "wide.mp4"]}, {"file_name": "image.png", "shown": []}]
    columns = [{"file_name": "image.png", "a": None, "b": "large.png"}, {"file_name": "clip.mp4", "a": "square.png"}]
    return [
        SourceConfig(
            dataset=str(write_rows(media / "lists.jsonl", lists)),
            table=TABLE,
            reference_column=["shown"],
            name="lists",
        ),
        SourceConfig(
            dataset=str(write_rows(media / "columns.jsonl", columns)),
            table=TABLE,
            reference_column=["a", "b"],
            name="two",
        ),
        SourceConfig(
            dataset=str(tmp_path / "own" / "rows.parquet"), table=TABLE, reference_column=["reference"], name="bytes"
        ),
        SourceConfig(
            dataset=str(write_rows(media / "none.jsonl", [{"file_name": "image.png"}])), table=TABLE, name="without"
        ),
    ]


SIZES_OF_SOURCES = [
    [1, 50, 50, 17, 40, 80],
    [],
    [1, 80, 121],
    [1, 50, 50],
    [1, 50, 50],
    [],
    [],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [pytest.param((0, 1, 2, 3), marks=pytest.mark.slow), (3, 2, 1, 0), (1,), (2,), (1, 3)]
)
def test_rows_and_streams_of_several_sources_have_the_same_references(order, sources, tmp_path: Path) -> None:
    chosen = [sources[number] for number in order]
    numbers = [2 * number + row for number in order for row in range(1 if number == 3 else 2)]
    expected = [SIZES_OF_SOURCES[number] for number in numbers]
    said: list[str] = []
    prepare(chosen, spec=SPEC, say=said.append).save(tmp_path / "rows")
    loaded = PreparedDataset.load(tmp_path / "rows")
    assert loaded.dataset["reference_sizes"][:] == expected
    prepare_stream(chosen, spec=SPEC, say=said.append)[0].save(tmp_path / "stream")
    stream = PreparedStream.load(tmp_path / "stream")
    streamed = list(stream.open())
    assert sorted(row["reference_sizes"] for row in streamed) == sorted(expected)
    for prepared, rows in ((loaded, loaded.dataset.with_format(None)), (stream, streamed)):
        own = {"root": prepared.root, "other_roots": prepared.other_roots, "conditions": prepared.conditions}
        collate = PackCollator(prepared.open_table, column=prepared.column, references=prepared.references, **own)
        for row in rows:
            (shown,) = collate([row])["shown"]["reference"]
            assert [pixels.shape[1] == 1 for pixels in shown] == [
                frames == 1 for frames in row["reference_sizes"][::3]
            ]
            assert all(side % 16 == 0 for pixels in shown for side in pixels.shape[2:])


def test_settings_of_references_without_references_or_of_two_kinds_are_refused(sources) -> None:
    lists, columns, _, without = sources
    with pytest.raises(BucketingError, match="Omit `reference_pixels`: no effect without references"):
        prepare(replace(without, reference_pixels=100), spec=SPEC, say=lambda text: None)
    pair = [replace(lists, reference_pixels=100), replace(columns, reference_pixels=200)]
    with pytest.raises(BucketingError, match="must be the same for all sources whose samples have references"):
        prepare(pair, spec=SPEC, say=lambda text: None)
    with pytest.raises(BucketingError, match="`reference_pixels`, or `reference_downscale_factor`"):
        replace(lists, reference_pixels=100, reference_downscale_factor=2)
    shown = prepare([replace(lists, reference_pixels=100), without], spec=SPEC, say=lambda text: None)
    assert shown.references == ReferenceRule(max_pixels=100, multiples=(16, 16))


FAULTS = {
    "unreadable": ({"before": ["square.png", "broken.mp4"]}, "broken.mp4 is neither an image nor a video"),
    "missing": ({"before": ["none.png"]}, "none.png does not exist"),
    "another kind": ({"before": ["clip.mp4"]}, "clip.mp4 is a video, but it must be an image too"),
    "too large": ({"before": ["bomb.png"]}, "bomb.png"),
    "too small": ({"before": ["image.png"]}, "image.png has 60×40 pixels; the model takes references of at least 45"),
    "too narrow": ({"before": ["narrow.png"]}, "narrow.png has 50×101 pixels; the model takes references up to 2 to"),
}


@pytest.mark.parametrize(("row", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_reference_at_fault_is_named_by_row_column_and_file_or_counted(
    row: dict[str, Any], fault: str, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pictures.new("L", (300, 300)).save(media / "bomb.png")
    Pictures.new("L", (50, 101)).save(media / "narrow.png")
    monkeypatch.setattr(Pictures, "MAX_IMAGE_PIXELS", 40_000)
    rows = [{"file_name": "image.png", **cells} for cells in ({"before": ["square.png"]}, row)]
    path = write_rows(media / "faults.jsonl", rows)
    taken = ReferenceRule(min_side=45, max_ratio=2)
    source = SourceConfig(dataset=str(path), table=TABLE, reference_column=["before"])
    with pytest.raises(MediaError, match="1 of 2 rows have conditions that do not fit: row 1 ") as error:
        prepare(source, spec=SPEC, taken=taken, say=lambda text: None)
    assert fault in str(error.value)
    assert "(column before)" in str(error.value)
    prepared = prepare(replace(source, on_error="reject"), spec=SPEC, taken=taken, say=lambda text: None)
    assert prepared.dataset["rejection"][:] == ["none", "condition"]


NUMBERS = {
    "too many": (ReferenceRule(most=1), r"row 2 .*has 2 references, but .* at most 1: other.png \(column b\)"),
    "none": (ReferenceRule(least=1), r"row 0 .*It has no references, but the model needs 1 \(column a,b\)"),
    "any": (ReferenceRule(most=0), r"row 1 .*It has 1 reference, but the model takes none: square.png \(column a\)"),
}


@pytest.mark.parametrize(("taken", "fault"), NUMBERS.values(), ids=NUMBERS)
def test_rows_with_other_numbers_of_references_than_the_model_takes_are_named_or_counted(
    taken: ReferenceRule, fault: str, media: Path
) -> None:
    cells = ({}, {"a": "square.png"}, {"a": "square.png", "b": "other.png"})
    path = write_rows(
        media / "numbers.jsonl", [{"file_name": "image.png", "a": None, "b": None, **row} for row in cells]
    )
    (media / "other.png").write_bytes((media / "square.png").read_bytes())
    source = SourceConfig(dataset=str(path), table=TABLE, reference_column=["a", "b"])
    for check in (prepare, prepare_stream):
        with pytest.raises(MediaError, match=fault):
            check(source, spec=SPEC, taken=taken, say=lambda text: None)
    source = replace(source, on_error="reject")
    expected = ["none" if taken.least <= count <= taken.most else "condition" for count in range(3)]
    prepared = prepare(source, spec=SPEC, taken=taken, say=lambda text: None)
    assert prepared.dataset["rejection"][:] == expected
    stream, columns = prepare_stream(source, spec=SPEC, taken=taken, say=lambda text: None)
    assert columns["rejection"].tolist() == expected
    stream.save(media / "stream")
    assert [row["rejection"] for row in PreparedStream.load(media / "stream").open()] == expected


def test_a_source_without_references_is_refused_where_the_model_needs_them(media: Path) -> None:
    path = write_rows(media / "without.jsonl", [{"file_name": "image.png"}])
    source = SourceConfig(dataset=str(path), table=TABLE)
    with pytest.raises(BucketingError, match=r"The model needs references, which .*without.jsonl` lacks"):
        prepare(source, spec=SPEC, taken=ReferenceRule(least=1), say=lambda text: None)


def test_faults_of_references_in_streams_reject_their_rows(media: Path, tmp_path: Path) -> None:
    cells = (["square.png", "none.png"], None, ["image.png"])
    path = write_rows(media / "faults.jsonl", [{"file_name": "clip.mp4", "shown": files} for files in cells])
    source = SourceConfig(dataset=str(path), table=TABLE, reference_column=["shown"], on_error="reject")
    taken = ReferenceRule(min_side=45)
    stream, columns = prepare_stream(source, spec=SPEC, taken=taken, say=lambda text: None)
    assert columns["rejection"].tolist() == ["condition", "none", "condition"]
    stream.save(tmp_path)
    expected = [("condition", [], ["square.png", "none.png"]), ("none", [], []), ("condition", [], ["image.png"])]
    for opened in (stream, PreparedStream.load(tmp_path)):
        rows = opened.open()
        assert [(row["rejection"], row["reference_sizes"], row["reference"]) for row in rows] == expected
