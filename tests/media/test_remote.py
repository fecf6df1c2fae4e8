"""Files at URLs: read in parts, with the same sizes and pixels as files on disk, and errors that name the URL."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from hf_bucketing import MediaError, Size
from hf_bucketing.columns import MediaMetadata, map_columns
from hf_bucketing.conditions.audio import AudioRule
from hf_bucketing.media import write_video
from hf_bucketing.media.decode import iter_frames
from hf_bucketing.media.probe import MediaInfo, probe
from hf_bucketing.media.remote import version
from hf_bucketing.media.rows import FileSample
from hf_bucketing.media.sample import load
from hf_bucketing.media.source import MediaSource
from hf_bucketing.media.views import View
from hf_bucketing.media.write import Sound
from tests.media.http_server import Served, serving

CLIP = MediaInfo(64, 48, 16, 8.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip and an image of a megabyte; the clip's header lies at its end."""
    folder = tmp_path_factory.mktemp("served")
    noise = np.random.default_rng(0)
    write_video(folder / "a.mp4", [noise.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(16)], fps=8)
    clip = (folder / "a.mp4").read_bytes()
    header = clip.rindex(b"moov") - 4
    nothing = (2**20).to_bytes(4, "big") + b"free" + bytes(2**20 - 8)
    (folder / "a.mp4").write_bytes(clip[:header] + nothing + clip[header:])
    Image.fromarray(noise.integers(0, 256, (600, 800, 3), np.uint8)).save(folder / "b.png", compress_level=0)
    (folder / "empty.mp4").touch()
    (folder / "broken.mp4").write_bytes((folder / "a.mp4").read_bytes()[:100_000])
    return folder


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    pytest.importorskip("aiohttp", reason="fsspec[http] is not installed")
    with serving(folder) as served:
        yield served


def at(url: str) -> MediaSource:
    return MediaSource.from_cell(url)


def frames(source: MediaSource, *times: float) -> np.ndarray:
    return np.stack(list(iter_frames(source, times)))


def test_headers_are_read_without_the_rest_of_the_file(folder: Path, served: Served) -> None:
    assert probe(at(f"{served.url}/a.mp4")) == CLIP
    assert probe(at(f"{served.url}/b.png")) == MediaInfo(800, 600, 1, 0.0)
    for name in ("a.mp4", "b.png"):
        assert served.sent[name] <= 3 * 2**16 < (folder / name).stat().st_size / 2
        assert served.requests.count(("HEAD", name)) == 1, "a file is opened once"


@pytest.mark.parametrize("ranges", [True, False])
def test_frames_are_those_of_the_file(folder: Path, served: Served, ranges: bool) -> None:
    served.ranges = ranges
    for name, times in (("a.mp4", (0.0, 1.5)), ("b.png", (0.0,))):
        remote, local = at(f"{served.url}/{name}"), MediaSource.from_cell(str(folder / name))
        assert probe(remote) == probe(local)
        np.testing.assert_array_equal(frames(remote, *times), frames(local, *times))


def test_frames_and_sound_come_from_a_file_that_is_opened_once(folder: Path, served: Served) -> None:
    tone = np.sin(np.arange(96000) / 20)
    frames = [np.zeros((48, 64, 3), np.uint8)] * 16
    write_video(folder / "c.mp4", frames, fps=8, sound=Sound(np.stack([tone, tone]), 48000))
    view = View(size=Size(9, 48, 64), fps=8.0)
    rule = AudioRule(rate=16000, samples_per_token=640)
    remote, local = (
        load(FileSample(source=source, view=view, audio=rule, has_audio=True))
        for source in (at(f"{served.url}/c.mp4"), MediaSource.from_cell(str(folder / "c.mp4")))
    )
    assert served.requests.count(("HEAD", "c.mp4")) == 1
    assert torch.equal(remote.conditions["audio"], local.conditions["audio"])
    assert remote.conditions["audio"].abs().max() > 0.5
    assert torch.equal(remote.pixels, local.pixels)


@pytest.mark.parametrize(("name", "reason"), [("gone.mp4", "404"), ("empty.mp4", "is empty"), ("broken.mp4", "")])
def test_a_url_that_gives_no_media_is_an_error_that_names_it(served: Served, name: str, reason: str) -> None:
    url = f"{served.url}/{name}"
    for read in (probe, lambda source: frames(source, 0.0)):
        with pytest.raises(MediaError, match=rf"{url}.*{reason}"):
            read(at(url))


def test_a_server_that_is_slow_or_away_is_an_error_that_names_the_url(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.2)}}
    monkeypatch.setitem(fsspec.config.conf, "http", options)
    served.delay = 1.0
    with pytest.raises(MediaError, match=rf"{served.url}/a\.mp4 cannot be read \(\w*Timeout"):
        probe(at(f"{served.url}/a.mp4"))
    with pytest.raises(MediaError, match=r"http://127\.0\.0\.1:9/a\.mp4 cannot be read \(ConnectionRefused"):
        probe(at("http://127.0.0.1:9/a.mp4"))


def test_a_server_that_fails_between_two_parts_is_an_error_that_names_the_url(folder: Path, served: Served) -> None:
    source = at(f"{served.url}/a.mp4").opened(headers=True)
    with source.open_binary() as file:
        file.read(10)
        (folder / "a.mp4").rename(folder / "moved.mp4")
        try:
            with pytest.raises(MediaError, match=r"a\.mp4 cannot be read .*404"):
                list(iter_frames(source, [0.0]))
        finally:
            (folder / "moved.mp4").rename(folder / "a.mp4")


def test_the_version_of_a_url_changes_with_the_file(folder: Path, served: Served) -> None:
    url = f"{served.url}/b.png"
    first = version(url)
    assert version(url) == first
    assert first[0] == (folder / "b.png").stat().st_size
    os.utime(folder / "b.png", ns=(1, 1))
    assert version(url) != first
    content = (folder / "b.png").read_bytes()
    versions = []
    for part in (0, len(content) // 2, len(content) - 1):
        (folder / "b.png").write_bytes(content[:part] + bytes([255 - content[part]]) + content[part + 1 :])
        os.utime(folder / "b.png", ns=(10**9, 10**9))
        versions.append(version(f"file://{folder}/b.png"))  # which has a time, and no ETag
    assert len({str(told) for told in versions}) == 3
    assert len({str(told[:2]) for told in versions}) == 1
    (folder / "b.png").write_bytes(content)
    with pytest.raises(MediaError, match=r"gone\.png"):
        version(f"{served.url}/gone.png")


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_protocols_of_fsspec_work(folder: Path, protocol: str) -> None:
    url = f"file://{folder}/a.mp4"
    if protocol == "memory":
        url = "memory://clips/a.mp4"
        fsspec.filesystem("memory").pipe("/clips/a.mp4", (folder / "a.mp4").read_bytes())
    source = pickle.loads(pickle.dumps(at(url)))
    assert probe(source) == CLIP
    np.testing.assert_array_equal(frames(source, 1.0), frames(MediaSource.from_cell(str(folder / "a.mp4")), 1.0))
    assert version(url)[0] == (folder / "a.mp4").stat().st_size


@pytest.mark.parametrize(
    ("url", "message"),
    [("abfs://bucket/a.mp4", "adlfs"), ("gs://bucket/a.mp4", "gcsfs"), ("nothing://a.mp4", "Protocol not known")],
)
def test_a_protocol_that_cannot_be_opened_says_why(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=rf"{url}.*{message}"):
        probe(at(url))


def test_relative_paths_below_a_url_do_not_leave_it(folder: Path) -> None:
    root = f"file://{folder.parent}"
    source = MediaSource.from_cell(f"{folder.name}/a.mp4", root=root)
    assert source.path == f"{root}/{folder.name}/a.mp4"
    assert probe(source) == CLIP
    with pytest.raises(MediaError, match="leaves its root"):
        MediaSource.from_cell("../a.mp4", root=root)


def test_dead_urls_are_rejected_rows_where_asked_for(served: Served) -> None:
    metadata = MediaMetadata("url", on_error="reject")
    cells = [f"{served.url}/{name}" for name in ("gone.mp4", "a.mp4", "broken.mp4")]
    assert metadata({"url": cells})["width"] == [-1, 64, -1]


@pytest.mark.slow
def test_processes_that_fork_or_are_started_read_urls(folder: Path, served: Served) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"url": [f"{served.url}/{name}" for name in ("a.mp4", "b.png", "a.mp4", "b.png")]})
    probe(at(f"{served.url}/a.mp4"))
    sized = map_columns(dataset, MediaMetadata("url"), num_proc=2)
    assert sized["width"][:] == [64, 800, 64, 800]
    for method in ("fork", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            assert pool.submit(probe, at(f"{served.url}/a.mp4")).result(60) == CLIP
