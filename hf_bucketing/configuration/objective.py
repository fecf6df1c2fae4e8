"""What the model is trained to do, and what it is kept from forgetting: preservation and sliders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ..buckets.arrays import FloatArray
from ..conditions.shares import read_conditions
from ..errors import BucketingError, quoted
from ..losses.names import Reduction
from ..models.shift import read_shift
from ..settings import check_literals, check_shares, not_default, number_or_text, setting


def read_loss_weight(text: str) -> dict[str, float]:
    """Return the weight of each source that a setting such as `stills=0.5,edits=2` names.

    Raises:
        BucketingError: If it is written in another way, names a source twice, or a weight is not above 0 and finite.

    Example:
        >>> read_loss_weight("stills=0.5,edits=2")
        {'stills': 0.5, 'edits': 2.0}
    """
    weights: dict[str, float] = {}
    for name, equals, number in (term.strip().rpartition("=") for term in text.split(",")):
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or name in weights or not 0 < weight < math.inf:
            raise BucketingError(
                "`loss_weight` must be sources with their weights above 0, each once, such as stills=0.5,edits=2, got "
                f"{text!r}."
            )
        weights[name] = weight
    return weights


def weights_of_sources(text: str | None, sources: Sequence[str]) -> FloatArray | None:
    """Return the weight of each source in the loss, `(n,)`, 1 where it is not named; None where none is.

    Args:
        text (`str`, *optional*): The setting.
        sources (sequence of `str`): Names of the sources.
    """
    named = {} if text is None else read_loss_weight(text)
    return np.array([named.get(name, 1.0) for name in sources]) if named and sources else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What the model is trained to do.

    Args:
        weighting_scheme (`"logit_normal"` or `"uniform"`, *optional*): Distribution of noise levels in flow matching;
            by default `"logit_normal"`. Denoising models such as Latte have none.
        shift (`float` or `str`, *optional*): Shift of noise levels towards noise in flow matching; by default that of
            the pipeline's scheduler, which for some models grows with a sample's tokens, up to the most that its
            configuration names. A number is one shift for all samples. `"tokens"` grows with the tokens as Flux's,
            `"pixels"` with the square root of the pixels as in Stable Diffusion 3, 3 at 1024×1024. `"resolution"` is
            what the model's authors name for some resolutions, and `480x832:2,720x1280:5` names them: height, width
            and shift. `"unbounded"` is the scheduler's, also beyond the most tokens that it names. `"flux2"` is what
            FLUX.2's pipelines render with in 50 steps, about 7.6 at 1024×1024; the default there is the scheduler's,
            3.2.
        guidance (`float`, *optional*): Guidance scale that distilled models which embed one are given in training:
            Flux, FLUX.2 [dev], HunyuanVideo and HunyuanImage. It is 1 by default, since the loss aims at the data
            itself, without guidance. diffusers' examples take 3.5, and 30 for controls.
        snr_gamma (`float`, *optional*): Gamma of min-SNR loss weighting, such as 5.0, for denoising models such as
            Latte.
        loss_reduction (`"sample"` or `"token"`): Unit of equal weight in the loss: every sample, or every token.
        caption_dropout (`float`): Share of captions replaced by the empty one, for classifier-free guidance.
        reference_dropout (`float`): Share of samples that are shown no references, so that the model also works
            without; in buckets, the share of batches.
        condition (`str`, *optional*): Parts of samples that the model is shown without noise, and the share of samples
            that each is drawn for, such as `first_frame:0.3,prefix:0.2,none:0.5`. A condition is `first_frame`,
            `last_frame`, `prefix`, `suffix`, `keyframes`, `appended_first_frame`, `appended_last_frame` or
            `appended_keyframes` (as further tokens), `mask` (what masks leave black) or `reference` (which the others
            of a list that names it are not shown), or several of them joined by `+`; `prefix@2` has two latent frames,
            and `prefix` any number. Where audio is trained, `video` shows a sample's video and `audio` its audio, so
            that the other is generated, and `no_audio` trains its video alone. `prefix:0.2:0.5` gives these samples a
            weight of 0.5 in the loss, beside 1 of others. After a semicolon, a source of the data set has shares of
            its own: `first_frame:0.3,none:0.7;stills=none`. By default image-to-video models are shown what their
            pipelines show, and others nothing.
        loss_weight (`str`, *optional*): Weights of sources of the data set in the loss, such as `stills=0.5,edits=2`:
            how much a sample counts beside one of another source; 1 where it is not named.
        audio_weight (`float`): Weight of the loss of a sample's audio beside that of its video, where a data set has
            audio; the losses are added.

    Raises:
        BucketingError: On an impossible value.
    """

    weighting_scheme: Literal["logit_normal", "uniform"] | None = None
    shift: float | str | None = setting(None, parse=number_or_text)
    guidance: float | None = None
    snr_gamma: float | None = None
    loss_reduction: Reduction = "sample"
    caption_dropout: float = setting(0.0, on_resume="applied", held_out=0.0)
    reference_dropout: float = setting(0.0, on_resume="applied", held_out=0.0)
    condition: str | None = setting(None, on_resume="applied", planned=True)
    loss_weight: str | None = setting(None, on_resume="applied")
    audio_weight: float = 1.0

    def __post_init__(self) -> None:
        check_literals(self)
        check_shares(self, "caption_dropout", "reference_dropout")
        if self.shift is not None:
            read_shift(self.shift)
        if self.condition is not None:
            conditions = read_conditions(self.condition)
            if self.reference_dropout and conditions.draws_references:
                raise BucketingError(
                    "`reference_dropout` and `reference` in `condition` both draw who is shown references; give one."
                )
        if self.loss_weight is not None:
            read_loss_weight(self.loss_weight)
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise BucketingError(f"`guidance` must be a number that is not negative, got {self.guidance!r}.")
        if not 0 < self.audio_weight < math.inf:
            raise BucketingError(f"`audio_weight` must be above 0 and finite, got {self.audio_weight!r}.")


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
