"""Frame rates as models take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import BucketingError

_IMAGE_FPS = 1.0
"""Any rate would do: the only frame of an image lies at 0 seconds."""


def frame_rates(fps: Sequence[float] | torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the frame rate of each sample, for models that take one; images, which have 0, get 1 frame per second.

    Models divide by the rate to place frames in seconds; 0 would make the positions of images NaN.

    Args:
        fps (sequence of `float`, or `torch.Tensor` of shape `(n,)`): The `fps` of a batch, 0 for images.
        device (`torch.device`, *optional*): Of the result; by default that of a tensor, or the CPU.

    Returns:
        `torch.Tensor` of shape `(n,)`: All above 0.

    Raises:
        BucketingError: On a rate that is negative or not finite.

    Example:
        >>> frame_rates([24.0, 0.0, 16.0])
        tensor([24.,  1., 16.])
    """
    rates = torch.as_tensor(fps, device=device)
    rates = rates if rates.is_floating_point() else rates.float()
    if rates.ndim != 1 or not (rates.isfinite() & (rates >= 0)).all():
        raise BucketingError(f"Expected a frame rate of 0 or more for each sample, got {rates.tolist()}.")
    return torch.where(rates == 0, _IMAGE_FPS, rates)
