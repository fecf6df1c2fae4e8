"""Masks of samples on the grid of their latents, where they weigh the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import BucketingError

LOSS_MASK = "loss_mask"
"""Encoded condition that weighs the loss, `(1, f, h, w)` of each sample."""


def latent_mask(
    mask: torch.Tensor, latent_size: tuple[int, ...], *, repeats: int = 0, chunk_frames: int = 0
) -> torch.Tensor:
    """Average a mask over the pixels and frames that each latent pixel stands for.

    A causal VAE encodes the first frame alone, and further frames in groups of its temporal stride; an image VAE
    encodes each frame alone.

    Args:
        mask (`torch.Tensor` of shape `(1, F, H, W)`): Mask of a sample, in [0, 1].
        latent_size (`tuple` of `int`): Frames, height and width of its latents.
        repeats (`int`): Latent frames before the first one that repeat it, see
            [`LatentSpec`][hf_bucketing.LatentSpec].
        chunk_frames (`int`): Frames of the chunks that the VAE encodes, each as a video of its own; 0 where it encodes
            all frames as one.

    Returns:
        `torch.Tensor` of shape `(1, f, h, w)`: In [0, 1].

    Raises:
        BucketingError: If the frames cannot be grouped so.

    Example:
        >>> latent_mask(torch.tensor([1.0, 1, 0, 0, 0]).view(1, 5, 1, 1), (2, 1, 1)).flatten()
        tensor([1.0000, 0.2500])
    """
    frames, height, width = latent_size
    averaged = F.adaptive_avg_pool2d(mask, (height, width))
    videos = averaged.split(chunk_frames or mask.shape[1], 1)
    groups, further = frames - repeats - len(videos), mask.shape[1] - len(videos)
    stride = further // groups if groups > 0 else 1
    if groups * stride != further or any((video.shape[1] - 1) % stride for video in videos):
        raise BucketingError(f"A mask of {mask.shape[1]} frames does not fit latents of {frames} frames.")
    parts = [averaged[:, :1].expand(-1, repeats, -1, -1)]
    for video in videos:
        rest = video[:, 1:].unflatten(1, ((video.shape[1] - 1) // stride, stride))
        parts += [video[:, :1], rest.mean(2)]
    return torch.cat(parts, 1)
