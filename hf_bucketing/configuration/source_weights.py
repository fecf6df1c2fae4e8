"""Weights of sources in the loss, as a setting names them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..buckets.arrays import FloatArray
from ..errors import BucketingError


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
