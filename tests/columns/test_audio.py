"""The column that says which rows have sound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketingError, LatentSpec, MediaError
from hf_bucketing.columns.audio import AudioColumns, describe_audio
from hf_bucketing.columns.preparation import check_sources
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.audio import HAS_AUDIO
from hf_bucketing.media import write_video
from hf_bucketing.media.rows import MediaColumns
from hf_bucketing.media.write import Sound

FRAMES = np.zeros((8, 16, 32, 3), np.uint8)
TABLE = TableConfig(buckets="32,64")
COLUMNS = AudioColumns(MediaColumns(column="video"))


def test_files_with_a_track_are_found_by_path_and_by_bytes(tmp_path: Path) -> None:
    write_video(tmp_path / "heard.mp4", FRAMES, fps=8, sound=Sound(np.zeros((1, 16000)), 16000))
    write_video(tmp_path / "silent.mp4", FRAMES, fps=8)
    Image.new("RGB", (32, 16)).save(tmp_path / "image.png")
    heard, silent, image = (str(tmp_path / name) for name in ("heard.mp4", "silent.mp4", "image.png"))
    embedded = {"bytes": Path(heard).read_bytes(), "path": None}
    cells = [heard, silent, image, heard, embedded, str(tmp_path / "missing.mp4")]
    rows = {"video": cells, "fps": [8.0, 8.0, 0.0, 8.0, 8.0, 0.0], "num_frames": [8, 8, 1, 4, 8, -1]}
    assert COLUMNS(rows)[HAS_AUDIO] == [True, False, False, True, True, False]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"nothing")
    with pytest.raises(MediaError, match=r"broken\.mp4"):
        COLUMNS({"video": [str(tmp_path / "broken.mp4")], "fps": [8.0], "num_frames": [8]})


def test_a_sentence_says_how_many_rows_have_sound() -> None:
    rows = Dataset.from_dict({HAS_AUDIO: [True, False, True]})
    assert describe_audio(rows) == "Audio: 2 of 3 rows have a track of sound; the others train video alone."


@pytest.mark.parametrize(
    ("others", "streaming", "message"),
    [
        ([SourceConfig(dataset="b", table=TABLE)], False, "`with_audio` must be the same for all sources"),
    ],
)
def test_sources_differ_not_in_audio_and_streams_have_none(
    others: list[SourceConfig], streaming: bool, message: str
) -> None:
    sources = [SourceConfig(dataset="a", table=TABLE, with_audio=True), *others]
    with pytest.raises(BucketingError, match=message):
        check_sources(
            sources, spec=LatentSpec(temporal_stride=8, spatial_stride=32, patch=(1, 1, 1)), streaming=streaming
        )
