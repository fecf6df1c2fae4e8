"""The audio of a sample: its rate and length by a model's rule, and the tokens that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import FloatArray, IntArray
from ..buckets.sizes import LatentSpec, Size
from ..errors import BucketingError, explains_arguments

AUDIO = "audio"
"""Name of a sample's audio among what a collator returns as `shown`, and among the encoded conditions of a sample."""

HAS_AUDIO = "has_audio"
"""Column of whether a row's file has a track of sound."""

AUDIO_BITS = 21
"""Lowest bits of a key that stand for tokens of audio; above them come grids of references."""


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

    setting: ClassVar[str] = "audio"
    columns: ClassVar[tuple[str, ...]] = (HAS_AUDIO, "fps")

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

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> RowAudio:
        """Return the audio of rows by their columns."""
        present, fps = (
            np.asarray(columns[name], kind) for name, kind in zip(self.columns, (bool, np.float64), strict=True)
        )
        return RowAudio(rule=self, present=present, fps=fps)

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return the tokens that a key of [`RowAudio.keys`] spells."""
        return key & (1 << AUDIO_BITS) - 1


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
        >>> rows.num_tokens([[9, 64, 64], [9, 64, 64]]).tolist()
        [28, 0]
    """

    name: ClassVar[str] = AUDIO

    rule: AudioRule
    present: npt.NDArray[np.bool_]
    fps: FloatArray

    @property
    def num_rows(self) -> int:
        """Number of the rows."""
        return len(self.present)

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec | None = None) -> IntArray:
        """Return the tokens of the audio of each row, `(n,)`, by the frames that its sample has in a batch.

        Rows without a size, as rejected ones, have none; `samples` as in [`ConditionRows.num_tokens`].
        """
        frames = np.asarray(samples, np.int64).reshape(-1, 3)[:, 0]
        return np.where(self.present, self.rule.num_tokens(frames, self.fps), 0)

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return 0 for each row, as no text encoder is shown audio."""
        return np.zeros(len(self.present), np.int64)

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return the tokens, as rows can be stacked whose audio is equally long, or that have none."""
        return self.num_tokens(samples)

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return the tokens likewise."""
        return self.num_tokens(samples).tolist()

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[tuple[Size, ...]]:
        """Return no size of any row, as audio has a sequence of its own."""
        return [()] * len(self.present)

    @property
    def slowest(self) -> float | None:
        """Lowest frame rate of a row with audio, by which the audio of as many frames is longest; None without any."""
        rates = self.fps[self.present & (self.fps > 0)]
        return float(rates.min()) if len(rates) else None

    def select(self, rows: npt.ArrayLike) -> RowAudio:
        """Return the audio of some rows."""
        chosen = np.asarray(rows, np.int64)
        return replace(self, present=self.present[chosen], fps=self.fps[chosen])
