"""Targets of samples that are the base model's own predictions: preservation, and concept sliders.

Preservation is what DreamBooth (Ruiz et al., 2022) does with images that the model made itself, without the images;
sliders are those of Gandikota et al. (2023), with samples of the data in place of images in the making.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..configuration.preservation import CaptionPair, PreservationConfig
from ..media.rows import REGULARIZATION
from ..randomness import Purpose, generator

TARGETS = ("data", "preservation", "slider")
"""Targets that a sample may have, whose losses are logged apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTarget:
    """What the base model is asked for a sample, in place of a target from its data.

    Attributes:
        caption (`str`, *optional*): Caption that replaces the sample's, `""` for the null text; None where the sample
            keeps its caption.
        pair ([`CaptionPair`], *optional*): Captions whose difference is added.
        weight (`float`): Factor of the sample's loss.
    """

    caption: str | None = None
    pair: CaptionPair | None = None
    weight: float = 1.0

    @property
    def name(self) -> str:
        """One of `TARGETS`."""
        return "preservation" if self.pair is None else "slider"


def base_targets(
    config: PreservationConfig, batch: Mapping[str, Any], seeds: Sequence[tuple[int, ...]]
) -> list[BaseTarget | None]:
    """Return the target of each sample of a batch, None for those that learn their data.

    Args:
        config ([`PreservationConfig`]): What is preserved, and the sliders.
        batch (mapping): Batch of a collator, which holds the list `is_regularization` where rows are marked.
        seeds (sequence): Key of the draws of each sample, see [`sample_key`][hf_bucketing.randomness.sample_key].
    """
    if not config.base_predictions:
        return [None] * len(seeds)
    marks = batch.get(REGULARIZATION, [False] * len(seeds))
    return [_base_target(config, seed, marked=marked) for seed, marked in zip(seeds, marks, strict=True)]


def _base_target(config: PreservationConfig, seed: tuple[int, ...], *, marked: bool) -> BaseTarget | None:
    if config.preservation is not None:
        share = config.preservation_share
        if marked or generator(Purpose.PRESERVATION, *seed).random() < share:
            caption = {"prior": None, "blank": "", "class": config.preservation_caption}[config.preservation]
            return BaseTarget(caption=caption, weight=config.preservation_weight)
    if config.slider is None:
        return None
    chosen = generator(Purpose.SLIDER, *seed).integers(len(config.pairs))
    return BaseTarget(pair=config.pairs[chosen])
