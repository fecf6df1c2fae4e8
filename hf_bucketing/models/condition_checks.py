"""The check of a data set's conditions and of those that a run draws: all that a model cannot be shown, at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conditions.audio import AUDIO
from ..conditions.names import KEYFRAMES, MASK, REFERENCE
from ..conditions.shares import BLACK, MODALITIES, ConditionShares
from ..errors import BucketingError, quoted
from ..media.probe import FPS_TOLERANCE
from .calls import RecipeCalls


class OfSamples(NamedTuple):
    """A number for each of some samples.

    Attributes:
        numbers (array, shape `(n,)`): The numbers.
        names (sequence): What messages call each sample, such as the number of its row.
    """

    numbers: npt.NDArray[Any]
    names: Sequence[Any]


NO_SAMPLES = OfSamples(np.zeros(0, np.int64), ())
"""Nothing is known of samples."""


class ConditionChecks(RecipeCalls):
    """What a loaded recipe says about conditions that its model cannot be shown.

    Attributes:
        trained (`str`): Name of the component to train.
        audio (`bool`): Whether audio is trained.
    """

    trained: str
    audio: bool

    def check_conditions(
        self,
        names: Collection[str],
        *,
        references: OfSamples = NO_SAMPLES,
        audio_rates: OfSamples = NO_SAMPLES,
        drawn: Sequence[ConditionShares] = (),
        cached: bool = False,
    ) -> None:
        """Raise BucketingError with all that a data set lacks or has too much, and all that a run cannot draw of it.

        Args:
            names (collection of `str`): Names of the data set's conditions. Every model takes `mask`, since it weighs
                the loss.
            references ([`OfSamples`]): Number of references of each sample.
            audio_rates ([`OfSamples`]): Frames per second of each sample with audio.
            drawn (sequence of [`ConditionShares`][hf_bucketing.conditions.shares.ConditionShares]): What a run draws.
            cached (`bool`): Whether latents come from a cache.
        """
        faults = [
            *self.name_faults(names),
            *self.reference_faults(references),
            *self.audio_faults(audio_rates),
            *dict.fromkeys(fault for shares in drawn for fault in self.drawn_faults(shares, names, cached=cached)),
        ]
        if faults:
            raise BucketingError(faults[0] if len(faults) == 1 else "\n".join(f"- {fault}" for fault in faults))

    def name_faults(self, names: Collection[str]) -> Iterator[str]:
        """Yield which conditions of a data set the model is not shown, and which required ones it lacks."""
        taken = (*self.taken_conditions(), MASK)
        if unknown := sorted(set(names) - set(taken)):
            yield (
                f"A {self.pipeline_class} is not shown {quoted(unknown)}, which the data set has; of a data set's "
                f"conditions it takes {quoted(taken)}. Prepare the data set again without the others, or train a "
                "pipeline that takes them."
            )
        if self.audio and AUDIO not in names:
            yield "Audio is trained, but this data set has none; prepare it again with --with_audio."
        if missing := sorted(set(self.required_conditions()) - set(names)):
            yield (
                f"A {self.pipeline_class} must be shown {quoted(missing)}, which the data set lacks; name their "
                f"columns when it is prepared, such as --{missing[0]}_column of hf_bucketing prepare."
            )

    def reference_faults(self, references: OfSamples) -> Iterator[str]:
        """Yield whether samples have more references than the model takes, or lack one that it needs."""
        counts, names = references
        rule = self.reference_rule(trained=self.trained)
        faults = {number: rule.fault(number) for number in np.unique(counts).tolist()}
        rows = np.flatnonzero(np.isin(counts, [number for number, fault in faults.items() if fault]))
        if len(rows):
            yield (
                f"A {self.pipeline_class} cannot be trained with the references of {len(rows)} of {len(counts)} "
                f"samples, such as row {names[rows[0]]}: {faults[int(counts[rows[0]])]}. Prepare the data set again "
                "for this model, and correct these rows or reject them with --on_error reject."
            )

    def audio_faults(self, audio_rates: OfSamples) -> Iterator[str]:
        """Yield whether samples with audio have other frame rates than the model places it beside."""
        rates, names = audio_rates
        if (fps := self.sound_fps) is None:
            return
        others = np.flatnonzero(np.abs(rates - fps) > FPS_TOLERANCE * fps)
        if len(others):
            yield (
                f"A {self.pipeline_class} places sound beside {fps:g} frames per second, but {len(others)} of "
                f"{len(rates)} samples with sound have others, such as row {names[others[0]]} with "
                f"{rates[others[0]]:g}. Prepare the data set again with --target_fps {fps:g}, and without files that "
                "are slower or without their sound."
            )

    def drawn_faults(self, shares: ConditionShares, names: Collection[str], *, cached: bool) -> Iterator[str]:
        """Yield what the model cannot be shown of what a run draws; arguments as in [`check_conditions`]."""
        if unknown := sorted({*shares.kinds} - {REFERENCE, *self.drawn_kinds}):
            takes = f"takes {quoted(self.drawn_kinds)} alone" if self.drawn_kinds else "takes none; omit it"
            yield (
                f"`condition` shows the model {quoted(unknown)}, but a {self.pipeline_class} of this configuration "
                f"{takes}."
            )
        if BLACK in shares.kinds and MASK not in names:
            yield (
                "`condition` shows what masks leave out, but the data set has no masks; prepare it with --mask_column."
            )
        if cached and not self.can_cache(shares):
            yield (
                f"A {self.pipeline_class} encodes the frames that it is shown, and `condition` draws others in each "
                "epoch; train from the folder that hf_bucketing prepare wrote, not from a cache."
            )

    @property
    def drawn_kinds(self) -> tuple[str, ...]:
        """Kinds of conditions that a run may draw for its samples, see [`read_condition`].

        By default which modality is generated, where audio is trained; else none.
        """
        return MODALITIES if self.audio else ()

    @property
    def text_sees_references(self) -> bool:
        """Whether [`encode_text`] is shown the references of each caption's sample."""
        return self.reference_condition().in_text

    @property
    def text_sees_keyframes(self) -> bool:
        """Whether it is shown the frames that a run appends."""
        keyframes = self.condition(KEYFRAMES)
        return keyframes is not None and keyframes.in_text

    @property
    def text_sees_pictures(self) -> bool:
        """Whether [`encode_text`] takes pictures: references, or frames that a run appends."""
        return self.text_sees_references or self.text_sees_keyframes

    @property
    def encodes_drawn(self) -> bool:
        """Whether [`encode_conditions`] encodes the drawn frames, so that a cache cannot hold them."""
        return False

    def can_cache(self, shares: ConditionShares) -> bool:
        """Return whether a cache can hold what a run draws: neither media nor texts are encoded with it."""
        in_text = self.text_sees_keyframes and shares.most_appended > 0
        return not (in_text or (self.encodes_drawn and shares.draws_parts))
