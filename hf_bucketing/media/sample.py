"""Decode a sample straight to its size, as a tensor (needs torch, unlike the rest of this room)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..buckets.sizes import CropBox
from .decode import frame_times, iter_frames
from .source import MediaSource
from .views import View


def load_sample(source: MediaSource, view: View) -> tuple[torch.Tensor, CropBox]:
    """Decode, pick frames, cover-resize with antialiasing, crop and flip, one frame at a time.

    Args:
        source ([`MediaSource`]): The file.
        view ([`View`]): What of it.

    Returns:
        `tuple`: Pixels in [−1, 1], `float32` of shape `(3, frames, height, width)`, and the crop in resized pixels.

    Raises:
        MediaError: If the file cannot be decoded or is too short.
        BucketingError: If the view's decoder cannot be loaded.
    """
    box = None
    frames = []
    times = frame_times(view.size.frames, view.fps, start=view.start)
    for frame in iter_frames(source, times, decoder=view.decoder):
        resized, box = view.crop(*frame.shape[:2])
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if resized != frame.shape[:2]:
            pixels = F.interpolate(pixels, resized, mode="bicubic", antialias=True)
        frames.append(pixels[0, :, box.top : box.top + box.height, box.left : box.left + box.width])
    assert box is not None, "iter_frames yields as many frames as times, or raises"
    stack = torch.stack(frames, 1)
    return (stack.flip(-1) if view.flip else stack).float() / 127.5 - 1, box
