"""Sound of videos: written, read, resampled and cut with the frames of a clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hf_bucketing import BucketingError, MediaError, Size
from hf_bucketing.conditions.audio import AUDIO, AudioRule
from hf_bucketing.media import MediaSource, View, write_video
from hf_bucketing.media.audio import has_audio, read_audio
from hf_bucketing.media.rows import FileSample
from hf_bucketing.media.sample import load
from hf_bucketing.media.write import Sound

RATE = 48000
SECONDS = 4.0
RULE = AudioRule(rate=16000, samples_per_token=640)
PITCHES = (440.0, 1200.0)
"""Pitches in Hz of the left channel, and of the right one, which is silent up to the third second."""


def tones(seconds: float = SECONDS, rate: int = RATE) -> npt.NDArray[np.float32]:
    times = np.arange(int(seconds * rate)) / rate
    left, right = (0.5 * np.sin(2 * np.pi * pitch * times) for pitch in PITCHES)
    return np.stack([left, np.where(times < 3, 0, right)]).astype(np.float32)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> MediaSource:
    path = tmp_path_factory.mktemp("audio") / "tones.mp4"
    write_video(path, frames(), fps=8, sound=Sound(tones(), RATE))
    return MediaSource.from_cell(str(path))


def frames(seconds: float = SECONDS) -> npt.NDArray[np.uint8]:
    return np.zeros((int(8 * seconds), 16, 32, 3), np.uint8)


def pitch(samples: npt.NDArray[np.float32], rate: int) -> float:
    """Return the frequency with the most energy."""
    return float(np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples))


def loudness(samples: npt.NDArray[np.float32]) -> float:
    """Return the root of the mean square, without the ends."""
    return float(np.sqrt(np.square(samples[2000:-2000]).mean()))


def test_sound_is_read_at_another_rate_with_its_pitch_and_loudness(clip: MediaSource) -> None:
    heard = read_audio(clip, start=0.0, samples=int(SECONDS * 16000), rate=16000)
    assert heard is not None
    assert heard.shape == (2, 64000)
    assert heard.dtype == np.float32
    assert pitch(heard[0], 16000) == pytest.approx(PITCHES[0], abs=1)
    assert pitch(heard[1], 16000) == pytest.approx(PITCHES[1], abs=1)
    assert loudness(heard[0]) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("start", [0.0, 1.5, 2.75, 3.5])
def test_sound_is_cut_at_the_seconds_of_the_clip(clip: MediaSource, start: float) -> None:
    """It begins where the whole track, at that rate, has this second: also after a seek."""
    rate, samples = 16000, 8000
    whole = read_audio(clip, start=0.0, samples=int(SECONDS * rate), rate=rate)
    part = read_audio(clip, start=start, samples=samples, rate=rate)
    assert whole is not None
    assert part is not None
    expected = whole[:, int(start * rate) : int(start * rate) + samples]
    assert np.abs(part - expected).max() < 0.02
    assert np.abs(expected).max() > 0.4


def test_the_second_channel_begins_when_it_does(clip: MediaSource) -> None:
    heard = read_audio(clip, start=2.5, samples=16000, rate=16000)
    assert heard is not None
    loud = np.flatnonzero(np.abs(heard[1]) > 0.1)
    assert loud[0] / 16000 == pytest.approx(0.5, abs=0.01)


def test_after_the_end_of_the_track_there_is_silence(clip: MediaSource) -> None:
    heard = read_audio(clip, start=SECONDS - 0.5, samples=16000, rate=16000)
    assert heard is not None
    assert np.abs(heard[:, :7000]).max() > 0.4
    assert np.abs(heard[:, 10000:]).max() == 0


def test_one_channel_is_repeated(tmp_path: Path) -> None:
    write_video(tmp_path / "mono.mp4", frames(1.0), fps=8, sound=Sound(tones(1.0)[:1], RATE))
    heard = read_audio(MediaSource.from_cell(str(tmp_path / "mono.mp4")), start=0.0, samples=8000, rate=16000)
    assert heard is not None
    assert np.array_equal(heard[0], heard[1])
    assert loudness(heard[0]) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


def test_a_video_without_a_track_has_no_audio(tmp_path: Path, clip: MediaSource) -> None:
    write_video(tmp_path / "silent.mp4", frames(1.0), fps=8)
    silent = MediaSource.from_cell(str(tmp_path / "silent.mp4"))
    assert read_audio(silent, start=0.0, samples=8000, rate=16000) is None
    assert [has_audio(source) for source in (silent, clip)] == [False, True]


def test_a_file_that_is_no_video_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"nothing")
    broken = MediaSource.from_cell(str(tmp_path / "broken.mp4"))
    for read in (has_audio, lambda source: read_audio(source, start=0.0, samples=1, rate=16000)):
        with pytest.raises(MediaError, match=r"The sound of .*broken\.mp4 cannot be decoded"):
            read(broken)


def test_tokens_follow_from_frames_and_rate() -> None:
    assert RULE.num_tokens([24, 24, 1], [24.0, 16.0, 0.0]).tolist() == [25, 38, 0]
    with pytest.raises(BucketingError, match="samples per token of at least 1"):
        AudioRule(rate=16000, samples_per_token=0)


def sample_of(source: MediaSource, view: View, *, present: bool = True) -> FileSample:
    return FileSample(source=source, view=view, audio=RULE, has_audio=present)


def test_a_sample_has_the_sound_of_its_own_frames_in_whole_tokens(clip: MediaSource) -> None:
    view = View(size=Size(9, 16, 32), fps=8.0, start=8, offset=1.0)
    heard = load(sample_of(clip, view)).conditions[AUDIO].numpy()
    assert heard.shape == (2, 28 * 640)
    whole = read_audio(clip, start=0.0, samples=64000, rate=16000)
    assert whole is not None
    assert np.abs(heard - whole[:, 32000 : 32000 + 28 * 640]).max() < 0.02
    mirrored = load(sample_of(clip, replace(view, flip=True))).conditions[AUDIO].numpy()
    assert np.array_equal(mirrored, heard[::-1])


def test_a_sample_without_a_track_has_no_sound_and_one_that_lost_it_is_named(tmp_path: Path) -> None:
    write_video(tmp_path / "silent.mp4", frames(1.0), fps=8)
    silent, view = MediaSource.from_cell(str(tmp_path / "silent.mp4")), View(size=Size(5, 16, 32), fps=8.0)
    assert load(sample_of(silent, view, present=False)).conditions[AUDIO].shape == (2, 0)
    with pytest.raises(MediaError, match=r"silent\.mp4 has no sound, but its row says so"):
        load(sample_of(silent, view))
