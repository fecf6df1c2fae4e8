"""Which trainers are compared, and what their files change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_bucketing import BucketingError
from hf_bucketing.report.peers.diffusion_pipe import DiffusionPipe
from hf_bucketing.report.peers.musubi_tuner import Folder, MusubiTuner
from hf_bucketing.report.peers.outcome import PEERS, choose_peers
from tests.report.peers.test_rules import SPEC, TABLE

MUSUBI = """
[general]
resolution = [832, 480]
enable_bucket = true
batch_size = 2
[[datasets]]
image_directory = "images"
bucket_no_upscale = true
[[datasets]]
video_directory = "videos"
target_frames = [33, 81]
frame_extraction = "slide"
frame_stride = 8
"""
PIPE = """
resolutions = [512]
enable_ar_bucket = true
ar_buckets = [[512, 512], [448, 576]]
frame_buckets = [1, 33]
[[directory]]
path = "clips"
resolutions = [[1280, 720]]
"""


def choose(folder: Path, text: str, **files: str) -> dict:
    for name, content in files.items():
        (folder / f"{name}.toml").write_text(content)
    return choose_peers(text.replace("=", f"={folder}/"), table=TABLE, spec=SPEC)


def test_peers_without_a_file_have_the_area_and_the_frames_of_the_table() -> None:
    peers = choose_peers("all", table=TABLE, spec=SPEC)
    assert [*peers] == [*PEERS]
    assert peers["musubi-tuner"].videos == Folder(resolution=(640, 640), target_frames=(33, 81))
    assert (peers["diffusion-pipe"].sides, peers["diffusion-pipe"].frames) == ((640.0,), (1, 33, 81))
    assert peers["diffusion-pipe"].ratios == (0.5, 0.63, 0.794, 1.0, 1.26, 1.587, 2.0)
    assert (peers["simpletuner"].megapixels, peers["simpletuner"].num_frames) == (0.4096, 81)
    assert (peers["ai-toolkit"].resolution, peers["ai-toolkit"].num_frames, peers["ai-toolkit"].step) == (640, 81, 16)
    assert peers["ltx-trainer"].buckets == TABLE.sizes
    assert peers["diffusers"].resolution == 640


def test_files_decide_what_they_hold_and_paths_need_not_exist(tmp_path: Path) -> None:
    peers = choose(tmp_path, "musubi-tuner=a.toml, diffusion-pipe=b.toml", a=MUSUBI, b=PIPE)
    assert peers == {
        "musubi-tuner": MusubiTuner(
            images=Folder(resolution=(832, 480), bucket_no_upscale=True),
            videos=Folder(resolution=(832, 480), target_frames=(33, 81), frame_extraction="slide", frame_stride=8),
        ),
        "diffusion-pipe": DiffusionPipe(sides=(960.0,), ratios=(0.778, 1.0), frames=(1, 33)),
    }


def test_settings_that_a_file_lacks_are_the_trainers(tmp_path: Path) -> None:
    peers = choose(tmp_path, "musubi-tuner=a.toml", a='[[datasets]]\nimage_directory = "images"')
    assert peers["musubi-tuner"] == MusubiTuner(images=Folder(enable_bucket=False), videos=None)
    assert peers["musubi-tuner"].images.resolution == (960, 544)


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("diffusion_pipe", "", "did you mean diffusion-pipe"),
        ("novelai=a.toml", PIPE, "reads no file of novelai"),
        ("musubi-tuner=none.toml", "", "cannot be read"),
        ("musubi-tuner=a.toml", "datasets = [", "is no TOML"),
        ("diffusion-pipe=a.toml", '[[directory]]\npath = "clips"', "a.toml: It has no resolutions"),
        (
            "musubi-tuner=a.toml",
            '[[datasets]]\nimage_directory = "a"\nresolution = 512\n[[datasets]]\nimage_directory = "b"',
            "a.toml: Its sources of images, or of videos, differ",
        ),
        ("musubi-tuner=a.toml", MUSUBI.replace('"slide"', '"slides"'), "a.toml: .*frame_extraction"),
        ("musubi-tuner=a.toml", MUSUBI.replace("[832, 480]", "[832]"), "a.toml: `resolution` must hold"),
        ("musubi-tuner=a.toml", MUSUBI.replace("[832, 480]", '"512"'), "a.toml: `resolution` must"),
        ("musubi-tuner=a.toml", MUSUBI.replace("stride = 8", "stride = 0"), "a.toml: `frame_stride` must"),
        ("diffusion-pipe=a.toml", PIPE.replace("[[1280, 720]]", "720"), "a.toml: a setting of diffusion-pipe has"),
        (
            "diffusion-pipe=a.toml",
            '[[directory]]\npath = "a"\nresolutions = [512]\n[[directory]]\npath = "b"\nresolutions = [640]',
            "a.toml: Its directories differ",
        ),
    ],
)
def test_what_cannot_be_compared_is_named(tmp_path: Path, text: str, content: str, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        choose(tmp_path, text, a=content)
