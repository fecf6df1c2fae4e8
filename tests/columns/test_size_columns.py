"""Sizes that a data set has already: taken over where a sample of its files agrees, else read from headers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, Value
from PIL import Image as PillowImage

from hf_bucketing import BucketingError, ColumnError, MediaError
from hf_bucketing.columns import ExistingMetadata, MediaMetadata, PreparedDataset, add_sizes
from hf_bucketing.columns.settings import read_size_columns
from hf_bucketing.media import write_video
from tests.conftest import run_script_here

COLUMNS = ("width", "height", "num_frames", "fps")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_video(tmp_path / "video.mp4", [np.zeros((16, 32, 3), np.uint8)] * 9, fps=16)
    PillowImage.new("RGB", (48, 32)).save(tmp_path / "image.PNG", format="PNG")
    return tmp_path


def rows_of(dataset: Dataset) -> list[tuple]:
    return [tuple(row[name] for name in COLUMNS) for row in dataset]


def table(**changes: list) -> Dataset:
    columns = {
        "path": ["video.mp4", "image.PNG"],
        "width": [32, 48],
        "height": [16, 32],
        "num_frames": [9, 1],
        "fps": [16.0, None],
    }
    return Dataset.from_dict({name: values for name, values in {**columns, **changes}.items() if values is not None})


@pytest.mark.parametrize("target_fps", [None, 8.0])
def test_columns_that_agree_with_the_files_are_taken_over(folder: Path, target_fps: float | None) -> None:
    metadata = MediaMetadata("path", root=str(folder), target_fps=target_fps)
    sized = add_sizes(table(), metadata)
    assert "the columns width, height, num_frames, fps; the headers of 2 files agree" in sized.origin
    frames, fps = (9, 16.0) if target_fps is None else (5, 8.0)
    assert [row[:3] for row in rows_of(sized.dataset)] == [(32, 16, frames), (48, 32, 1)]
    assert sized.dataset["fps"][0] == fps


def test_only_a_sample_of_the_files_is_opened(folder: Path) -> None:
    sampled = set(np.linspace(0, 20, 16).astype(int).tolist())
    files = ["video.mp4" if row in sampled else "gone.mp4" for row in range(21)]
    sizes = {"width": [32] * 21, "height": [16] * 21, "num_frames": [9] * 21, "fps": [16.0] * 21}
    dataset = Dataset.from_dict({"path": files, **sizes})
    metadata = MediaMetadata("path", root=str(folder))
    assert rows_of(add_sizes(dataset, metadata).dataset) == [(32, 16, 9, 16.0)] * 21
    with pytest.raises(MediaError, match=r"gone\.mp4"):
        add_sizes(dataset, metadata, sizes_from="headers")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"width": [16, 48], "height": [32, 31]},
            r"2 of 2 files .*: row 0 \(video.mp4\) has width 16, height 32.*width 32, height 16.*; row 1 \(",
        ),
        (
            {"height": [16, 31]},
            r"1 of 2 files that were checked have other sizes than their columns: row 1 \(image.PNG\)",
        ),
        ({"num_frames": [10, 1]}, "num_frames 10.*num_frames 9"),
        ({"fps": [15.0, None]}, "fps 15.0.*fps 16.0"),
    ],
)
def test_columns_that_disagree_with_a_file_are_an_error_that_names_it(folder: Path, changes, message) -> None:
    metadata = MediaMetadata("path", root=str(folder))
    with pytest.raises(ColumnError, match=message):
        add_sizes(table(**changes), metadata)
    reported: list[BucketingError] = []
    origin = add_sizes(table(**changes), metadata, report=reported.append).origin
    assert origin.endswith(f"the headers of {str(reported[0])[0]} of 2 files differ.")
    read = add_sizes(table(**changes), metadata, sizes_from="headers")
    assert rows_of(read.dataset) == [(32, 16, 9, 16.0), (48, 32, 1, 0.0)]
    assert "instead of the columns width, height, num_frames, fps: as asked for" in read.origin


def test_a_rounded_frame_rate_agrees(folder: Path) -> None:
    sized = add_sizes(table(fps=[15.9, None]), MediaMetadata("path", root=str(folder)))
    assert "agree" in sized.origin


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_frames": None, "fps": None}, "videos need num_frames and fps too"),
        ({"fps": None}, "videos need num_frames and fps too"),
        ({"height": [16, None]}, "1 rows lack a size or frame rate, the first of them row 1"),
        ({"fps": [None, None]}, "column fps must hold numbers"),
        ({"width": ["32px", "48px"]}, "column width must hold numbers"),
        ({"width": None}, "width and height are needed"),
    ],
)
def test_columns_that_do_not_suffice_are_replaced_by_headers_and_the_reason_is_said(folder, changes, reason) -> None:
    sized = add_sizes(table(**changes), MediaMetadata("path", root=str(folder)))
    assert rows_of(sized.dataset) == [(32, 16, 9, 16.0), (48, 32, 1, 0.0)]
    assert sized.origin.startswith("Sizes are read from the headers of the files, instead of")
    assert reason in sized.origin


def test_without_columns_headers_are_read(folder: Path) -> None:
    sized = add_sizes(table(**dict.fromkeys(COLUMNS)), MediaMetadata("path", root=str(folder)))
    assert rows_of(sized.dataset) == [(32, 16, 9, 16.0), (48, 32, 1, 0.0)]
    assert sized.origin == "Sizes are read from the headers of the files."


@pytest.mark.parametrize("typed", [False, True])
def test_images_need_width_and_height_alone(folder: Path, typed: bool) -> None:
    cell = str(folder / "image.PNG")
    features = Features(image=Image() if typed else Value("string"), width=Value("int64"), height=Value("int64"))
    dataset = Dataset.from_dict({"image": [cell] * 3, "width": [48] * 3, "height": [32] * 3}, features=features)
    sized = add_sizes(dataset, MediaMetadata("image", target_fps=16))
    assert rows_of(sized.dataset) == [(48, 32, 1, 0.0)] * 3
    assert "the headers of 3 files agree" in sized.origin
    if typed:
        assert sized.dataset.features["image"].decode is False


def test_unreadable_files_in_the_sample_are_errors_or_make_all_headers_be_read(folder: Path) -> None:
    (folder / "image.PNG").write_bytes(b"nonsense")
    with pytest.raises(MediaError, match=r"image\.PNG"):
        add_sizes(table(), MediaMetadata("path", root=str(folder)))
    sized = add_sizes(table(), MediaMetadata("path", root=str(folder), on_error="reject"))
    assert "1 of the files that were checked cannot be read" in sized.origin
    assert sized.dataset["width"][:] == [32, -1]


def test_columns_of_other_names_are_checked_with_files_or_taken_as_they_are(folder: Path) -> None:
    """OpenVid's `frame` and `seconds`; a duration of 9 frames at 16 fps is 0.5625 s."""
    dataset = table(num_frames=None, frame=[9, 1], seconds=[0.5625, 0], w=[32, 48]).remove_columns(["width"])
    metadata = MediaMetadata("path", root=str(folder), target_fps=8.0)
    remote = dataset.remove_columns(["path"]).add_column("path", ["https://example.org/gone.mp4"] * 2)
    for names in ("width=w,num_frames=frame", "width=w,duration=seconds"):
        columns = read_size_columns(names)
        checked = add_sizes(dataset, metadata, size_columns=columns)
        assert rows_of(checked.dataset) == [(32, 16, 5, 8.0), (48, 32, 1, 0.0)]
        assert "2 files agree" in checked.origin
        gone = add_sizes(remote, metadata, sizes_from="columns", size_columns=columns)
        assert rows_of(gone.dataset) == rows_of(checked.dataset)
        assert gone.origin.endswith("; no file was opened.")
        assert gone.columns["width"] == "w"
    wrong = {"width": "w", "duration": "minutes"}
    with pytest.raises(ColumnError, match=r"row 0 \(video.mp4\) has .* num_frames 5.*num_frames 9"):
        add_sizes(dataset.add_column("minutes", [0.33, 0.0]), metadata, size_columns=wrong)


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({"num_frames": None}, {}, "videos need num_frames and fps too"),
        ({"width": [32, None]}, {}, "1 rows lack a size or frame rate, the first of them row 1"),
        ({}, {"width": "w"}, "there is no column w; the data set has"),
        ({"width": ["32px", "48px"]}, {}, "column width must hold numbers"),
    ],
)
def test_columns_that_do_not_suffice_are_an_error_where_no_file_is_opened(changes, names, message) -> None:
    with pytest.raises(ColumnError, match=message):
        add_sizes(table(**changes), MediaMetadata("path"), sizes_from="columns", size_columns=names)


def test_rows_without_a_size_are_rejected_where_no_file_is_opened() -> None:
    metadata = MediaMetadata("path", on_error="reject")
    sized = add_sizes(table(width=[32, None]), metadata, sizes_from="columns")
    assert rows_of(sized.dataset) == [(32, 16, 9, 16.0), (-1, -1, -1, 0.0)]


def test_names_of_columns_that_have_no_meaning_or_no_effect_are_refused() -> None:
    for text in ("w=width", "width", "width=", "width=w,width=v", "num_frames=n,duration=d"):
        with pytest.raises(ColumnError, match="`size_columns`"):
            read_size_columns(text)
    with pytest.raises(ColumnError, match="Omit `size_columns`"):
        add_sizes(table(), MediaMetadata("path"), sizes_from="headers", size_columns={"width": "w"})
    with pytest.raises(ColumnError, match="`sizes_from` must be"):
        add_sizes(table(), MediaMetadata("path"), sizes_from="files")
    with pytest.raises(ColumnError, match="go together"):
        ExistingMetadata("w", "h", duration="seconds")


def test_preparing_uses_the_sizes_of_a_csv_file(folder: Path, pipeline_dir: Path) -> None:
    """The columns are those of Open-Sora."""
    (folder / "rows.csv").write_text(
        "path,text,num_frames,height,width,aspect_ratio,resolution,fps\n"
        "video.mp4,a clip,9,16,32,0.5,512,16.0\n"
        "image.PNG,a picture,1,32,48,0.67,1536,\n"
    )
    flags = ("--pretrained_model_name_or_path", pipeline_dir, "--buckets", "16,32;32,48", "--bucket_frames", "1,5")
    arguments = ("--dataset", folder / "rows.csv", *flags, "--target_fps", 8, "--overwrite")
    result = run_script_here("prepare_dataset.py", *arguments, "--output_dir", folder / "out")
    assert "Sizes are the columns width, height, num_frames, fps" in result.stdout
    dataset = PreparedDataset.load(folder / "out").dataset
    assert dataset["num_frames"][:] == [5, 1]
    assert dataset["aspect_ratio"][:] == [2.0, 1.5]
    (folder / "rows.csv").write_text("path,text,num_frames,height,width,fps\nvideo.mp4,a clip,9,32,16,16\n")
    result = run_script_here("prepare_dataset.py", *arguments, "--output_dir", folder / "bad", check=False)
    assert "sizes_from" in result.stderr.strip().splitlines()[-1]
    run_script_here("prepare_dataset.py", *arguments, "--output_dir", folder / "bad", "--sizes_from", "headers")
    assert PreparedDataset.load(folder / "bad").dataset["width"][:] == [32]


def test_files_that_cannot_be_read_are_counted_and_named_with_their_rows(folder: Path) -> None:
    (folder / "broken.mp4").write_bytes(b"no video")
    dataset = Dataset.from_dict({"path": ["video.mp4", "gone.mp4", "image.PNG", "broken.mp4"]})
    metadata = MediaMetadata("path", root=str(folder))
    named = r"2 of 4 files cannot be read: row 1: .*gone\.mp4 does not exist; row 3: .*broken\.mp4"
    with pytest.raises(MediaError, match=named):
        add_sizes(dataset, metadata)
    for name in ("gone", "broken"):
        write_video(folder / f"{name}.mp4", [np.zeros((16, 48, 3), np.uint8)] * 5, fps=8)
    mended = add_sizes(dataset, metadata).dataset
    assert mended["width"][:] == [32, 48, 48, 48], "headers are read anew, although the paths are the same"
