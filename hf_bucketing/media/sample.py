"""Samples and their frame rates as tensors, as models take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image

from ..buckets.sizes import CropBox, Size
from ..errors import BucketingError
from .decode import iter_frames
from .source import MediaSource
from .views import View

_IMAGE_FPS = 1.0
"""Frame rate of images. Any rate gives the same result, since the only frame of an image lies at 0 seconds."""


def load_sample(source: MediaSource, view: View) -> tuple[torch.Tensor, CropBox]:
    """Decode, pick frames, cover-resize with antialiasing, crop and flip, one frame at a time.

    Args:
        source ([`MediaSource`]): The file.
        view ([`View`]): Frames, size, crop and flip of the sample.

    Returns:
        `tuple`: Pixels in [−1, 1], `float32` of shape `(3, frames, height, width)`, and the crop in resized pixels.
    """
    box = None
    frames = []
    for frame in iter_frames(source, view.times, video_decoder=view.video_decoder):
        resized, box = view.crop(*frame.shape[:2])
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if resized != frame.shape[:2]:
            pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True)
        frames.append(pixels[0, :, box.top : box.top + box.height, box.left : box.left + box.width])
    assert box is not None, "iter_frames yields as many frames as times, or raises"
    stack = torch.stack(frames, 1)
    return (stack.flip(-1) if view.flip else stack).float() / 127.5 - 1, box


def load_first_frame(source: MediaSource, size: Size) -> Image.Image:
    """Return the first frame of a file, or an image, resized to cover a size and cropped around its centre.

    The pixels are those that training has of that frame in a bucket of that size.
    """
    pixels, _ = load_sample(source, View(size=size._replace(frames=1), fps=0.0))
    return Image.fromarray(((pixels[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def frame_rates(fps: Sequence[float] | torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the frame rate of each sample, for models that take one; images, whose `fps` is 0, get 1.

    Models divide by the rate to place frames in seconds; 0 would make the positions of images NaN.

    Args:
        fps (sequence of `float`, or `torch.Tensor` of shape `(n,)`): The `fps` of a batch, 0 for images.
        device (`torch.device`, *optional*): Device of the result; by default that of a tensor, or the CPU.

    Returns:
        `torch.Tensor` of shape `(n,)`: Frames per second, all above 0.

    Raises:
        BucketingError: If a rate is negative or not finite.

    Example:
        >>> frame_rates([24.0, 0.0, 16.0])
        tensor([24.,  1., 16.])
    """
    rates = torch.as_tensor(fps, device=device)
    rates = rates if rates.is_floating_point() else rates.float()
    if rates.ndim != 1 or not (rates.isfinite() & (rates >= 0)).all():
        raise BucketingError(f"Expected a frame rate of 0 or more for each sample, got {rates.tolist()}.")
    return torch.where(rates == 0, _IMAGE_FPS, rates)
