"""Shift of flow matching's noise schedule by the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import BucketingError
from ..packing.layout import Grid
from .objectives import Shift


def scheduler_shift(config: Mapping[str, Any], *, patch: Grid = (1, 1, 1)) -> Shift:
    """Return the shift that a flow-matching scheduler's configuration says: a number, or a function of the size.

    Args:
        config (mapping): Configuration of a `FlowMatchEulerDiscreteScheduler`.
        patch (`(t, h, w)`): Latent frames, rows and columns of what the pipeline counts as a token.

    Raises:
        BucketingError: If the scheduler shifts by size in a way other than `"exponential"`.
    """
    if not config.get("use_dynamic_shifting", False):
        return float(config.get("shift", 1.0))
    if config.get("time_shift_type", "exponential") != "exponential":
        raise BucketingError(
            f"The scheduler shifts by time_shift_type={config['time_shift_type']!r}; only 'exponential' is known."
        )
    limits = {
        "base_tokens": config.get("base_image_seq_len", 256),
        "max_tokens": config.get("max_image_seq_len", 4096),
        "base_shift": config.get("base_shift", 0.5),
        "max_shift": config.get("max_shift", 1.15),
    }
    return lambda size: shift_for_tokens(math.prod(size) // math.prod(patch), **limits)


def shift_for_tokens(
    num_tokens: int,
    *,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """Return the shift of a sample's noise levels, `σ → shift·σ / (1 + (shift − 1)·σ)`, by its number of tokens.

    More tokens show more of the same picture, so more noise is needed to hide it (Esser et al., 2024, section 5.3.2).
    The logarithm of the shift is linear in the tokens, also beyond the two given points. The defaults are those of
    Flux's schedule (`calculate_shift` in diffusers).

    Args:
        num_tokens (`int`): Tokens of the sample, at least 1.
        base_tokens (`int`): Tokens at which the logarithm of the shift is `base_shift`, at least 1.
        max_tokens (`int`): Tokens at which the logarithm of the shift is `max_shift`, at least 1.
        base_shift (`float`): Logarithm of the shift at `base_tokens`.
        max_shift (`float`): Logarithm of the shift at `max_tokens`.

    Returns:
        `float`: Above 0; 1 leaves the noise levels unchanged.

    Raises:
        BucketingError: If a number of tokens is below 1, or `base_tokens` equals `max_tokens`.

    Example:
        >>> round(shift_for_tokens(256), 3), round(shift_for_tokens(4096), 3)
        (1.649, 3.158)
    """
    if min(num_tokens, base_tokens, max_tokens) < 1 or base_tokens == max_tokens:
        raise BucketingError(
            f"Expected at least 1 token and base_tokens other than max_tokens, got {num_tokens} tokens between "
            f"{base_tokens} and {max_tokens}."
        )
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (num_tokens - base_tokens))
