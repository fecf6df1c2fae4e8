"""Audio of the rows of a data set: its rate and length by a model's rule, and the tokens that each row's takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..errors import BucketingError, explains_arguments

AUDIO = "audio"
"""Name of a sample's audio among what a collator returns as `shown`, and among the encoded conditions of a sample."""

HAS_AUDIO = "has_audio"
"""Column of whether a row's file has a track of sound."""


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AudioRule:
    """Rate and length of the audio of a sample, by the model that is trained on it.

    Args:
        rate (`int`): Samples of sound per second.
        samples_per_token (`int`): Samples of sound per token.
        tokens_at_once (`int`): Tokens of each such stretch: 2 for models in which left and right have their own.
        rounds_up (`bool`): Whether a sound that ends within a stretch has all of it; else it ends at the nearest one.

    Raises:
        BucketingError: If a number is below 1.
    """

    rate: int
    samples_per_token: int
    tokens_at_once: int = 1
    rounds_up: bool = False

    def __post_init__(self) -> None:
        if min(self.rate, self.samples_per_token, self.tokens_at_once) < 1:
            raise BucketingError(f"Audio needs a rate and samples per token of at least 1, got {self}.")

    def __repr__(self) -> str:
        """Return the settings that are not defaults, as locks of data have them."""
        return f"AudioRule({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that are not defaults, as prepared folders and keys of caches have them.

        Example:
            >>> AudioRule(rate=16000, samples_per_token=640).settings
            {'rate': 16000, 'samples_per_token': 640}
        """
        values = {rule.name: (getattr(self, rule.name), rule.default) for rule in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def num_tokens(self, frames: npt.ArrayLike, fps: npt.ArrayLike) -> IntArray:
        """Return the tokens of the audio beside some frames, as many as the model's pipeline makes; 0 for images.

        Args:
            frames (array of `int`): Frames of each sample.
            fps (array of `float`): Frames per second of each sample; 0 for an image.

        Example:
            >>> AudioRule(rate=16000, samples_per_token=640).num_tokens([121, 25, 1], [24.0, 12.0, 0.0]).tolist()
            [126, 52, 0]
        """
        rates = np.asarray(fps, np.float64)
        seconds = np.where(rates > 0, np.asarray(frames) / np.where(rates > 0, rates, 1.0), 0.0)
        if self.rounds_up:  # in the pipeline's order, as rounding up shows the last digit of a quotient
            stretches = np.ceil(seconds * self.rate / self.samples_per_token)
        else:
            stretches = np.round(seconds * (self.rate / self.samples_per_token))
        return stretches.astype(np.int64) * self.tokens_at_once

    def num_samples(self, tokens: int) -> int:
        """Return the samples of sound of so many tokens.

        Example:
            >>> rule = AudioRule(rate=32000, samples_per_token=800, tokens_at_once=2)
            >>> rule.num_samples(6), rule.tokens_of(2400)
            (2400, 6)
        """
        return tokens // self.tokens_at_once * self.samples_per_token

    def tokens_of(self, samples: int) -> int:
        """Return the tokens of so many samples of sound: the inverse of [`num_samples`]."""
        return samples // self.samples_per_token * self.tokens_at_once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowAudio:
    """Audio of rows: which have some, and the frame rates by which it is as long as their frames.

    Args:
        rule ([`AudioRule`]): Rule of its tokens.
        present (array of `bool`, shape `(n,)`): Whether each row has audio.
        fps (array of `float`, shape `(n,)`): Frames per second of each row; 0 for an image.

    Example:
        >>> rule = AudioRule(rate=16000, samples_per_token=640)
        >>> rows = RowAudio(rule=rule, present=np.array([True, False]), fps=np.array([8.0, 8.0]))
        >>> rows.num_tokens([9, 9]).tolist()
        [28, 0]
    """

    rule: AudioRule
    present: npt.NDArray[np.bool_]
    fps: FloatArray

    @classmethod
    def of_columns(cls, columns: Mapping[str, npt.ArrayLike], *, rule: AudioRule) -> RowAudio:
        """Return that of rows by their columns `has_audio` and `fps`."""
        present, fps = np.asarray(columns[HAS_AUDIO], bool), np.asarray(columns["fps"], np.float64)
        return cls(rule=rule, present=present, fps=fps)

    def num_tokens(self, frames: npt.ArrayLike) -> IntArray:
        """Return the tokens of the audio of each row, `(n,)`, by the frames that its sample has in a batch, `(n,)`.

        Rows of 0 frames, as rejected ones, have none.
        """
        return np.where(self.present, self.rule.num_tokens(frames, self.fps), 0)

    @property
    def slowest(self) -> float | None:
        """Lowest frame rate of a row with audio, by which the audio of as many frames is longest; None without any."""
        rates = self.fps[self.present & (self.fps > 0)]
        return float(rates.min()) if len(rates) else None

    def select(self, rows: npt.ArrayLike) -> RowAudio:
        """Return the audio of some rows."""
        chosen = np.asarray(rows, np.int64)
        return replace(self, present=self.present[chosen], fps=self.fps[chosen])
