"""Twenty files as people bring them: from telephones, editors and downloads, some of them faulty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image

from tests.media.heif import blocks, save_tiles

FAULTY = {
    "cut off.mp4": "the file ends too early",
    "empty.mp4": "the file has no bytes",
    "no caption.mp4": "there is no text beside it",
    "blank.mp4": "its text is blank",
    "letter.mp4": "its text is Latin-1, and not UTF-8",
}
"""Faulty files, and why."""

GOOD = (
    "Hündchen.mp4", "IMG_0001.MOV", "IMG_0002.MOV", "ten bit.mp4", "portrait.mp4", "square.webm", "long.mkv",
    "silent.avi", "loud.mp4", "variable.mp4", "wave.gif", "dance.webp", "logo.png", "phone.heic", "turned.jpg",
)  # fmt: skip
"""The other files."""


def frames_of(count: int, height: int, width: int, *, seed: int = 0) -> list[np.ndarray]:
    """Return pictures of a bright square that moves over random blocks, `(height, width, 3)` each."""
    ground = np.asarray(blocks(width, height, seed=seed)) // 3
    frames = []
    for number in range(count):
        frame = ground.copy()
        left = (width - 24) * number // max(1, count - 1)
        frame[height // 4 : height // 4 + 24, left : left + 24] = (230, 60, 40)
        frames.append(frame)
    return frames


def write_clip(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    turned: int = 0,
    sound: bool = False,
    times: Sequence[int] | None = None,
) -> None:
    """Write frames at 12 per second, or at `times` in twelfths of a second, turned by degrees for display."""
    height, width = frames[0].shape[:2]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=12)
        stream.height, stream.width, stream.pix_fmt = height, width, pixels
        if turned:
            stream.set_display_rotation(turned)
        audio = container.add_stream("aac", rate=8000, layout="mono") if sound else None
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts = number if times is None else times[number]
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if audio is not None:
            tone = np.sin(np.arange(8000 * len(frames) // 12) / 3).astype(np.float32)[None]
            for start in range(0, tone.shape[1] - 1023, 1024):
                part = np.ascontiguousarray(tone[:, start : start + 1024])
                heard = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                heard.sample_rate, heard.pts = 8000, start
                container.mux(audio.encode(heard))
            container.mux(audio.encode())


def write_messy(folder: Path) -> None:
    """Write the twenty files with a caption beside each."""
    folder.mkdir(parents=True)
    clips = {name: frames_of(30, 64, 96, seed=seed) for seed, name in enumerate((*GOOD[:10], *FAULTY))}
    clips |= {
        "portrait.mp4": frames_of(30, 96, 64),
        "square.webm": frames_of(24, 80, 80),
        "long.mkv": frames_of(90, 64, 96),
    }
    settings = {
        "IMG_0001.MOV": {"turned": 90, "sound": True},
        "IMG_0002.MOV": {"turned": 270},
        "ten bit.mp4": {"codec": "libx265", "pixels": "yuv420p10le"},
        "square.webm": {"codec": "libvpx-vp9"},
        "silent.avi": {"codec": "mpeg4"},
        "loud.mp4": {"sound": True},
        "variable.mp4": {"times": np.cumsum(np.arange(30) % 3 + 1).tolist()},
    }
    for name, frames in clips.items():
        write_clip(folder / name, frames, **settings.get(name, {}))
    content = (folder / "cut off.mp4").read_bytes()
    (folder / "cut off.mp4").write_bytes(content[: len(content) // 2])
    (folder / "empty.mp4").write_bytes(b"")
    pictures = [Image.fromarray(frame) for frame in frames_of(24, 64, 96, seed=7)]
    for name in ("wave.gif", "dance.webp"):
        pictures[0].save(folder / name, save_all=True, append_images=pictures[1:], duration=83, loop=0)
    alpha = Image.fromarray(np.tile(np.arange(96, dtype=np.uint8) * 2, (64, 1)))
    logo = pictures[0].copy()
    logo.putalpha(alpha)
    logo.save(folder / "logo.png")
    save_tiles(folder / "phone.heic", blocks(120, 100), rows=2, columns=2)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be shown after a quarter turn
    pictures[0].save(folder / "turned.jpg", exif=turned)
    for name in (*GOOD, *FAULTY):
        (folder / name).with_suffix(".txt").write_text(f"what {Path(name).stem} shows", encoding="utf-8")
    (folder / "no caption.txt").unlink()
    (folder / "blank.txt").write_text(" \n")
    (folder / "letter.txt").write_bytes("ein hübscher Hund".encode("latin-1"))
