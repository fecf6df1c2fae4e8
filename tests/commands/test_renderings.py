"""Clips side by side with labels."""

from __future__ import annotations

import numpy as np

from hf_bucketing.commands.renderings import labelled_grid


def test_a_grid_has_every_clip_in_its_place_below_its_labels() -> None:
    clips = [np.full((3, 32, 48, 3), 10 * number, np.uint8) for number in range(6)]
    for number, clip in enumerate(clips):
        clip[2] += np.uint8(number)
    grid = labelled_grid(clips, rows=["first", "second"], columns=["a", "b", "c"])
    assert grid.shape == (3, 24 + 2 * (24 + 32), 3 * 48, 3)
    for number, clip in enumerate(clips):
        row, column = divmod(number, 3)
        top = 24 + row * 56 + 24
        assert np.array_equal(grid[:, top : top + 32, column * 48 : (column + 1) * 48], clip)
    bands = [grid[0, :24], grid[0, 24:48], grid[0, 80:104]]
    assert all(band.min() < 100 and band.max() == 255 for band in bands), "labels are dark on white"
    assert not np.array_equal(bands[1], bands[2])


def test_a_long_label_is_cut_at_the_width_of_its_clips() -> None:
    clips = [np.zeros((1, 8, 64, 3), np.uint8)] * 2
    grid = labelled_grid(clips, rows=["a very long prompt " * 9], columns=["wide " * 9, ""])
    assert grid.shape == (1, 24 + 24 + 8, 128, 3)
    assert grid[0, :24, 64:].min() == 255, "the label of the first column stays in it"
