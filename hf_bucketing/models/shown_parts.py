"""What a run draws to show of a sample, on the grid of its latents."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from ..buckets.sizes import LatentSpec
from ..conditions.shares import Drawn
from ..devices import to_device


def shown_part(drawn: Drawn, latent: torch.Tensor, mask: torch.Tensor | None, spec: LatentSpec) -> torch.Tensor:
    """Return which latents of a sample are shown: those of its shown frames, and what its mask leaves out.

    A latent frame is shown if its last frame is. A sample whose frames are all shown would have none to predict, such
    as an image, and is shown none.

    Args:
        drawn ([`Drawn`][hf_bucketing.conditions.shares.Drawn]): Frames that are shown, and whether a mask counts.
        latent (`torch.Tensor` of shape `(C, f, h, w)`): Latent of the sample.
        mask (`torch.Tensor` of shape `(1, f, h, w)`, *optional*): Weights of its loss; needed where the mask counts.
        spec ([`LatentSpec`][hf_bucketing.LatentSpec]): Strides and patch.

    Returns:
        `torch.Tensor` of `bool`, shape `(1, f, 1, 1)`, or `(1, f, h, w)` where a mask counts.
    """
    frames = drawn.frames[:: spec.temporal_stride]
    frames = np.pad(frames & ~frames.all(), (spec.num_repeats, 0), mode="edge")
    part = to_device(torch.from_numpy(frames), latent.device).view(1, -1, 1, 1)
    if not drawn.masked:
        return part
    assert mask is not None, "check_drawn asks for masks"
    return part | black_tokens(mask, spec.patch)


def black_tokens(mask: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """Return which latents `(1, f, h, w)` lie in tokens that are black throughout, of which nothing is learned.

    Example:
        >>> black_tokens(torch.tensor([0.0, 0, 0, 0.5]).view(1, 1, 1, 4), (1, 1, 2)).flatten().tolist()
        [True, True, False, False]
    """
    brightest = F.max_pool3d(mask[None], patch, patch)[0]
    for axis, side in enumerate(patch, 1):
        brightest = brightest.repeat_interleave(side, axis)
    return brightest == 0
