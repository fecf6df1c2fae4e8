"""Parts of samples that a model is shown without noise, drawn for each sample from shares."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import BucketingError, quoted
from ..randomness import Purpose, generator
from .appended import AppendedFrames
from .audio import AUDIO
from .condition import Condition
from .names import REFERENCE

FRAMES = ("first_frame", "last_frame", "prefix", "suffix", "keyframes")
"""Conditions that show whole frames."""
APPENDED = ("appended_last_frame", "appended_keyframes")
"""Conditions that show frames as further tokens at the time of each, every frame encoded by itself. Where a model is
shown frames in their place too, the first needs none of these: its latent is that of one frame already."""
APPENDED_FIRST = "appended_first_frame"
"""Condition that shows the first frame likewise, of models that are shown no frame in its place."""
BLACK = "mask"
"""Condition that shows what a sample's mask leaves out of the loss, in space and time."""
NONE = "none"
VIDEO, NO_AUDIO = "video", "no_audio"
"""Conditions of samples with audio: their video is shown, so that their audio alone is generated; or their audio is
absent. Under [`AUDIO`], their audio is shown, so that their video alone is generated."""
MODALITIES = (VIDEO, AUDIO, NO_AUDIO)

_KINDS = (*FRAMES, APPENDED_FIRST, *APPENDED, BLACK, REFERENCE, *MODALITIES)
_LONG = ("prefix", "suffix", "keyframes", "appended_keyframes")
_PART = re.compile(r"(\w+)(?:@([1-9]\d*))?")


class ConditionPart(NamedTuple):
    """A part of a condition.

    Attributes:
        kind (`str`): One of [`FRAMES`], [`APPENDED_FIRST`], one of [`APPENDED`], of [`MODALITIES`], [`BLACK`], or
            `reference` for the sample's references.
        length (`int`, *optional*): Latent frames, for keyframes their number; at most one less than the
            sample has; by default drawn from 1 to that.
    """

    kind: str
    length: int | None = None

    def __str__(self) -> str:
        return self.kind if self.length is None else f"{self.kind}_{self.length}"

    def show(self, frames: npt.NDArray[np.bool_], *, stride: int, random: np.random.Generator) -> None:
        """Mark the frames `(F,)` of a sample that it shows; the latent frames after the first hold `stride` each."""
        latent_frames = len(frames[::stride])
        if latent_frames == 1:
            return  # an image has no part that leaves something to predict
        length = min(self.length or int(random.integers(1, latent_frames)), latent_frames - 1)
        match self.kind:
            case "first_frame":
                frames[0] = True
            case "last_frame":
                frames[-1] = True
            case "prefix":
                frames[: (length - 1) * stride + 1] = True
            case "suffix":
                frames[-length * stride :] = True
            case "keyframes":
                frames[random.choice(latent_frames, length, replace=False) * stride] = True


Combination: TypeAlias = tuple[ConditionPart, ...]
"""Parts that are shown together; none where nothing is shown."""


def name_of(condition: Combination) -> str:
    """Return the name of a condition in logs, of letters that all trackers take.

    Example:
        >>> name_of((ConditionPart("prefix", 2), ConditionPart("last_frame"))), name_of(())
        ('prefix_2_and_last_frame', 'none')
    """
    return "_and_".join(map(str, condition)) or NONE


class Drawn(NamedTuple):
    """What is shown of a sample.

    Attributes:
        frames (array of `bool`, shape `(F,)`): True for the frames that are shown.
        masked (`bool`): Whether what its mask leaves out is shown too.
        references (`bool`): Whether its references are shown, if it has some.
        video (`bool`): Whether the whole video is shown, if it has audio that is left to generate.
        audio (`bool`): Whether its audio is shown, if it has some.
        no_audio (`bool`): Whether its audio is absent.
        appended (tuple of `int`): Latent frames at which frames are shown as further tokens, rising.
        name (`str`): Name of the condition, see [`name_of`].
        weight (`float`): Weight of the condition in the loss.
    """

    frames: npt.NDArray[np.bool_]
    masked: bool
    references: bool
    video: bool = False
    audio: bool = False
    no_audio: bool = False
    appended: tuple[int, ...] = ()
    name: str = NONE
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ConditionShares:
    """Conditions of a run, and the share of the samples that each is drawn for.

    A sample may also be shown nothing, as images are, of which nothing would be left to predict.

    Args:
        conditions (`tuple`): The parts of each condition.
        shares (`tuple` of `float`): Their shares, above 0, which add up to 1.
        draws_references (`bool`): Whether samples are shown their references where a condition has the part
            `reference`, and else not; by default all are shown theirs.
        weights (`tuple` of `float`, *optional*): Weight of each condition in the loss, above 0; by default 1.

    Raises:
        BucketingError: If a share or a weight is not above 0, or the shares do not add up to 1.
    """

    conditions: tuple[Combination, ...]
    shares: tuple[float, ...]
    draws_references: bool = False
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", self.weights or (1.0,) * len(self.shares))
        if not all(0 < weight < math.inf for weight in self.weights):
            raise BucketingError(f"The weights of `condition` must be above 0 and finite, got {list(self.weights)}.")
        if not all(share > 0 for share in self.shares) or not abs(sum(self.shares) - 1) < 1e-6:
            raise BucketingError(
                f"The shares of `condition` must be above 0 and add up to 1, got {list(self.shares)}; `none` is the "
                "share of samples that are shown nothing."
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all parts, each once."""
        return tuple(dict.fromkeys(part.kind for condition in self.conditions for part in condition))

    @property
    def most_appended(self) -> int:
        """Most frames that a condition appends; [`sys.maxsize`] where it is any number."""
        return min(sys.maxsize, max(sum(map(_most, condition)) for condition in self.conditions))

    @property
    def draws_parts(self) -> bool:
        """Whether parts of the samples themselves are drawn, or that none is; else references alone."""
        return not self.draws_references or any(kind != REFERENCE for kind in self.kinds)

    def dropping_references(self, share: float) -> ConditionShares:
        """Return these conditions, each with references for all but a share of its samples, from 0 to 1."""
        with_references = [(*condition, ConditionPart(REFERENCE)) for condition in self.conditions]
        terms = [
            *zip(with_references, (of_all * (1 - share) for of_all in self.shares), self.weights, strict=True),
            *zip(self.conditions, (of_all * share for of_all in self.shares), self.weights, strict=True),
        ]
        conditions, shares, weights = zip(*(term for term in terms if term[1] > 0), strict=True)
        return ConditionShares(conditions, shares, draws_references=True, weights=weights)

    def draw(
        self,
        *key: int,
        latent_frames: int,
        stride: int,
        references: bool | None = None,
        no_audio: bool | None = None,
        appended: tuple[int, ...] | None = None,
    ) -> Drawn:
        """Draw what is shown of a sample.

        Args:
            key (`int`): Key of the draw, see [`Purpose`][hf_bucketing.randomness.Purpose].
            latent_frames (`int`): Latent frames of the sample.
            stride (`int`): Frames per latent frame after the first.
            references (`bool`, *optional*): Whether its references are shown, where that was drawn before: of the
                conditions, those of the other kind are not drawn, unless there are no others.
            no_audio (`bool`, *optional*): Whether its audio is absent, likewise.
            appended (tuple of `int`, *optional*): Latent frames at which the first sample of its stack, of the same
                size, has frames appended: as many are, and the same ones where no condition names as many.

        Example:
            >>> shares = read_condition("first_frame+suffix@1")
            >>> shares.draw(0, 1, 2, latent_frames=3, stride=2).frames.astype(int).tolist()
            [1, 0, 0, 1, 1]
        """
        random = generator(Purpose.CONDITION, *key)
        shows_all = not self.draws_references
        with_references = np.array([shows_all or ConditionPart(REFERENCE) in parts for parts in self.conditions])
        silent = np.array([ConditionPart(NO_AUDIO) in parts for parts in self.conditions])
        exact = APPENDED_FIRST in self.kinds or 0 in (appended or ())
        count = None if appended is None else len(appended)
        fits = np.array([count is None or _appends(parts, count, exact=exact) for parts in self.conditions])
        shares = np.array(self.shares)
        for has, wanted in ((with_references, references), (silent, no_audio), (fits, True)):
            if wanted is not None and shares[has == wanted].any():
                shares[has != wanted] = 0
        chosen = int(random.choice(len(shares), p=shares / shares.sum()))
        drawn = self.conditions[chosen]
        frames = np.zeros((latent_frames - 1) * stride + 1, bool)
        for part in drawn:
            part.show(frames, stride=stride, random=random)
        places = _append(drawn, latent_frames=latent_frames, count=None if exact else count, random=random)
        kinds = {part.kind for part in drawn}
        return Drawn(
            frames,
            masked=BLACK in kinds,
            references=bool(with_references[chosen]) if references is None else references,
            video=VIDEO in kinds,
            audio=AUDIO in kinds,
            no_audio=bool(silent[chosen]) if no_audio is None else no_audio,
            appended=places if appended is None or len(places) == count else appended,
            name=name_of(drawn),
            weight=self.weights[chosen],
        )


def _most(part: ConditionPart) -> int:
    """Return the most frames that a part appends."""
    if part.kind == APPENDED[1]:
        return part.length or sys.maxsize
    return int(part.kind in (APPENDED_FIRST, APPENDED[0]))


def _appends(condition: Combination, count: int, *, exact: bool) -> bool:
    """Return whether a condition can append as many frames: those that it names, or if not `exact` some or none."""
    named = sum(map(_most, condition))
    return named == count if exact else (named > 0) == (count > 0)


def _append(
    condition: Combination, *, latent_frames: int, count: int | None, random: np.random.Generator
) -> tuple[int, ...]:
    """Return the latent frames at which a condition appends frames, or as many others as `count` says."""
    parts = [part for part in condition if part.kind in APPENDED]
    if latent_frames > 1 and ConditionPart(APPENDED_FIRST) in condition:
        return 0, *_append(tuple(parts), latent_frames=latent_frames, count=None, random=random)
    if latent_frames == 1 or not (parts if count is None else count):
        return ()
    last = [latent_frames - 1] if any(part.kind == APPENDED[0] for part in parts) else []
    places = [*last, *(1 + random.permutation(latent_frames - 1 - len(last))).tolist()]
    if count is None:
        lengths = [part.length or int(random.integers(1, latent_frames)) for part in parts if part.kind == APPENDED[1]]
        count = len(last) + sum(lengths)
    return tuple(sorted(places[:count]))


@dataclass(frozen=True, slots=True)
class SourceConditions:
    """Conditions of a run: shares that its sources have of their own, and those of all others.

    Args:
        others ([`ConditionShares`], *optional*): Shares of sources that are not named; None where all are.
        by_source (mapping of `str` to [`ConditionShares`]): Shares of a source by its name.
    """

    others: ConditionShares | None
    by_source: Mapping[str, ConditionShares] = field(default_factory=dict)

    @property
    def all(self) -> tuple[ConditionShares, ...]:
        """All shares."""
        return (*([] if self.others is None else [self.others]), *self.by_source.values())

    @property
    def draws_parts(self) -> bool:
        """Whether parts of samples are drawn, or that none is; else references alone."""
        return any(shares.draws_parts for shares in self.all)

    @property
    def draws_references(self) -> bool:
        """Whether it is drawn which samples are shown their references."""
        return any(shares.draws_references for shares in self.all)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all conditions, each once."""
        return tuple(dict.fromkeys(name_of(condition) for shares in self.all for condition in shares.conditions))

    @property
    def most_appended(self) -> int:
        """Most frames that are appended to a sample; [`sys.maxsize`] where it is any number."""
        return max(shares.most_appended for shares in self.all)

    @property
    def appends_first(self) -> bool:
        """Whether the first frame may be one of them."""
        return any(APPENDED_FIRST in shares.kinds for shares in self.all)

    @property
    def appended_frames(self) -> Literal["first", "last", "all"] | None:
        """Frames that may be appended: the first or the last one of a sample, or any; None where none is.

        In a stack, samples of other shares append as many as the first, whatever frames these are.
        """
        if not self.most_appended:
            return None
        if not {kind for shares in self.all for kind in shares.kinds} & {*APPENDED}:
            return "first"
        (shares, *others) = self.all
        return "all" if others or APPENDED[1] in shares.kinds else "last"

    @property
    def most(self) -> SourceConditions:
        """Conditions of which each sample is shown what takes most tokens."""
        if not self.most_appended:
            return self
        if self.appends_first:
            conditions = [condition for shares in self.all for condition in shares.conditions]
            return SourceConditions(
                ConditionShares((max(conditions, key=lambda parts: sum(map(_most, parts))),), (1.0,))
            )
        return SourceConditions(ConditionShares(((ConditionPart(APPENDED[1], self.most_appended),),), (1.0,)))

    @property
    def weighs(self) -> bool:
        """Whether conditions have other weights in the loss than 1."""
        return any(weight != 1 for shares in self.all for weight in shares.weights)

    def dropping_references(self, share: float) -> SourceConditions:
        """Return conditions with references for all but a share of the samples of each source, from 0 to 1."""
        if not share:
            return self
        return SourceConditions(
            None if self.others is None else self.others.dropping_references(share),
            {name: shares.dropping_references(share) for name, shares in self.by_source.items()},
        )

    def of(self, source: str | None) -> ConditionShares:
        """Return the shares of a source by its name; None stands for samples of which no source is known."""
        return self.all[0] if source is None else self.by_source.get(source) or self.all[0]

    def check_sources(self, sources: Collection[str]) -> None:
        """Raise BucketingError if a source of a data set has no shares; a data set of one source has no names."""
        lacking = [] if self.others else [name for name in sources or ("the rows",) if name not in self.by_source]
        if lacking:
            raise BucketingError(
                f"`condition` has no shares for {quoted(lacking)}; begin it with those of all sources that it does "
                "not name, as in first_frame:0.3,none:0.7;stills=none."
            )


NOTHING_DRAWN = SourceConditions(ConditionShares(((),), (1.0,)))
"""Conditions of a run that draws none: samples are shown their references, and what their pipeline shows."""


def most_appended(text: str | None) -> int:
    """Return the most frames that a setting, as [`read_conditions`] reads it, appends to a sample."""
    return 0 if text is None else read_conditions(text).most_appended


def appended_by(text: str | None, keyframes: Condition | None = None) -> AppendedFrames:
    """Return the frames that such a setting appends to samples of a model.

    Args:
        text (`str`, *optional*): The setting.
        keyframes ([`Condition`], *optional*): How the model's text encoder is shown them; by default it is not.
    """
    first = text is not None and read_conditions(text).appends_first
    return AppendedFrames(most_appended(text), first, None if keyframes is None else keyframes.text_tokens)


def draws_parts(text: str | None) -> bool:
    """Return whether a setting, as [`read_conditions`] reads it, draws parts of samples."""
    return text is not None and read_conditions(text).draws_parts


def read_conditions(text: str) -> SourceConditions:
    """Return the conditions of a run as a setting writes them: `first_frame:0.3,none:0.7;stills=none;clips=prefix`.

    Lists of shares are separated by semicolons. One has no name, and holds for all sources that the others do not
    name.

    Raises:
        BucketingError: On anything else, or if a source is named twice.

    Example:
        >>> conditions = read_conditions("prefix@2:0.4,none:0.6;stills=none")
        >>> conditions.of("stills").shares, conditions.of("clips").shares
        ((1.0,), (0.4, 0.6))
    """
    others: ConditionShares | None = None
    by_source: dict[str, ConditionShares] = {}
    for part in text.split(";"):
        name, equals, shares = part.strip().rpartition("=")
        if name in by_source or (not equals and others is not None):
            raise BucketingError(f"`condition` gives shares twice for the same sources: {text!r}.")
        if equals:
            by_source[name] = read_condition(shares)
        else:
            others = read_condition(shares)
    return SourceConditions(others, by_source)


def read_condition(text: str) -> ConditionShares:
    """Return one list of conditions and their shares: `first_frame:0.3,prefix+last_frame:0.2,none:0.5`.

    A condition is one or more of `first_frame`, `last_frame`, `prefix`, `suffix`, `keyframes`, `appended_first_frame`,
    `appended_last_frame`, `appended_keyframes`, `mask` and `reference`, and for samples with audio one of `video`,
    `audio` and `no_audio`, joined by `+`, or `none`. `prefix@2` has a fixed length, in latent frames. A single
    condition needs no share. After its share, a condition may have a weight in the loss: `prefix:0.2:0.5`. In a list
    that names `reference`, the other conditions are shown none.

    Raises:
        BucketingError: On anything else.

    Example:
        >>> shares = read_condition("prefix@2:0.4:0.5,none:0.6")
        >>> shares.conditions, shares.weights
        (((ConditionPart(kind='prefix', length=2),), ()), (0.5, 1.0))
    """
    terms = [term.strip().split(":") for term in text.split(",")]
    if len(terms) == 1 and len(terms[0]) == 1:
        terms = [[*terms[0], "1"]]
    try:
        named = [(name, float(share), float(weight[0]) if weight else 1.0) for name, share, *weight in terms]
    except ValueError:
        raise _unreadable(text) from None
    if max(map(len, terms)) > 3:
        raise _unreadable(text)
    names, shares, weights = zip(*named, strict=True)
    conditions = tuple(_read_parts(name, text) for name in names)
    names_references = any(ConditionPart(REFERENCE) in parts for parts in conditions)
    return ConditionShares(conditions, shares, draws_references=names_references, weights=weights)


def _read_parts(name: str, text: str) -> Combination:
    if name == NONE:
        return ()
    parts = []
    for part in name.split("+"):
        matched = _PART.fullmatch(part)
        if matched is None or matched[1] not in _KINDS or (matched[2] and matched[1] not in _LONG):
            raise _unreadable(text)
        parts.append(ConditionPart(matched[1], int(matched[2]) if matched[2] else None))
    if len({part.kind for part in parts} & {*MODALITIES}) > 1:
        raise BucketingError(
            f"A condition has one of {quoted(MODALITIES)} at most, as one modality must be left to generate; got "
            f"{name!r}."
        )
    return tuple(parts)


def _unreadable(text: str) -> BucketingError:
    return BucketingError(
        "`condition` must be conditions with their shares, and weights where they have some, such as "
        f"first_frame:0.3,prefix:0.2:0.5,none:0.5, got {text!r}. A condition is `none`, or one or more "
        f"of {quoted(_KINDS)} joined by +; {quoted(_LONG)} may have a length in latent frames, as in prefix@2."
    )
