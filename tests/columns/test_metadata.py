"""Columns of sizes, frames and rates: from cells of every kind, from other columns, and from hostile input."""

from __future__ import annotations

import pickle
import struct
import warnings
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
from datasets import Dataset, Features, Image, Video
from PIL import Image as PillowImage

from hf_bucketing import BucketTable, ColumnError, LatentSpec, MediaError, Size
from hf_bucketing.columns import BucketColumns, MediaMetadata, map_columns
from hf_bucketing.columns.metadata import ExistingMetadata
from hf_bucketing.media import MediaSource, write_video

IMAGE, VIDEO = (20, 12, 1, 0.0, False), (32, 16, 6, 8.0, False)
COLUMNS = MediaMetadata.output_columns


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    PillowImage.new("RGB", IMAGE[:2]).save(tmp_path / "image.png")
    PillowImage.new("RGB", IMAGE[:2]).save(tmp_path / "image.jpg")
    write_video(tmp_path / "video.mp4", [np.zeros((16, 32, 3), np.uint8)] * 6, fps=8)
    return tmp_path


def rows_of(dataset) -> list[tuple]:
    return [tuple(row[name] for name in COLUMNS) for row in dataset]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("feature", "name", "expected"), [(Image, "image.png", IMAGE), (Video, "video.mp4", VIDEO)])
def test_cells_of_a_feature_hold_bytes_a_path_or_both(folder: Path, feature, name, expected, streamed: bool) -> None:
    file = folder / name
    cells = [
        {"path": str(file), "bytes": None},
        {"path": None, "bytes": file.read_bytes()},
        {"path": "another/place", "bytes": file.read_bytes()},
    ]
    dataset = Dataset.from_dict({"media": cells}, features=Features(media=feature()))
    dataset = dataset.to_iterable_dataset() if streamed else dataset
    assert rows_of(map_columns(dataset, MediaMetadata("media"))) == [expected] * 3


@pytest.mark.parametrize(("streamed", "num_proc"), [(False, None), (False, 2), (True, None)])
def test_paths_below_a_root_in_one_process_in_two_and_streamed(folder: Path, streamed: bool, num_proc) -> None:
    dataset = Dataset.from_dict({"file": ["image.png", "video.mp4", "image.jpg", "./video.mp4"]})
    metadata = MediaMetadata("file", root=str(folder))
    if streamed:
        mapped = map_columns(dataset.to_iterable_dataset(), metadata)
    else:
        mapped = map_columns(dataset, metadata, num_proc=num_proc)
    assert rows_of(mapped) == [IMAGE, VIDEO, IMAGE, VIDEO]


def test_columns_that_are_there_are_replaced_only_when_asked(folder: Path) -> None:
    dataset = Dataset.from_dict({"file": ["video.mp4"], "width": [7], "fps": [1.0]})
    metadata = MediaMetadata("file", root=str(folder))
    with pytest.raises(ColumnError, match=r"\['width', 'fps'\].*overwrite=True"):
        map_columns(dataset, metadata)
    assert rows_of(map_columns(dataset, metadata, overwrite=True)) == [VIDEO]


def test_counting_packets_finds_what_a_header_does_not_say(folder: Path) -> None:
    with av.open(str(folder / "video.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=1000)  # claims 1000 fps, and no number of frames
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuv420p"
        for stamp in (0, 250, 500, 2000):
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")
            frame.pts = stamp
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    dataset = Dataset.from_dict({"file": [str(folder / "video.mkv")]})
    assert rows_of(map_columns(dataset, MediaMetadata("file"))) == [(32, 16, 2001, 1000.0, True)]
    assert rows_of(map_columns(dataset, MediaMetadata("file", target_fps=4))) == [(32, 16, 9, 4.0, True)]
    assert rows_of(map_columns(dataset, MediaMetadata("file", exact=True))) == [(32, 16, 4, 1.5, False)]


def forged_png(width: int, height: int) -> bytes:
    """Return a file of 100 bytes that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 10)), (b"IEND", b"")]
    body = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def forged_video(folder: Path) -> bytes:
    """Return a VP9 file that claims 65,535 × 65,535 pixels."""
    with av.open(str(folder / "forged.mp4"), "w") as container:
        stream = container.add_stream("libvpx-vp9", rate=8)
        stream.height, stream.width, stream.pix_fmt = 16, 32, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode())
    data = (folder / "forged.mp4").read_bytes()
    place = data.index(b"vp09", data.index(b"stsd")) + 28
    assert data[place : place + 4] == struct.pack(">HH", 32, 16)
    return data[:place] + b"\xff" * 4 + data[place + 4 :]


def test_a_header_that_claims_too_many_pixels_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("pixels were allocated")

    video = forged_video(folder)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    monkeypatch.setattr("PIL.Image.core.new", refuse)
    cells = [forged_png(100_000, 100_000), forged_png(9_000, 9_000), video, (folder / "video.mp4").read_bytes()]
    for cell, limits in zip(cells, ({}, {"max_pixels": 80_999_999}, {}, {"max_pixels": 511}), strict=True):
        with pytest.raises(MediaError, match="pixels"):
            MediaMetadata("media", **limits)({"media": [cell]})
    rejected = MediaMetadata("media", on_error="reject")({"media": cells})
    assert rejected["width"] == [-1, 9000, -1, 32]
    assert MediaMetadata("media", max_pixels=512)({"media": cells[3:]})["width"] == [32]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PillowImage.DecompressionBombWarning)
        with pytest.raises(MediaError, match="pixels"):
            MediaMetadata("media")({"media": [forged_png(12_000, 12_000)]})
    for max_pixels in (0, 2**28 + 1):
        with pytest.raises(ColumnError, match="max_pixels"):
            MediaMetadata("media", max_pixels=max_pixels)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


def test_nothing_is_unpickled_and_no_path_leaves_its_root(folder: Path) -> None:
    target = folder / "exploded"
    (folder / "bomb.pkl").write_bytes(pickle.dumps(Bomb(target)))
    (folder / "bomb.npy").write_bytes(b"\x93NUMPY\x01\x00" + pickle.dumps(Bomb(target)))
    (folder / "inner").mkdir()
    cells = ["bomb.pkl", "bomb.npy", (folder / "bomb.pkl").read_bytes(), "inner/../../secret.png", "gone.png", ""]
    metadata = MediaMetadata("media", root=str(folder), on_error="reject")
    assert metadata({"media": cells})["num_frames"] == [-1] * len(cells)
    assert not target.exists()
    with pytest.raises(MediaError, match="leaves its root"):
        MediaMetadata("media", root=str(folder / "inner"))({"media": ["../image.png"]})


def test_titles_that_are_not_utf8_do_not_matter(folder: Path) -> None:
    with av.open(str(folder / "video.mp4")) as video, av.open(str(folder / "titled.mkv"), "w") as titled:
        titled.metadata["title"] = "Maerchen"
        stream = titled.add_stream_from_template(video.streams.video[0])
        for packet in video.demux(video.streams.video[0]):
            if packet.size:
                packet.stream = stream
                titled.mux(packet)
    data = (folder / "titled.mkv").read_bytes()
    assert b"Maerchen" in data
    latin = {"path": None, "bytes": data.replace(b"Maerchen", b"M\xe4rchen!")}
    assert MediaMetadata("media")({"media": [latin]})["width"] == [32]
    assert MediaSource.from_cell(latin).data is not None


def as_kind(columns: dict[str, list], kind: str):
    """Return a batch as `map` passes it to a function, for a format of the data set."""
    return Dataset.from_dict(columns).with_format(None if kind == "lists" else kind)[:]


@pytest.mark.parametrize("kind", ["lists", "numpy", "arrow"])
def test_existing_columns_are_taken_over(kind: str) -> None:
    columns = {"w": [640, 320, 100], "h": [480.0, 240.0, 50.0], "n": [48, 48, 1], "rate": [24.0, 8.0, 25.0]}
    images = ExistingMetadata("w", "h")(as_kind(columns, kind))
    assert {name: values.tolist() for name, values in images.items()} == {
        "width": [640, 320, 100],
        "height": [480, 240, 50],
        "num_frames": [1, 1, 1],
        "fps": [0.0, 0.0, 0.0],
    }
    videos = ExistingMetadata("w", "h", num_frames="n", fps="rate", target_fps=16)(as_kind(columns, kind))
    assert (videos["num_frames"].tolist(), videos["fps"].tolist()) == ([32, 48, 1], [16.0, 8.0, 0.0])


@pytest.mark.parametrize("kind", ["lists", "numpy", "arrow"])
def test_rows_without_a_size_or_rate_become_rejections(kind: str) -> None:
    columns = {
        "w": [64, None, 64, 64, 64],
        "h": [64, 64, None, 64, 64],
        "n": [9, 9, 9, None, 9],
        "rate": [8.0, 8.0, 8.0, 8.0, None],
    }
    taken = ExistingMetadata("w", "h", num_frames="n", fps="rate", target_fps=4)(as_kind(columns, kind))
    assert taken["num_frames"].tolist() == [5, -1, -1, -1, -1]
    table, spec = BucketTable(sizes=(Size(5, 64, 64),)), LatentSpec(temporal_stride=4, spatial_stride=8)
    reasons = BucketColumns(table, spec)(taken)["rejection"].tolist()
    assert reasons == ["none"] + ["unreadable"] * 4


def test_existing_columns_mean_what_the_files_say(folder: Path) -> None:
    dataset = Dataset.from_dict({"file": ["video.mp4", "image.png"]})
    read = map_columns(dataset, MediaMetadata("file", root=str(folder)))
    named = read.rename_columns({"width": "w", "height": "h", "num_frames": "n", "fps": "rate"})
    named = named.remove_columns(["file", "num_frames_estimated"])
    for target in (None, 3.0, 60.0):
        metadata = ExistingMetadata("w", "h", num_frames="n", fps="rate", target_fps=target)
        wanted = map_columns(dataset, MediaMetadata("file", root=str(folder), target_fps=target))
        taken = map_columns(named, metadata)
        assert all(taken[name][:] == wanted[name][:] for name in metadata.output_columns)
        assert all(taken.features[name] == wanted.features[name] for name in metadata.output_columns)
        assert list(map_columns(named.to_iterable_dataset(), metadata)) == list(taken)


def test_a_column_that_has_its_name_stays_unless_it_is_replaced(folder: Path) -> None:
    dataset = Dataset.from_dict({"width": [64], "height": [48], "num_frames": [9], "fps": [8.0]})
    assert ExistingMetadata("width", "height").output_columns == ("num_frames", "fps")
    images = map_columns(dataset.select_columns(["width", "height"]), ExistingMetadata("width", "height"))
    assert images[0] == {"width": 64, "height": 48, "num_frames": 1, "fps": 0.0}
    slower = ExistingMetadata("width", "height", num_frames="num_frames", fps="fps", target_fps=4)
    with pytest.raises(ColumnError, match="overwrite=True"):
        map_columns(dataset, slower)
    assert map_columns(dataset, slower, overwrite=True)[0] == {"width": 64, "height": 48, "num_frames": 5, "fps": 4.0}


def test_what_is_wrong_with_existing_columns_is_said() -> None:
    for options, message in (
        ({"num_frames": "n"}, "go together"),
        ({"fps": "rate"}, "go together"),
        ({"target_fps": 8}, "no effect"),
        ({"num_frames": "n", "fps": "rate", "target_fps": 0}, "above 0"),
    ):
        with pytest.raises(ColumnError, match=message):
            ExistingMetadata("w", "h", **options)
    with pytest.raises(ColumnError, match="nothing to do"):
        ExistingMetadata("width", "height", num_frames="num_frames", fps="fps")
    for width, message in (
        (["64"], "w must hold numbers"),
        ([64.5], "w must hold whole"),
        ([np.inf], "w must hold whole"),
    ):
        with pytest.raises(ColumnError, match=message):
            ExistingMetadata("w", "h")({"w": width, "h": [48]})
