"""A condition: what a model is shown of a sample beside its noisy latents and its caption."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..buckets.arrays import IntArray
from ..buckets.sizes import LatentSpec, Size
from .sizes import SizeRule

Enters: TypeAlias = Literal["tokens", "latent frames", "channels", "in place", "attention"]
"""Where a condition enters a model: as further grids of tokens, as latent frames in front of those of the sample, as
further channels of its latents, in place of a part of them or added to them, or as keys and values alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(SizeRule):
    """Declare a condition that a recipe takes.

    All but references and appended frames lie over their sample. As tokens, they have its frames and, with
    `downscale_factor`, a fraction of its height and width.

    Args beside those of [`SizeRule`][hf_bucketing.conditions.sizes.SizeRule]:
        name (`str`): Its name, by which a data set has a column of it.
        enters (`"tokens"`, `"latent frames"`, `"channels"`, `"in place"` or `"attention"`): Where it enters the model.
        own_frames (`bool`): Whether it is made of frames of the sample alone, so that no column of a data set has it.
        least (`int`): Fewest of a sample with which the model can be trained: 0 where a data set may lack it.
        most (`int`): Most of a sample.
        argument (`str`, *optional*): Argument of the pipeline's call that takes it; None where the call takes none, or
            takes it as an image to begin with.
        in_text (`bool`): Whether the text encoder is shown it too.
        text_tokens (`int`): Tokens that each adds to the text of its sample, counted with its own.
        text_factor (`int`): How many further ones it adds to that text for each token that it has itself.
        max_ratio (`float`, *optional*): Largest ratio of its longer to its shorter side; by default any.
        pictures_only (`bool`): Whether it is a picture, never a video.
    """

    name: str
    enters: Enters
    own_frames: bool = False
    least: int = 0
    most: int = 1
    argument: str | None = None
    in_text: bool = False
    text_tokens: int = 0
    text_factor: int = 0
    max_ratio: float | None = None
    pictures_only: bool = False

    columns: ClassVar[tuple[str, ...]] = ()

    @property
    def setting(self) -> str:
        """Name under which states of streams hold the rule."""
        return self.name

    @property
    def settings(self) -> dict[str, Any]:
        """What manifests of prepared folders hold of a condition that is counted as tokens over its sample."""
        names = ("name", "enters", "downscale_factor", "multiples", "text_tokens", "text_factor")
        return {name: getattr(self, name) for name in names}

    def rows(self, columns: Mapping[str, Any], *, num_rows: int) -> Any:
        """Return the condition of rows, all of which have it; see [`ConditionRule`]."""
        return RowsOverSamples(rule=self, num_rows=num_rows)

    def tokens_of_key(self, key: int, size: Size, *, spec: LatentSpec) -> int:
        """Return its tokens beside a sample of a size, which no key spells."""
        return int(RowsOverSamples(rule=self, num_rows=1).num_tokens([size], spec=spec)[0])


def condition_named(conditions: Iterable[Condition], name: str) -> Condition | None:
    """Return the condition of a name; None where there is none."""
    return next((condition for condition in conditions if condition.name == name), None)


def token_conditions(taken: Iterable[Condition], names: Collection[str] | None = None) -> tuple[Condition, ...]:
    """Return conditions that a model takes as tokens over their samples.

    Args:
        taken (iterable of [`Condition`]): All that the model takes.
        names (collection of `str`, *optional*): Names of those that a data set has; by default those that the model
            needs of every sample.
    """
    return tuple(
        condition
        for condition in taken
        if condition.enters == "tokens"
        and not (condition.own_frames or condition.columns)
        and (condition.least if names is None else condition.name in names)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowsOverSamples:
    """A condition that every row has as tokens over its sample.

    Args:
        rule ([`Condition`]): The condition.
        num_rows (`int`): Number of the rows.

    Example:
        >>> depth = Condition(name="control", enters="tokens", downscale_factor=2)
        >>> spec = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
        >>> depth.rows({}, num_rows=2).num_tokens([[9, 64, 96], [0, 0, 0]], spec=spec).tolist()
        [18, 0]
    """

    rule: Condition
    num_rows: int

    @property
    def name(self) -> str:
        """Name of the condition."""
        return self.rule.name

    def select(self, rows: npt.ArrayLike) -> RowsOverSamples:
        """Return it of some rows."""
        return replace(self, num_rows=np.size(rows))

    def num_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return its tokens of each row, `(n,)`, see [`ConditionRows.num_tokens`]."""
        grids = spec.grid_of(*self._row_sizes(samples, spec).T)
        return np.where(has_size(samples), np.prod(grids, axis=0), 0) + self.text_tokens(samples, spec=spec)

    def text_tokens(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return those of text among them."""
        tokens = np.prod(spec.grid_of(*self._row_sizes(samples, spec).T), axis=0)
        return np.where(has_size(samples), self.rule.text_tokens + self.rule.text_factor * tokens, 0)

    def signatures(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> IntArray:
        """Return 0 for each row, as the size of its sample decides."""
        return np.zeros(self.num_rows, np.int64)

    def keys(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[int]:
        """Return 0 for each row, likewise."""
        return [0] * self.num_rows

    def sizes(self, samples: npt.ArrayLike, *, spec: LatentSpec) -> list[tuple[Size, ...]]:
        """Return its size of each row."""
        return [(Size(*size),) for size in self._row_sizes(samples, spec).tolist()]

    def _row_sizes(self, samples: npt.ArrayLike, spec: LatentSpec) -> IntArray:
        """Return frames, height and width of each row, `(n, 3)`."""
        targets = np.maximum(np.asarray(samples, np.int64).reshape(-1, 3), 1)
        over = self.rule if self.rule.lie_over else self.rule.within(None, 1)
        return over.in_pixels(spec.multiples).sizes(targets, targets)


def has_size(samples: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return whether each row has a size, `(n,)`."""
    return np.asarray(samples, np.int64).reshape(-1, 3).min(1, initial=1) > 0
