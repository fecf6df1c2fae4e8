"""What a training loop draws from, rows or a stream, trained or held out, and what its batches count for in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..buckets.arrays import FloatArray
from ..buckets.cost import CostModel, read_cost_model
from ..buckets.open_table import OpenTable
from ..buckets.sizes import LatentSpec, Size
from ..buckets.table import BucketTable
from ..conditions.names import MASK
from ..conditions.rows import RowConditions
from ..configuration.run import TrainingConfig
from ..loaders.planned import StepCount
from ..losses.per_sample import Reduction
from ..models.condition_checks import OfSamples
from ..models.texts import TextEmbeddings
from ..runs.run_log import log_path

if TYPE_CHECKING:
    from . import Batching


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
        tokens (`int`): Tokens of its samples, their conditions and texts.
        conditions ([`RowConditions`][hf_bucketing.conditions.rows.RowConditions]): Conditions of its samples.
    """

    sizes: list[Size]
    tokens: int
    conditions: RowConditions

    @property
    def references(self) -> list[tuple[Size, ...]]:
        """Sizes of each sample's references."""
        return self.conditions.references.sizes(self.sizes)

    @property
    def audio(self) -> list[int]:
        """Tokens of each sample's audio, which are among `tokens`; none where none is trained."""
        return self.conditions.audio_tokens(self.sizes)


@dataclass(kw_only=True)
class RunData(ABC):
    """The loader of a run, and what its batches count for.

    Attributes:
        loader (`DataLoader`): Loader, not yet prepared by accelerate.
        way ([`Batching`][hf_bucketing.batching.Batching]): Way of batching.
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
    way: Batching[Any]
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

    def describe(self, config: TrainingConfig, *, accelerator: Accelerator, max_train_steps: str) -> list[str]:
        """Return what is known of the run before it starts, as lines of text."""
        degree = config.memory.context_parallel_degree
        groups = f", in groups of {degree} that share their samples" if degree > 1 else ""
        return [
            f"  Num processes = {accelerator.num_processes}{groups}",
            f"  Batching = {config.batches.batching}, mixed precision = {accelerator.mixed_precision}",
            *self.describe_samples(config),
            *describe_conditions(self.conditions),
            *self.describe_steps(config),
            f"  Optimizer steps = {max_train_steps}",
            *self.describe_limits(config),
        ]

    @abstractmethod
    def describe_samples(self, config: TrainingConfig) -> list[str]:
        """Return what is known of the samples of an epoch, as lines of text."""

    @abstractmethod
    def describe_steps(self, config: TrainingConfig) -> list[str]:
        """Return what is known of the steps of an epoch, as lines of text."""

    def describe_limits(self, config: TrainingConfig) -> list[str]:
        """Return what such data cannot do, as lines of text."""
        return []

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
    def reference_counts(self) -> OfSamples:
        """Return the number of references of each sample, as far as they are known; none where samples have none."""

    @abstractmethod
    def audio_rates(self) -> OfSamples:
        """Return the frames per second of each sample with audio, as far as they are known."""

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


def make_cost_model(config: TrainingConfig, *, width: int) -> CostModel:
    """Return the cost of tokens in a model of a width, or as a run measured it."""
    measured = config.batches.cost_model
    return CostModel.for_transformer(width) if measured is None else read_cost_model(measured)


def unreadable_log(config: TrainingConfig) -> Path:
    """Return the path of the log of a run's unreadable samples."""
    return log_path(Path(config.output_dir), "unreadable")
