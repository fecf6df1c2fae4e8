"""Small pictures of clips."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from hf_bucketing.media.thumbnails import animated


@pytest.mark.parametrize(("count", "shown"), [(5, 5), (81, 8)])
def test_an_animation_has_few_frames_and_plays_as_long_as_its_clip(count: int, shown: int) -> None:
    step = 240 // count
    frames = [np.full((60, 200, 3), step * number, np.uint8) for number in range(count)]
    small = animated(frames, fps=10, most_frames=8, max_side=100)
    assert (small.width, small.height) == (100, 30)
    with Image.open(BytesIO(small.data)) as picture:
        assert picture.size == (100, 30)
        assert picture.n_frames == shown
        seconds = 0.0
        for number in range(shown):
            picture.seek(number)
            picture.load()
            seconds += picture.info["duration"] / 1000
            level = np.array(picture.convert("RGB"))[0, 0, 0]
            assert abs(int(level) - step * (number * count // shown)) <= 4
    assert seconds == pytest.approx(count / 10, rel=0.01)
