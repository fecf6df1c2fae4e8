"""From a row of a data set to its sample: which file, which part of it, and what else the model is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.sizes import Size
from ..conditions.audio import AUDIO, HAS_AUDIO, AudioRule
from ..conditions.names import MASK, REFERENCE, all_columns, columns_of, is_missing
from ..conditions.references import REFERENCE_SIZES, ReferenceRule
from ..errors import BucketingError, MediaError
from .probe import MediaInfo
from .source import MediaSource
from .views import View, ViewRule

CLIP_START, CLIP_END = "clip_start", "clip_end"
"""Columns of the seconds of its file at which a row's clip begins and ends, for rows that are clips of videos."""

REGULARIZATION = "is_regularization"
"""Column of whether a row is a regularization sample, and list of a batch that has some."""

SOURCE = "source"
"""List of a batch, of the names of each sample's source, where there are several."""

SOURCE_COLUMN = "hf_bucketing_source"
"""Column of the source of each row, a `ClassLabel` of their names, where there are several."""


def check_flips(views: ViewRule, conditions: Mapping[str, str], references: ReferenceRule) -> None:
    """Raise BucketingError if samples would be mirrored without their references, or `flip_references` has no effect.

    Args:
        views ([`ViewRule`]): Rule that chooses flips.
        conditions (mapping of `str` to `str`): Column of each condition.
        references ([`ReferenceRule`]): Rule of references, which are always mirrored where they lie over their sample.
    """
    apart = REFERENCE in conditions and not references.lie_over
    if apart and views.flip_probability and not views.flip_references:
        raise BucketingError(
            "`flip_probability` would mirror samples and not their references, so that what is left in one is right "
            "in the other. Omit it, or give `flip_references`, which mirrors the references of a mirrored sample too."
        )
    if views.flip_references and not apart:
        why = "references that lie over their samples are always mirrored" if references.lie_over else "there are none"
        raise BucketingError(f"Omit `flip_references`: {why}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSample:
    """One row's file and the part of it that is shown.

    Attributes:
        source ([`MediaSource`]): The file.
        view ([`View`]): Frames, size, crop and flip.
        conditions (mapping of `str` to [`MediaSource`]): Files of what the model is shown beside the text: None for a
            mask that the sample lacks, a tuple of any number of files for `reference`.
        references ([`ReferenceRule`]): Rule of the sizes in which references are shown.
        row ([`MediaInfo`], *optional*): Size, frames and frame rate that the row has, by which the view was chosen.
        reference_sizes (`list` of `int`, *optional*): Frames, height and width of one reference after another that the
            row has, by which their tokens were counted.
        audio ([`AudioRule`], *optional*): Rule of the audio that is loaded with the sample; None if none is.
        has_audio (`bool`): Whether the file has a track of sound, by its row.
    """

    source: MediaSource
    view: View
    conditions: Mapping[str, MediaSource | tuple[MediaSource, ...] | None] = field(default_factory=dict)
    references: ReferenceRule = field(default_factory=ReferenceRule)
    row: MediaInfo | None = None
    reference_sizes: list[int] | None = None
    audio: AudioRule | None = None
    has_audio: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaColumns:
    """Name the columns of a data set that lead to its files.

    Args:
        column (`str`): Media column: paths, bytes, or dictionaries of both (`Image(decode=False)`).
        root (`str`, *optional*): Folder or URL that relative paths start from.
        other_roots (`tuple` of `str`): Folders and URLs of the other sources of a data set that has several.
        conditions (mapping of `str` to `str`): Column of each condition, such as `{"control": "control_path"}`; of
            references also several, separated by commas, whose files follow one another.
        references ([`ReferenceRule`]): Rule of the sizes in which references are shown.
        audio ([`AudioRule`], *optional*): Rule of the audio that is loaded with each sample, of rows that have
            [`HAS_AUDIO`]; by default none is.
    """

    column: str
    root: str | None = None
    other_roots: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    references: ReferenceRule = field(default_factory=ReferenceRule)
    audio: AudioRule | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of what is loaded of each sample beside its pixels."""
        return (*self.conditions, *([] if self.audio is None else [AUDIO]))

    @property
    def shown_columns(self) -> tuple[str, ...]:
        """Columns that tell it."""
        return (*all_columns(self.conditions), *([] if self.audio is None else [HAS_AUDIO]))

    def source(self, cell: Any, *, name: str) -> MediaSource:
        """Return the file that a cell of one of the columns names, see [`MediaSource.from_cell`]."""
        return MediaSource.from_cell(cell, root=self.root, other_roots=self.other_roots, name=name)

    def sample(
        self, row: Mapping[str, Any], size: Size, *, views: ViewRule, draws: npt.NDArray[np.float64], name: str
    ) -> FileSample:
        """Return the sample that a row becomes.

        Args:
            row (mapping): Row with the media column, `num_frames` and `fps`, the columns of conditions, and
                [`CLIP_START`] if it is a clip of a longer video. If it has `width` and `height`, or the
                [`REFERENCE_SIZES`] of its references, loading the files compares them.
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
            conditions={condition: self.condition(condition, row, name=name) for condition in self.conditions},
            references=self.references,
            reference_sizes=row.get(REFERENCE_SIZES),
            audio=self.audio,
            has_audio=self.audio is not None and bool(row[HAS_AUDIO]),
        )

    def condition(
        self, condition: str, row: Mapping[str, Any], *, name: str
    ) -> MediaSource | tuple[MediaSource, ...] | None:
        """Return the file of a condition, or the tuple of files of `reference`, which may be empty.

        None stands for a mask that a row lacks, which is learned as a whole.

        Args:
            condition (`str`): Name of the condition.
            row (mapping): Row with its columns.
            name (`str`): Name of the row in messages.

        Raises:
            MediaError: If a file does not exist, or another condition than a mask or references is missing.
        """
        named = f"{condition} of {name}"
        files = tuple(self.source(cell, name=named) for _, cell in self.cells(condition, row))
        if condition == REFERENCE:
            return files
        if not files and condition != MASK:
            raise MediaError(
                f"The {named} is missing: the column {self.conditions[condition]} holds none. Only a mask may be "
                "missing, and then all of the sample is learned, or references."
            )
        return files[0] if files else None

    def cells(self, condition: str, row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the files that a row has of a condition, as cells, each with its column."""
        for column in columns_of(condition, self.conditions[condition]):
            cell = row[column]
            for file in cell if condition == REFERENCE and isinstance(cell, (list, tuple)) else [cell]:
                if not is_missing(file):
                    yield column, file
