"""Files that a stranger made: lengths that lie, playlists, and pictures that would start a program."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from hf_bucketing import MediaError
from hf_bucketing.media import MediaSource, iter_frames, probe, write_video
from hf_bucketing.media.audio import has_audio
from hf_bucketing.media.containers import Turn, picture_changes, read_turn
from tests.media.http_server import serving

FRAMES = np.zeros((3, 48, 64, 3), np.uint8)


def in_memory(data: bytes, name: str = "clip") -> MediaSource:
    return MediaSource.from_cell({"path": name, "bytes": data})


def box(kind: bytes, content: bytes, *, size: int | None = None) -> bytes:
    """Return a box of mp4 whose size is written in 64 bits, the true one or another."""
    return struct.pack(">I4sQ", 1, kind, len(content) + 16 if size is None else size) + content


def element(number: str, content: bytes, *, size: int | None = None) -> bytes:
    """Return an element of Matroska whose size is written in 8 bytes, the true one or another."""
    return bytes.fromhex(number) + (2**56 + (len(content) if size is None else size)).to_bytes(8, "big") + content


@pytest.mark.parametrize("size", [0, 1, 7, 2**31, 2**55, 2**63 - 1, 2**63, 2**64 - 1])
def test_no_length_in_a_file_is_believed_beyond_its_end(size: int) -> None:
    """At any depth, in the containers and in pictures, and in a file that is then read on."""
    head = struct.pack(">I4s8x", 16, b"ftyp")
    liar = box(b"free", b"12345678", size=size)
    movies = box(b"moov", liar * 3), box(b"moov", box(b"trak", liar) * 2), box(b"moov", b"", size=size)
    for content in (liar * 3, *movies):
        assert read_turn(io.BytesIO(head + content), "mov", track_id=1, position=0) == Turn()
    picture = struct.pack(">I4s4s4x", 16, b"ftyp", b"heic")
    assert picture_changes(io.BytesIO(picture + box(b"meta", b"1234" + liar * 2) + liar)) == []
    long = min(size, 2**56 - 2)
    track = element("ae", element("ec", b"1234", size=long) * 200)
    for content in (track, element("1654ae6b", track), element("1654ae6b", track, size=long) * 200):
        file = io.BytesIO(element("1a45dfa3", b"") + element("18538067", content))
        assert read_turn(file, "matroska", track_id=1, position=0) == Turn()


def test_a_corrupt_file_is_named_whatever_its_lengths_say(tmp_path: Path) -> None:
    """Each length of the first boxes or elements is replaced, so that some files can be read and others cannot."""
    write_video(tmp_path / "clip.mp4", FRAMES, fps=8)
    with av.open(str(tmp_path / "clip.mp4")) as clip, av.open(str(tmp_path / "clip.mkv"), "w") as copy:
        stream = copy.add_stream_from_template(clip.streams.video[0])
        for packet in clip.demux(clip.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    refused = []
    for path in (tmp_path / "clip.mp4", tmp_path / "clip.mkv"):
        data = path.read_bytes()
        for at in range(4, min(len(data), 1200), 24):
            broken = data[:at] + b"\x01" + b"\xff" * 7 + data[at + 8 :]
            for read in (probe, lambda source: [*iter_frames(source, [0.0])], has_audio):
                try:
                    read(in_memory(broken, path.name))
                except MediaError as error:
                    refused.append(str(error))
    assert len(refused) > 20
    assert all("clip.m" in message for message in refused)


def playlists(media: Path, url: str) -> dict[str, str]:
    """Return lists that name a video or a server, each in a format of FFmpeg."""
    lines = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{}\n#EXT-X-ENDLIST\n"
    return {
        "file.m3u8": lines.format(media.as_uri()),
        "path.m3u8": lines.format(media),
        "server.m3u8": lines.format(f"{url}/clip.mp4"),
        "list.ffconcat": f"ffconcat version 1.0\nfile '{media.name}'\n",
        "list.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
        "dash.mpd": f"<?xml version='1.0'?><MPD><BaseURL>{media.as_uri()}</BaseURL></MPD>",
    }


def test_a_playlist_is_refused_by_name_and_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    write_video(tmp_path / "secret" / "clip.mp4", FRAMES, fps=8)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "clip.mp4").write_bytes((tmp_path / "secret" / "clip.mp4").read_bytes())
    with serving(tmp_path / "secret") as served:
        for name, text in playlists(tmp_path / "secret" / "clip.mp4", served.url).items():
            (tmp_path / "set" / name).write_text(text)
            for cell in (name, {"path": name, "bytes": text.encode()}):
                source = MediaSource.from_cell(cell, root=tmp_path / "set")
                for read in (probe, lambda source: [*iter_frames(source, [0.0])], has_audio):
                    with pytest.raises(MediaError, match=rf"{name} is an? .*, which names other files"):
                        read(source)
    assert served.requests == []
    assert probe(MediaSource.from_cell("clip.mp4", root=tmp_path / "set")).num_frames == 3, (
        "videos in a container are read as before"
    )


def test_a_name_is_no_pattern_of_names(tmp_path: Path) -> None:
    """FFmpeg would read the pictures that `%d` stands for, in place of the file of this name."""
    for number, name in enumerate(("p1.dpx", "p%d.dpx")):
        with av.open(str(tmp_path / "one.dpx"), "w", format="image2pipe") as container:
            stream = container.add_stream("dpx", rate=1)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb24"
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 200 * number, np.uint8), format="rgb24")
            container.mux([*stream.encode(frame), *stream.encode()])
        (tmp_path / "one.dpx").rename(tmp_path / name)
    (pixels,) = iter_frames(MediaSource.from_cell(str(tmp_path / "p%d.dpx")), [0.0])
    assert pixels.mean() == pytest.approx(200, abs=2)


def test_a_picture_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS is code for Ghostscript, whatever its name is."""
    (tmp_path / "gs").write_text(f'#!/bin/sh\necho ran >> {tmp_path}/ran\n[ "$1" = --version ] && echo 10.0\nexit 1\n')
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    Image.new("RGB", (64, 48)).save(tmp_path / "picture.png", format="EPS")
    source = MediaSource.from_cell("picture.png", root=tmp_path)
    for read in (probe, lambda source: [*iter_frames(source, [0.0])]):
        with pytest.raises(MediaError, match=r"picture\.png"):
            read(source)
    assert not (tmp_path / "ran").exists()
    for form in ("AVIF", "BMP", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP"):
        Image.new("RGB", (64, 48)).save(tmp_path / f"picture.{form}", format=form)
        assert probe(MediaSource.from_cell(str(tmp_path / f"picture.{form}")))[:3] == (64, 48, 1), form
