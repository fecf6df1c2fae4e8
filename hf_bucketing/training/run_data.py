"""What a training loop draws from: rows that a plan orders or a stream, trained or held out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..buckets.arrays import FloatArray
from ..buckets.cost import CostModel
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..configuration.run import TrainingConfig
from ..loaders.planned import StepCount
from ..losses.reduction import Reduction
from ..media.conditions import MASK, REFERENCE
from ..media.references import Appended, ReferenceRule
from ..models.conditioning import appended_by
from ..models.recipe import Recipe
from ..models.texts import TextEmbeddings
from ..packing.names import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """What a model adds to the tokens of a sample, and how much they cost.

    Args:
        width (`int`): Channels of a token, which decide the cost of attention relative to all else.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its sample, as a
            [`Recipe`][hf_bucketing.models.recipe.Recipe] counts them; `max_tokens` holds them.
        references_in_front (`bool`): Whether references are latent frames in front of a sample.
        reference_text_tokens (`int`): Tokens that each reference of a sample adds to its text.
        keyframe_text_tokens (`int`, *optional*): Where the text encoder sees appended frames, tokens that each adds to
            its text beside as many as it has itself.
        reference_text_factor (`int`): How many further ones each reference adds for each token that it has itself.
        refuse (callable, *optional*): Returns why the model cannot take a sample of a token grid, or None if it can.
    """

    width: int
    text_tokens: int = 0
    references_in_front: bool = False
    reference_text_tokens: int = 0
    keyframe_text_tokens: int | None = None
    reference_text_factor: int = 0
    refuse: Callable[[Grid], str | None] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> ModelTokens:
        """Return those of the model of a loaded recipe."""
        return cls(
            width=recipe.family.width(recipe.transformer),
            text_tokens=recipe.text_tokens(recipe.max_sequence_length),
            references_in_front=recipe.references_in_front,
            reference_text_tokens=recipe.reference_text_tokens,
            keyframe_text_tokens=recipe.keyframe_text_tokens,
            reference_text_factor=recipe.reference_text_factor,
            refuse=lambda grid: recipe.family.refusal(recipe.transformer, grid),
        )

    def rule_of(
        self, prepared: PreparedDataset | PreparedStream, *, condition: str | None = None
    ) -> ReferenceRule | None:
        """Return the [`counting_rule`] of a data set in a run with a `condition`."""
        return counting_rule(
            prepared,
            in_front=self.references_in_front,
            text_tokens=self.reference_text_tokens,
            text_factor=self.reference_text_factor,
            frames=appended_by(condition, seen=self.keyframe_text_tokens),
        )


def counting_rule(
    prepared: PreparedDataset | PreparedStream,
    *,
    in_front: bool,
    text_tokens: int = 0,
    text_factor: int = 0,
    frames: Appended,
) -> ReferenceRule | None:
    """Return the rule that counts what samples are shown beside themselves, whatever model they were prepared for.

    A reference in front of a sample has the sample's size; one that the text encoder sees adds `text_tokens`, and
    `text_factor` times its own. `frames` that a run appends are counted as if each sample had the most of them. None
    if nothing is shown.
    """
    if REFERENCE not in prepared.conditions and not frames.most:
        return None
    rule = replace(prepared.references, in_front=in_front, text_tokens=text_tokens, text_factor=text_factor)
    return rule.appending(frames).counted


class StepRows(NamedTuple):
    """What a batch counts for in its step.

    Attributes:
        tokens (array of `int`, shape `(n,)`): Tokens of each sample and of the text in its sequence.
        weights (`torch.Tensor` of shape `(n,)`): Weight of each sample's loss; 0 for samples that do not count.
        total (`float`, *optional*): Sum of the weights of all processes in the window of gradient accumulation; None
            where it is not known before the window ends.
        sources (array of `int`, shape `(n,)`, *optional*): Source of each sample, as a position in the names of the
            sources, where there are several.
    """

    tokens: npt.NDArray[np.int64]
    weights: torch.Tensor
    total: float | None
    sources: npt.NDArray[np.int64] | None = None


class LargestStep(NamedTuple):
    """The step of one process that takes the most tokens.

    Attributes:
        sizes (list of [`Size`][hf_bucketing.Size]): Sizes of its samples.
        tokens (`int`): Tokens of its samples, their references, audio and texts.
        references (list of tuples of [`Size`][hf_bucketing.Size]): Sizes of each sample's references.
        audio (sequence of `int`): Tokens of each sample's audio, which are among `tokens`; none where none is trained.
        appended (sequence of `int`): Frames that are appended to each sample, whose tokens are among `tokens` too;
            none where none is.
    """

    sizes: list[Size]
    tokens: int
    references: list[tuple[Size, ...]]
    audio: Sequence[int] = ()
    appended: Sequence[int] = ()

    @property
    def shown(self) -> list[tuple[Size, ...]]:
        """Sizes of each sample's references, and behind them of the frames that are appended to it."""
        counts = self.appended or [0] * len(self.sizes)
        of_samples = zip(self.sizes, self.references, counts, strict=True)
        return [(*own, *(size._replace(frames=1),) * count) for size, own, count in of_samples]


@dataclass(kw_only=True)
class RunData(ABC):
    """The loader of a run, and what its batches count for.

    Attributes:
        loader (`DataLoader`): Loader, not yet prepared by accelerate.
        table ([`BucketTable`] or [`OpenTable`]): Table of the buckets.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch of the model.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its row.
        cost_model ([`CostModel`][hf_bucketing.CostModel]): Cost of a row by its tokens and those of its text.
        reduction (`"sample"` or `"token"`): Unit of equal weight in the loss.
        texts (mapping of `str` to [`TextEmbeddings`]): Texts that a run needs beside those of its rows, where they
            come from a cache, by caption; `""` is the null text.
        conditions (tuple of `str`): Names of what the data set has of a sample beside its media and caption.
        sources (tuple of `str`): Names of the sources of its rows, where there are several.
        source_weights (array of `float64`, shape `(n,)`, *optional*): Weight of each source in the loss, where they
            differ.
    """

    loader: DataLoader[Any]
    table: BucketTable | OpenTable
    spec: LatentSpec
    text_tokens: int
    cost_model: CostModel
    reduction: Reduction
    texts: Mapping[str, TextEmbeddings] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    source_weights: FloatArray | None = None

    def weigh_sources(self, weights: torch.Tensor, sources: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the weights of losses `(n,)` times those of the samples' sources, positions in `sources`."""
        return weights if self.source_weights is None else weights * torch.from_numpy(self.source_weights[sources])

    @abstractmethod
    def rows_of(self, loader: Any, batch: Mapping[str, Any], *, epoch: int) -> StepRows:
        """Return what the batch at hand of a [`ResumableLoader`][hf_bucketing.loaders.ResumableLoader] counts for."""

    @abstractmethod
    def bucket_counts(self) -> dict[int, int]:
        """Return the buckets of the rows that are known, each with its number of rows."""

    @abstractmethod
    def steps_left(self, loader: Any, config: TrainingConfig, *, finished: int) -> StepCount:
        """Return the optimizer steps from the place of the loader to the end of the last epoch.

        `finished` are those that the run has made.
        """

    @abstractmethod
    def largest_step(self) -> LargestStep:
        """Return the step that takes the most tokens."""

    @abstractmethod
    def epoch_summary(self, loader: Any) -> Mapping[str, Any]:
        """Return what is known of an epoch before it comes, for the log."""

    @abstractmethod
    def after_epoch(self, loader: Any, accelerator: Accelerator, *, num_batches: int) -> list[str]:
        """Return what came of an epoch that ended, as lines of text; all processes call it together."""

    @abstractmethod
    def describe(self, config: TrainingConfig, *, accelerator: Accelerator, max_train_steps: str) -> list[str]:
        """Return what is known of the run before it starts, as lines of text."""

    @abstractmethod
    def prepare(self, accelerator: Accelerator, model: Any, optimizer: Any, *, degree: int) -> tuple[Any, Any, Any]:
        """Let accelerate prepare a model, its optimizer and the loader, of which `degree` processes share batches."""

    @abstractmethod
    def check_same(self, accelerator: Accelerator) -> None:
        """Raise BucketingError on all processes if they do not draw from the same rows, as far as that is known."""

    def example_of(self, bucket_id: int) -> str:
        """Return the name of a file of a bucket, after a comma; nothing where files are not known before they come."""
        return ""

    def check_buckets(self, check: Callable[[Mapping[int, int]], None]) -> None:
        """Call a function, which may raise, with the buckets of all samples, each with its number of samples."""
        check(self.bucket_counts())

    @abstractmethod
    def check_references(self, check: Callable[[npt.NDArray[np.int64], Sequence[Any]], None]) -> None:
        """Call a function, which may raise, with the numbers of references of samples, and the samples' names."""

    @abstractmethod
    def check_audio_rates(self, check: Callable[[npt.NDArray[np.float64], Sequence[Any]], None]) -> None:
        """Call a function, which may raise, with the frame rates of samples with audio, and the samples' names."""

    def name_rows(self, rows: Sequence[int]) -> list[str]:
        """Return what messages call rows, by their numbers: their files, where these are known."""
        return [f"row {row}" for row in rows]

    def cached_batch(self) -> Mapping[str, Any] | None:
        """Return a batch of one usable row of a cache; None where nothing is cached."""
        return None

    @property
    def with_audio(self) -> int | None:
        """Usable rows that have audio; None where none is trained."""
        return None

    @property
    def frame_rates(self) -> npt.NDArray[np.float64] | None:
        """Frames per second of the usable rows, `(n,)`, 0 for images; None where they come as a stream."""
        return None

    @property
    def rejections(self) -> npt.NDArray[Any] | None:
        """Reason why each row has no bucket, `(n,)`; None where they come as a stream."""
        return None


def describe_conditions(conditions: Sequence[str]) -> list[str]:
    """Return a line of text on what samples are shown beside their text; none if it is nothing."""
    words = [f"{name} (weighs the loss)" if name == MASK else name for name in conditions]
    return [f"  Conditions = {', '.join(words)}"] if words else []
