"""A column of which rows have sound, by the headers of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset

from ..conditions.audio import HAS_AUDIO
from ..errors import MediaError
from ..media.audio import has_audio
from ..media.rows import MediaColumns
from ..media.source import MediaSource
from .arrays import column_array


@dataclass(frozen=True, slots=True)
class AudioColumns:
    """Compute `has_audio`: whether the file of a row has a track of sound, by its header.

    A batch function for `Dataset.map(batched=True)`. Images and rejected rows have none.

    Args:
        files ([`MediaColumns`][hf_bucketing.media.MediaColumns]): Columns of the files.
        on_error (`"raise"` or `"reject"`): Treatment of files that cannot be opened: an error, or no audio, as the
            file is at fault when it is decoded.
    """

    files: MediaColumns
    on_error: Literal["raise", "reject"] = "raise"
    rule_version: int = field(default=1, init=False)

    optional_columns = ()
    output_columns = (HAS_AUDIO,)
    vectorised = False
    reusable = False

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns that a batch must have."""
        return self.files.column, "fps", "num_frames"

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[bool]]:
        """Return the column for a batch.

        Raises:
            MediaError: Under `on_error="raise"`, if a file cannot be opened.
        """
        known: dict[str, bool] = {}  # clips of one video share its header
        has_audio = []
        for cell, fps, frames in zip(*(batch[name] for name in self.input_columns), strict=True):
            if min(fps, frames) <= 0:
                has_audio.append(False)
                continue
            source = self.files.source(cell, name="its file")
            if source.data is not None:
                has_audio.append(self._has_audio(source))
                continue
            if source.path not in known:
                known[source.path] = self._has_audio(source)
            has_audio.append(known[source.path])
        return {HAS_AUDIO: has_audio}

    def _has_audio(self, source: MediaSource) -> bool:
        try:
            return has_audio(source)
        except MediaError:
            if self.on_error == "raise":
                raise
            return False


def describe_audio(dataset: Dataset) -> str:
    """Return a sentence on how many rows have sound."""
    count = int(column_array(dataset, HAS_AUDIO).sum())
    return f"Audio: {count} of {len(dataset)} rows have a track of sound; the others train video alone."
