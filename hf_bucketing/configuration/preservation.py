"""Settings of samples and captions whose target is a prediction of the base model: preservation and sliders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import BucketingError, quoted
from ..settings import check_literals, check_shares, not_default

_BETWEEN = "|"


class CaptionPair(NamedTuple):
    """Captions of what a slider adds, and of what it takes away."""

    plus: str
    minus: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreservationConfig:
    """What adapters leave as the base model has it, and sliders, which aim at a sum of its predictions.

    The base model is the transformer without its adapters, those that a run starts from included.

    Args:
        preservation (`"prior"`, `"blank"` or `"class"`, *optional*): Caption of preserved samples, whose target is the
            prediction of the base model for that caption in place of the data: `"prior"` is the sample's own, so that
            the model stays as it is on such samples; `"blank"` the empty one, so that it stays as it is without a
            caption; `"class"` that of `preservation_caption`, so that the rest of a class stays apart from a new
            member of it. By default nothing is preserved.
        preservation_share (`float`): Share of the samples that are preserved, drawn anew in every epoch, beside rows
            that the data set marks with a column `is_regularization`, all of which are.
        preservation_caption (`str`, *optional*): Caption of `preservation="class"`, such as "a person".
        preservation_weight (`float`): Factor of the loss of preserved samples. Each counts as one sample in the mean
            all the same, so that the factor changes nothing about the others.
        slider (`list` of `str`, *optional*): Pairs of captions, such as "a smiling person|a frowning person", one of
            which is drawn for each sample that is not preserved. Its target is the prediction of the base model for
            its own caption, plus `slider_strength` times the difference of those for the pair.
        slider_strength (`float`): Factor of that difference.

    Raises:
        BucketingError: On an impossible value, a setting without effect, or preservation of nothing.
    """

    preservation: Literal["prior", "blank", "class"] | None = None
    preservation_share: float = 0.0
    preservation_caption: str | None = None
    preservation_weight: float = 1.0
    slider: list[str] | None = None
    slider_strength: float = 1.0

    def __post_init__(self) -> None:
        check_literals(self)
        check_shares(self, "preservation_share")
        if (self.preservation == "class") != bool(self.preservation_caption):
            raise BucketingError(
                '`preservation="class"` and `preservation_caption` go together; give both or neither.'
            )
        without = ["preservation_share", "preservation_weight"] if self.preservation is None else []
        without += ["slider_strength"] if self.slider is None else []
        if unused := not_default(self, *without):
            needed = "slider" if unused[0] == "slider_strength" else "preservation"
            raise BucketingError(f"Omit {quoted(unused)}: no effect without `{needed}`.")
        if not 0 < self.preservation_weight < math.inf:
            raise BucketingError(f"`preservation_weight` must be above 0 and finite, got {self.preservation_weight}.")
        if not math.isfinite(self.slider_strength) or not self.slider_strength:
            raise BucketingError(f"`slider_strength` must be finite and not 0, got {self.slider_strength}.")
        if self.slider is not None and not self.slider:
            raise BucketingError("`slider` needs at least one pair of captions.")
        for text, pair in zip(self.slider or [], self.pairs, strict=True):
            if text.count(_BETWEEN) != 1 or pair.plus == pair.minus:
                raise BucketingError(f"`slider` must be two captions with one {_BETWEEN} between, got {text!r}.")

    @property
    def pairs(self) -> list[CaptionPair]:
        """Pairs of captions of the sliders; of an empty caption, the model is given the null text."""
        halves = (text.partition(_BETWEEN) for text in self.slider or [])
        return [CaptionPair(plus.strip(), minus.strip()) for plus, _, minus in halves]

    @property
    def captions(self) -> list[str]:
        """Captions that a run needs beside those of its rows, each once; `""` stands for the null text."""
        blank = [""] if self.preservation == "blank" else []
        single = [] if self.preservation_caption is None else [self.preservation_caption]
        return [*dict.fromkeys([*blank, *single, *(caption for pair in self.pairs for caption in pair)])]

    def describe(self) -> list[str]:
        """Return what is asked of the base model, as lines of text; none if it is nothing."""
        lines = []
        if self.preservation is not None:
            share = f"{self.preservation_share:.0%} of the samples and rows marked as regularization"
            lines.append(f"  Preservation = {self.preservation} for {share}, weight {self.preservation_weight:g}")
        if self.slider is not None:
            lines.append(f"  Slider = {'; '.join(self.slider)}, strength {self.slider_strength:g}")
        return lines

    @property
    def base_predictions(self) -> int:
        """Forward passes of the base model per batch: one, or three for sliders, and none without both."""
        return 3 if self.slider is not None else int(self.preservation is not None)
