"""From a row of a data set to its sample: which file, which part of it, and what else the model is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.sizes import Size
from ..errors import MediaError
from .conditions import MASK, is_missing
from .probe import MediaInfo
from .source import MediaSource
from .views import View, ViewRule

CLIP_START, CLIP_END = "clip_start", "clip_end"
"""Columns of the seconds of its file at which a row's clip begins and ends, for rows that are clips of videos."""

REGULARIZATION = "is_regularization"
"""Column of whether a row is a regularization sample, and list of a batch that has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSample:
    """One row's file and the part of it that is shown.

    Attributes:
        source ([`MediaSource`]): The file.
        view ([`View`]): Frames, size, crop and flip.
        conditions (mapping of `str` to [`MediaSource`]): Files of what the model is shown beside the text; None for a
            mask that the sample lacks.
        reference_multiples (`tuple[int, int]`): Numbers of which height and width of a reference become multiples.
        row ([`MediaInfo`], *optional*): Size, frames and frame rate that the row has, by which the view was chosen.
    """

    source: MediaSource
    view: View
    conditions: Mapping[str, MediaSource | None] = field(default_factory=dict)
    reference_multiples: tuple[int, int] = (1, 1)
    row: MediaInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaColumns:
    """Name the columns of a data set that lead to its files.

    Args:
        column (`str`): Media column: paths, bytes, or dictionaries of both (`Image(decode=False)`).
        root (`str`, *optional*): Folder or URL that relative paths start from.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources of a data set that has several.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`.
        reference_multiples (`tuple[int, int]`): Pixels per token along height and width, see
            [`LatentSpec`][hf_bucketing.LatentSpec]: references are resized to whole tokens.
    """

    column: str
    root: str | None = None
    other_roots: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    reference_multiples: tuple[int, int] = (1, 1)

    def source(self, cell: Any, *, name: str) -> MediaSource:
        """Return the file that a cell of one of the columns names, see [`MediaSource.from_cell`]."""
        return MediaSource.from_cell(cell, root=self.root, other_roots=self.other_roots, name=name)

    def sample(
        self, row: Mapping[str, Any], size: Size, *, views: ViewRule, draws: npt.NDArray[np.float64], name: str
    ) -> FileSample:
        """Return the sample that a row becomes.

        Args:
            row (mapping): Row with the media column, `num_frames` and `fps`, the columns of conditions, and
                [`CLIP_START`] if it is a clip of a longer video. If it has `width` and `height`, loading the file
                compares them.
            size ([`Size`][hf_bucketing.Size]): Size of the sample.
            views ([`ViewRule`]): Rule that chooses frames, crop and flip.
            draws (array of `float`, shape `(views.num_draws,)`): Uniform numbers in [0, 1).
            name (`str`): Name of the row in messages.

        Raises:
            MediaError: If a file does not exist, a condition other than a mask is missing, or the file has too few
                frames.
        """
        source = self.source(row[self.column], name=name)
        num_frames, fps = int(row["num_frames"]), float(row["fps"])
        view = views.view(
            size,
            num_frames=num_frames,
            fps=fps,
            draws=draws,
            offset=float(row.get(CLIP_START) or 0.0),
            name=source.path,
        )
        described = None
        if "width" in row and "height" in row:
            described = MediaInfo(int(row["width"]), int(row["height"]), num_frames, fps)
        return FileSample(
            source=source,
            row=described,
            view=view,
            conditions={
                condition: self.condition(condition, row[column], name=name)
                for condition, column in self.conditions.items()
            },
            reference_multiples=self.reference_multiples,
        )

    def condition(self, condition: str, cell: Any, *, name: str) -> MediaSource | None:
        """Return the file of a condition; None for a mask that a row lacks, which is learned as a whole.

        Args:
            condition (`str`): Name of the condition.
            cell (any): Cell of its column.
            name (`str`): Name of the row in messages.

        Raises:
            MediaError: If the file does not exist, or another condition than a mask is missing.
        """
        if not is_missing(cell):
            return self.source(cell, name=f"{condition} of {name}")
        if condition == MASK:
            return None
        raise MediaError(
            f"The {condition} of {name} is missing: the column {self.conditions[condition]} holds none. Only a mask "
            "may be missing, and then all of the sample is learned."
        )
