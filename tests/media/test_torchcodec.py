"""torchcodec: it decodes as PyAV does, caches tell the two apart, and it is refused early where it cannot be loaded.

torchcodec opens the shared libraries of an installed FFmpeg. PyAV ships its own under other names, so the tests run in
a process that finds links to them. `make test` installs torchcodec in a folder of its own.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest

from hf_bucketing import BucketingError, MediaError
from hf_bucketing.media import MediaSource, ViewRule, iter_frames, write_video
from hf_bucketing.training import TrainingConfig
from tests.conftest import ROOT, run, run_script_here
from tests.media.test_media import numbered_frames

CASES = "tests/media/torchcodec_cases.py"


@pytest.fixture
def with_ffmpeg(tmp_path: Path) -> dict[str, str]:
    """Environment of a process that finds torchcodec and FFmpeg; skip if it cannot be loaded there."""
    bundled = Path(av.__file__).parent.parent / "av.libs"
    for library in bundled.glob("lib*.so.*"):
        if parts := re.fullmatch(r"(lib\w+)-\w+\.so\.(\d+)\..*", library.name):
            (tmp_path / f"{parts[1]}.so.{parts[2]}").symlink_to(library)
    packages = os.pathsep.join([str(Path(sys.prefix) / "torchcodec"), *sys.path])
    variables = {"LD_LIBRARY_PATH": f"{tmp_path}:{bundled}", "PYTHONPATH": packages}
    code = "from hf_bucketing.media import check_decoder; check_decoder('torchcodec')"
    tried = run([sys.executable, "-c", code], env=variables, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr.strip().splitlines()[-1])
    return variables


@pytest.mark.every
@pytest.mark.slow
def test_torchcodec_decodes_what_pyav_does(with_ffmpeg: dict[str, str]) -> None:
    counting = "test_without_a_count_that_holds_frames_follow_from_time_or_are_counted"
    unsought = f"{CASES}::{counting}[clip.ts-None-0-24-False]"
    command = [sys.executable, "-m", "pytest", ROOT / CASES, "--deselect", unsought, "-p", "no:cacheprovider"]
    result = run(command, env=with_ffmpeg, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"1\d\d passed, 1 deselected", result.stdout), result.stdout


@pytest.fixture(params=[
    "raise ImportError('of it')", "raise OSError('of it')", "raise RuntimeError('of it.\\nTraceback')",
    "ffmpeg_major_version = None", None,
])  # fmt: skip
def without_torchcodec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchcodec whose import fails as it does without its package, a library of torch, or FFmpeg."""
    if request.param is None:
        monkeypatch.setitem(sys.modules, "torchcodec", None)
        return
    monkeypatch.delitem(sys.modules, "torchcodec", raising=False)
    (tmp_path / "torchcodec.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("without_torchcodec")
def test_a_torchcodec_that_cannot_be_loaded_is_refused_before_anything_is_decoded(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", numbered_frames(3), fps=12)
    clip = MediaSource.from_cell(str(tmp_path / "clip.mp4"))
    for make in (
        lambda: list(iter_frames(clip, [0.0], video_decoder="torchcodec")),
        lambda: ViewRule(video_decoder="torchcodec"),
        lambda: TrainingConfig.from_flat(
            pretrained_model_name_or_path="m", dataset_dir="d", output_dir="o", video_decoder="torchcodec"
        ),
    ):
        with pytest.raises(
            BucketingError,
            match=r'pip install "hf_bucketing\[torchcodec\]".*apt-get install ffmpeg.*video_decoder="pyav"',
        ) as refused:
            make()
        assert "\n" not in str(refused.value)
    sys.modules.pop("torchcodec", None)


@pytest.mark.slow
def test_the_script_of_caches_refuses_it_too(
    prepared_dir: Path, pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    result = run_script_here(
        "cache_latents.py",
        "--dataset_dir",
        prepared_dir,
        "--pretrained_model_name_or_path",
        pipeline_dir,
        "--cache_dir",
        tmp_path / "cache",
        "--output_dir",
        tmp_path / "cached",
        "--video_decoder",
        "torchcodec",
        check=False,
    )
    assert result.returncode == 1
    assert "apt-get install ffmpeg" in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "cached").exists()


def test_a_video_with_transparency_is_refused_with_torchcodec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would show the colours that are hidden."""
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(ffmpeg_major_version=7))
    with av.open(str(tmp_path / "clip.mov"), "w") as container:
        stream = container.add_stream("qtrle", rate=8, width=48, height=32, pix_fmt="argb")
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 48, 4), np.uint8), format="rgba")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(MediaError, match=r'may have transparent parts.*video_decoder="pyav"'):
        list(iter_frames(MediaSource.from_cell(str(tmp_path / "clip.mov")), [0.0], video_decoder="torchcodec"))


@pytest.mark.parametrize("name", ["ffmpeg", "", None])
def test_an_unknown_decoder_is_an_error(name) -> None:
    with pytest.raises(BucketingError, match="`video_decoder` must be"):
        ViewRule(video_decoder=name)
