"""Decode a sample straight to its target size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..geometry import CropBox, Size, cover_resize, crop_box
from ..media import MediaSource, frame_times, iter_frames


def load_sample(
    source: MediaSource, target: Size, *, fps: float, start: int = 0, position: tuple[float, float] = (0.5, 0.5)
) -> tuple[torch.Tensor, CropBox]:
    """Decode, pick frames, cover-resize with antialiasing, and crop, one frame at a time.

    Args:
        source ([`MediaSource`]): The file.
        target ([`Size`]): Frames, height and width of the result.
        fps (`float`): Frame rate to pick frames at; 0.0 for an image.
        start (`int`): First frame, counted at `fps`.
        position (`tuple[float, float]`): Place of the crop from top to bottom and from left to right, in [0, 1].

    Returns:
        `tuple`: Pixels in [−1, 1], `float32` of shape `(3, frames, height, width)`, and the crop in resized pixels.

    Raises:
        MediaError: If the file cannot be decoded or is too short.
    """
    box = None
    frames = []
    for frame in iter_frames(source, frame_times(target.frames, fps, start=start)):
        height, width = cover_resize(*frame.shape[:2], target=target)
        box = crop_box(height, width, target=target, y=position[0], x=position[1])
        pixels = torch.from_numpy(frame).permute(2, 0, 1)[None]
        if (height, width) != frame.shape[:2]:
            pixels = F.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
        frames.append(pixels[0, :, box.top : box.top + box.height, box.left : box.left + box.width])
    assert box is not None, "iter_frames yields as many frames as times, or raises"
    return torch.stack(frames, 1).float() / 127.5 - 1, box
