"""What the batches of a step hold: tokens and weights of their samples, and the largest that can come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..buckets.sizes import Size
from ..conditions.rows import RowConditions


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
