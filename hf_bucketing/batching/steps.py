"""From a collated batch to per-sample losses, for stacked batches and for packs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..adapters.loading import base_model
from ..buckets.arrays import IntArray
from ..conditions.audio import AUDIO
from ..conditions.shares import NOTHING_DRAWN, Drawn, SourceConditions
from ..configuration.objective import CaptionPair, PreservationConfig
from ..devices import to_device
from ..errors import BucketingError
from ..loaders.occurrences import OCCURRENCE
from ..media.rows import REGULARIZATION
from ..media.sample import frame_rates
from ..models.condition_checks import OfSamples
from ..models.objectives import Noised, NoisedAudio, Objective
from ..models.recipe import Recipe
from ..models.samples import KEYFRAME_PLACES, Samples
from ..models.texts import TextEmbeddings
from ..packing.layout import PackedLayout
from ..packing.names import Grid
from ..packing.token_drop import Seed
from ..placement.offload import activations_on_cpu
from ..randomness import Purpose, generator, sample_key
from .drawing import (
    draw_conditions,
    drawn_media,
    finite,
    finite_samples,
    media_of,
    noised_audio,
    text_of,
    without_references,
)
from .run_data import StepRows

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


class Computed(NamedTuple):
    """Tokens that a transformer computes of a batch.

    Attributes:
        lengths (array of `int`, shape `(n,)`): Tokens of each sample, with those of its text where they are in its
            sequence.
        padding (`int`): Tokens of no sample.
    """

    lengths: IntArray
    padding: int = 0

    @classmethod
    def of_pack(cls, layout: PackedLayout) -> Computed:
        """Return those of a pack: tokens that it drops are no tokens of it, and captions have their own length."""
        parts = [layout.lengths]
        if layout.text_slots:
            parts.append(layout.joint_text_lengths)
        apart = layout.audio_lengths or (0,) * len(layout)
        lengths = np.array([*parts, apart], np.int64).sum(0)
        computed = layout.num_strips * (layout.strip_length + layout.text_slots) + sum(apart)
        return cls(lengths, computed - int(lengths.sum()))


class StepLosses(NamedTuple):
    """Losses of the samples of a batch.

    Attributes:
        values (`torch.Tensor` of shape `(n,)`): Loss of each sample.
        noise_levels (`torch.Tensor` of shape `(n,)`): How noisy each sample was, in [0, 1].
        targets (array of `int64`, shape `(n,)`): Target of each sample, as a position in
            [`TARGETS`][hf_bucketing.batching.steps.TARGETS].
        drawn (sequence of [`Drawn`][hf_bucketing.conditions.shares.Drawn]): What each sample was shown.
        encoded (`torch.Tensor` of shape `(n,)`, *optional*): Whether all that was encoded of each sample is finite;
            None from a cache, whose entries are.
        computed ([`Computed`], *optional*): Tokens of a pack; None of a stack, whose samples have those of the plan.
    """

    values: torch.Tensor
    noise_levels: torch.Tensor
    targets: IntArray
    drawn: Sequence[Drawn]
    encoded: torch.Tensor | None = None
    computed: Computed | None = None


class Prediction(NamedTuple):
    """What a transformer predicted of a batch.

    Attributes:
        by_sample (callable): Returns the prediction for each sample, `(C_out, f, h, w)`, 0 where tokens are dropped.
        losses (callable): Returns the loss of each sample's video, `(n,)`, given noisy latents and targets.
        audio (list of `(tokens, channels)`): Predictions for the audio of each sample; none where none is trained.
        computed ([`Computed`], *optional*): Tokens of a pack.
    """

    by_sample: Callable[[], list[torch.Tensor]]
    losses: Callable[[Noised], torch.Tensor]
    audio: Sequence[torch.Tensor] = ()
    computed: Computed | None = None

    @property
    def modalities(self) -> list[Sequence[torch.Tensor]]:
        """Predictions for each sample of its video and, where some is trained, of its audio."""
        return [self.by_sample(), *([self.audio] if self.audio else [])]


@dataclass(kw_only=True)
class Step(ABC):
    """Compute the per-sample losses of a batch.

    A share of the captions, `caption_dropout`, is replaced by the null text, for classifier-free guidance; it is drawn
    from the seed, the epoch, the sample's index and its occurrence in the epoch. So is the share of the samples,
    `reference_dropout`, that are shown no references, and what `condition` shows each sample. `preservation`
    chooses samples whose target is a prediction of the transformer without its adapters. `texts` are those of a cache,
    for its batches, by caption; `""` is the null text. With `sharded` weights, all processes run each forward pass
    together, whether one of their samples needs it or not. With `leaves_out`, samples that are encoded to NaN or
    infinite numbers count as zeros of loss 0; otherwise their loss is not finite either.
    """

    recipe: Recipe
    objective: Objective
    caption_dropout: float = 0.0
    reference_dropout: float = 0.0
    condition: SourceConditions | None = None
    seed: int = 0
    offload_activations: bool = False
    preservation: PreservationConfig = field(default_factory=PreservationConfig)
    audio_weight: float = 1.0
    sharded: bool = False
    leaves_out: bool = False
    texts: Mapping[str, TextEmbeddings] = field(default_factory=dict)

    stacks: ClassVar[bool] = False
    """Whether the samples of a batch are stacked."""

    def __call__(self, transformer: torch.nn.Module, batch: Mapping[str, Any], *, epoch: int) -> StepLosses:
        """Return the loss of each sample."""
        indices, occurrences = batch["index"], _occurrences(batch)
        seeds = self._seeds(batch, epoch=epoch)
        drawn = self.draw(batch, seeds, reference_dropout=self.reference_dropout)
        batch = without_references(batch, drawn)
        media = self.media(batch, drawn)
        self._check_audio_rates(batch, media)
        latents = media.pop("latents")
        encoded = None if "latents" in batch else finite_samples(latents, media)
        if self.leaves_out:
            latents, media = finite(latents), {name: finite(values) for name, values in media.items()}
        noised = self.objective(latents, indices=indices, epoch=epoch, occurrences=occurrences)
        dropped = [generator(Purpose.CAPTION_DROPOUT, *seed).random() < self.caption_dropout for seed in seeds]
        of_base = base_targets(self.preservation, batch, seeds)
        captions = [
            target.caption if target is not None else "" if drop else None
            for drop, target in zip(dropped, of_base, strict=True)
        ]
        seen = media.get(KEYFRAME_PLACES, ())
        text = text_of(self.recipe, batch, captions=captions, texts=self.texts, keyframes=seen).to(latents[0].dtype)
        if encoded is not None:
            encoded = encoded & text.values.isfinite().flatten(1).all(1)
            text = text._replace(values=finite(text.values)) if self.leaves_out else text
        fps = frame_rates(batch["fps"])
        audio = self._noised_audio(media, noised, drawn, seeds)
        samples = Samples(noised=noised, text=text, fps=fps, conditions=media, audio=audio, keys=seeds)
        predicted = None
        if any(of_base) or (self.sharded and self.preservation.base_predictions):
            predicted = self._base_predictions(transformer, samples, seeds, batch=batch, targets=of_base)
        with activations_on_cpu() if self.offload_activations else nullcontext():
            prediction = self._predict(transformer, samples, seeds)
            values = self._losses(prediction, noised, audio)
            if predicted is not None:
                video_targets, *audio_targets = predicted
                base = audio if audio is None else audio._replace(targets=[*audio_targets[0]])
                of_pairs = self._losses(prediction, noised._replace(targets=[*video_targets]), base)
                values = _replaced(values, of_pairs, of_base)
        if self.leaves_out and encoded is not None:
            values = values * encoded
        names = ["data" if target is None else target.name for target in of_base]
        targets = np.array([TARGETS.index(name) for name in names], np.int64)
        noise_levels = self.objective.noise_levels(noised.timesteps)
        return StepLosses(values, noise_levels, targets, drawn, encoded, prediction.computed)

    def weigh(self, rows: StepRows, batch: Mapping[str, Any], *, epoch: int) -> StepRows:
        """Return what a batch counts for, with the weights of the conditions that are drawn for its samples.

        The sum of the weights of other batches is then not known before they come.
        """
        if self.condition is None or not self.condition.weighs:
            return rows
        seeds = self._seeds(batch, epoch=epoch)
        weights = [drawn.weight for drawn in self.draw(batch, seeds, reference_dropout=self.reference_dropout)]
        return rows._replace(weights=rows.weights * torch.tensor(weights, dtype=torch.float64), total=None)

    def _seeds(self, batch: Mapping[str, Any], *, epoch: int) -> list[tuple[int, ...]]:
        """Return the key of the draws of each sample of a batch."""
        return [
            sample_key(seed=self.seed, epoch=epoch, index=index, occurrence=before)
            for index, before in zip(batch["index"], _occurrences(batch), strict=True)
        ]

    @property
    def condition_names(self) -> tuple[str, ...]:
        """Names of what samples may be shown, see [`Drawn`][hf_bucketing.conditions.shares.Drawn]."""
        return (self.condition or NOTHING_DRAWN).names

    def draw(
        self, batch: Mapping[str, Any], keys: Sequence[tuple[int, ...]], *, reference_dropout: float = 0.0
    ) -> list[Drawn]:
        """Draw what each sample of a batch is shown, see [`draw_conditions`]."""
        conditions = (self.condition or NOTHING_DRAWN).dropping_references(reference_dropout)
        return draw_conditions(conditions, batch, keys, spec=self.recipe.spec, stacks=self.stacks)

    def media(self, batch: Mapping[str, Any], drawn: Sequence[Drawn]) -> dict[str, list[Any]]:
        """Return [`media_of`] a batch, and the drawn parts of each sample, if the model can be shown any."""
        if self.condition is None or not self.condition.draws_parts or not self.recipe.drawn_kinds:
            return media_of(self.recipe, batch)
        return drawn_media(self.recipe, batch, drawn)

    def _check_audio_rates(self, batch: Mapping[str, Any], media: Mapping[str, Sequence[Any]]) -> None:
        """Refuse samples of a stream that could not be checked before, see [`check_data`]; images have no rate."""
        has_audio = [len(latent) > 0 for latent in media.get(AUDIO, ())]
        if self.recipe.audio and any(has_audio):
            rates = np.array(batch["fps"], np.float64)
            rows = np.flatnonzero(np.array(has_audio) & (rates > 0))
            samples = OfSamples(rates[rows], [batch["index"][row] for row in rows])
            if faults := [*self.recipe.audio_faults(samples)]:
                raise BucketingError(faults[0])

    def _noised_audio(
        self, media: Mapping[str, Any], noised: Noised, drawn: Sequence[Drawn], keys: Sequence[tuple[int, ...]]
    ) -> NoisedAudio | None:
        """Return [`noised_audio`] of samples; None if none is trained."""
        return noised_audio(self.objective, media[AUDIO], noised, drawn, keys=keys) if self.recipe.audio else None

    @torch.no_grad()
    def _base_predictions(
        self,
        transformer: torch.nn.Module,
        samples: Samples,
        seeds: Sequence[Seed],
        *,
        batch: Mapping[str, Any],
        targets: Sequence[BaseTarget | None],
    ) -> list[Sequence[torch.Tensor]]:
        """Return what the base model predicts, see [`Prediction.modalities`], with the differences of sliders.

        It runs before the activations of the trained model exist, which take far more memory.
        """
        bare = transformer if self.sharded else self.recipe.transformer  # DDP would send its buffers
        pairs = [None if target is None else target.pair for target in targets]

        def predict_side(side: int) -> list[Sequence[torch.Tensor]]:
            captions = [None if pair is None else pair[side] for pair in pairs]
            seen = samples.conditions.get(KEYFRAME_PLACES, ())
            text = text_of(self.recipe, batch, captions=captions, texts=self.texts, keyframes=seen)
            text = text.to(samples.text.values.dtype)
            return self._predict(bare, replace(samples, text=text), seeds).modalities

        with base_model(bare):
            predicted = self._predict(bare, samples, seeds).modalities
            if self.preservation.slider is None:
                return predicted
            plus, minus = predict_side(0), predict_side(1)
        strength = self.preservation.slider_strength
        return [
            [
                base if pair is None else base + strength * (more - less)
                for base, pair, more, less in zip(*modality, strict=True)
            ]
            for modality in zip(predicted, [pairs] * len(predicted), plus, minus, strict=True)
        ]

    @torch.no_grad()
    def held_out(self, transformer: torch.nn.Module, batch: Mapping[str, Any], *, num_levels: int) -> list[StepLosses]:
        """Return the loss of each held-out sample at each of some noise levels, the least noise first.

        Nothing is drawn from the epoch: no caption, no reference and no token is dropped, and
        [`Objective.held_out`][hf_bucketing.models.objectives.Objective.held_out] adds the noise.
        """
        drawn = self.draw(batch, [(index,) for index in batch["index"]])
        batch = without_references(batch, drawn)
        media = self.media(batch, drawn)
        self._check_audio_rates(batch, media)
        latents = media.pop("latents")
        text = text_of(self.recipe, batch, keyframes=media.get(KEYFRAME_PLACES, ())).to(latents[0].dtype)
        fps = frame_rates(batch["fps"])
        by_level = []
        for level in range(num_levels):
            noised = self.objective.held_out(latents, indices=batch["index"], level=level, num_levels=num_levels)
            keys = [(index, level) for index in batch["index"]]
            audio = self._noised_audio(media, noised, drawn, keys)
            samples = Samples(noised=noised, text=text, fps=fps, conditions=media, audio=audio, keys=keys)
            values = self._losses(self._predict(transformer, samples, None), noised, audio)
            levels = self.objective.noise_levels(noised.timesteps)
            by_level.append(StepLosses(values, levels, np.zeros(len(values), np.int64), drawn))
        return by_level

    @abstractmethod
    def _predict(self, transformer: torch.nn.Module, samples: Samples, seeds: Sequence[Seed] | None) -> Prediction:
        """Run the transformer.

        There is a seed for each sample, from which tokens to drop are drawn; without seeds, none are dropped.
        """

    def refusal(self, grid: Grid) -> str | None:
        """Return why the step cannot run a sample of a token grid; None if it can."""
        return self.recipe.family.refusal(self.recipe.transformer, grid)

    def _losses(self, prediction: Prediction, noised: Noised, audio: NoisedAudio | None) -> torch.Tensor:
        """Return the loss of each sample, `(n,)`: of its video, and of the audio that was predicted beside it."""
        values = prediction.losses(noised)
        return values if audio is None else values + self.audio_weight * audio.losses(prediction.audio)

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Make the transformer usable by its pipeline inside a `with` block."""
        yield


def _replaced(values: torch.Tensor, of_base: torch.Tensor, targets: Sequence[BaseTarget | None]) -> torch.Tensor:
    """Return losses `(n,)` with those towards the base model, each times its weight, of the samples that have them."""
    weights = torch.tensor([0.0 if target is None else target.weight for target in targets], dtype=values.dtype)
    weights = to_device(weights, values.device)
    return torch.where(weights > 0, of_base * weights, values)


def _occurrences(batch: Mapping[str, Any]) -> Sequence[int]:
    """Return how often the epoch held the row of each sample of a batch before."""
    return batch.get(OCCURRENCE, [0] * len(batch["index"]))
