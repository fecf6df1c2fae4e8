"""Samples and their frame rates as tensors, as models take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from ..buckets.sizes import CropBox, Size
from ..conditions.audio import AUDIO
from ..conditions.names import FACE, FRAME_BY_FRAME, MASK, REFERENCE, check_kind, check_shape
from ..conditions.references import ReferenceRule
from ..devices import to_device
from ..errors import BucketingError, MediaError
from .audio import CHANNELS, read_audio
from .decode import Frame, iter_frames
from .images import cropped_part, is_image
from .probe import MediaInfo
from .rows import FileSample
from .source import MediaSource
from .views import WHITE, View

_IMAGE_FPS = 1.0
"""Frame rate of images. Any rate gives the same result, since the only frame of an image lies at 0 seconds."""


_SMALL = 16
"""Shorter side in pixels up to which a picture is mirrored with its edge."""


class LoadedSample(NamedTuple):
    """The pixels of a sample and of its conditions.

    Attributes:
        pixels (`torch.Tensor` of shape `(3, frames, height, width)`): Pixels in [−1, 1], `float32`.
        crop ([`CropBox`]): Crop in resized pixels.
        conditions (mapping of `str` to `torch.Tensor`): Conditions, `float32`. `first_frame` and `last_frame` are
            `(3, 1, height, width)` and `control` is `(3, frames, height, width)`, in [−1, 1]; `mask` is
            `(1, frames, height, width)` in [0, 1]; `face` is `(3, frames, h, w)` in [−1, 1], of the size of its file;
            `reference` is a tuple of any number of `(3, 1, h, w)` and `(3, frames, h, w)`, of the sizes of the
            sample's [`ReferenceRule`]. `audio` is the sound of the frames, `(2, samples)` in [−1, 1], with no samples
            where the file has none.
    """

    pixels: torch.Tensor
    crop: CropBox
    conditions: dict[str, Any]


def load_sample(source: MediaSource, view: View) -> tuple[torch.Tensor, CropBox]:
    """Decode, pick frames, cover-resize with antialiasing, crop and flip, one frame at a time.

    Args:
        source ([`MediaSource`]): The file.
        view ([`View`]): Frames, size, crop and flip of the sample.

    Returns:
        `tuple`: Pixels in [−1, 1], `float32` of shape `(3, frames, height, width)`, and the crop in resized pixels.
    """
    pixels, crop, _ = load(FileSample(source=source, view=view))
    return pixels, crop


def load(sample: FileSample) -> LoadedSample:
    """Load a sample as [`load_sample`], and its conditions with it.

    All conditions but references have the sample's resized size, crop and flip, and those of several frames its times
    in seconds; a face has the flip and the times, but keeps the size of its file. References that lie over the sample
    have its crop, flip and times too, at a size of their own; others are made the size that their rule says, flipped
    with the sample only if the view flips them too, and videos among them have its times.

    Raises:
        MediaError: If a file cannot be decoded or is not as its row says, or a condition that lies over the sample
            has another aspect ratio, or is shorter.
    """
    sample = replace(sample, source=sample.source.opened())  # a URL once, for its frames and its sound
    view, stored = sample.view, None
    frames = []
    for frame in _frames(sample.source, view, row=sample.row):
        stored = frame.shape[:2]
        frames.append(_placed(_channels_first(frame), *view.crop(*stored)))
    assert stored is not None, "iter_frames yields as many frames as times, or raises"
    conditions: dict[str, Any] = {
        name: _load_references(sample, stored=stored)
        if name == REFERENCE
        else _load_condition(name, sample, stored=stored)
        for name in sample.conditions
    }
    if sample.audio is not None:
        conditions[AUDIO] = _load_audio(sample)
    return LoadedSample(_in_range(_joined(frames, view)), view.crop(*stored)[1], conditions)


def _load_audio(sample: FileSample) -> torch.Tensor:
    """Load the sound of a sample's frames, `(2, samples)` of whole tokens; left and right change places in a flip."""
    view, rule = sample.view, sample.audio
    assert rule is not None, "load checks it"
    tokens = int(rule.num_tokens(view.size.frames, view.fps)) if sample.has_audio else 0
    if not tokens:
        return torch.zeros(CHANNELS, 0)
    samples = rule.num_samples(tokens)
    waveform = read_audio(sample.source, start=view.times[0], samples=samples, rate=rule.rate)
    if waveform is None:
        raise MediaError(f"{sample.source.path} has no sound, but its row says so; prepare the data set again.")
    return torch.from_numpy(waveform[::-1].copy() if view.flip else waveform)


def _load_condition(name: str, sample: FileSample, *, stored: tuple[int, int]) -> torch.Tensor:
    """Load a condition of a sample whose file has frames of `stored` height and width."""
    source, view = sample.conditions[name], sample.view
    if source is None:
        return torch.ones(1, *view.size)
    assert isinstance(source, MediaSource), "only references are several files"
    source, still = _opened(name, source, view)
    frames = []
    for frame in _frames(source, view, still=still, is_mask=name == MASK):
        pixels = _channels_first(frame)
        if name == FACE:
            frames.append(pixels[0])
            continue
        check_shape(name, source.path, size=frame.shape[:2], sample=stored)
        frames.append(_placed(pixels.float().mean(1, keepdim=True) if name == MASK else pixels, *view.crop(*stored)))
    stack = _joined(frames, view)
    values = stack / 255 if name == MASK else _in_range(stack)
    return values.expand(-1, view.size.frames, -1, -1) if still and name in FRAME_BY_FRAME else values


def _load_references(sample: FileSample, *, stored: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Load the references of a sample whose file has frames of `stored` height and width.

    Raises:
        MediaError: If they are not those that the row was counted with; and as [`load`].
    """
    sources = sample.conditions[REFERENCE]
    assert isinstance(sources, tuple), "MediaColumns makes a tuple of references"
    alone = len(sources) == 1
    references = tuple(_load_reference(source, sample, stored=stored, alone=alone) for source in sources)
    if sample.reference_sizes is not None:
        counted = np.reshape(sample.reference_sizes, (-1, 3))
        targets = np.tile(sample.view.size, (len(counted), 1))
        sizes = sample.references.sizes(counted, targets, alone=np.full(len(counted), alone)).tolist()
        if sizes != [[*pixels.shape[1:]] for pixels in references]:
            files = ", ".join(source.path for source in sources) or "none"
            raise MediaError(
                f"The references of {sample.source.path} ({files}) are not of the sizes that their row was counted "
                "with; prepare the data set again."
            )
    return references


def _load_reference(source: MediaSource, sample: FileSample, *, stored: tuple[int, int], alone: bool) -> torch.Tensor:
    """Load a reference `(3, frames, height, width)`, at the size and in the manner that the rule of references says.

    `alone` says that it is the only one of its sample.
    """
    view, rule = sample.view, sample.references
    source, still = _opened(REFERENCE, source, view)
    num_frames = 1 if still else view.size.frames
    frames = []
    for frame in _frames(source, view, still=still):
        size = (num_frames, *frame.shape[:2])
        _, height, width = rule.sizes(size, view.size, alone=alone)[0].tolist()
        if rule.lie_over:
            check_shape(REFERENCE, source.path, size=frame.shape[:2], sample=stored)
            resized, resample = (height, width), Image.Resampling[rule.resample.upper()]
            frame = cropped_part(frame, resized, *view.crop(*stored), resample=resample)
        else:
            resized = rule.resized(size, view.size, alone=alone)
        frames.append(_fitted(frame, resized, (height, width), resample=rule.resample))
    return _in_range(_joined(frames, view if rule.lie_over or view.flip_references else None))


def _fitted(
    frame: npt.NDArray[np.uint8], resized: tuple[int, int], size: tuple[int, int], *, resample: str
) -> torch.Tensor:
    """Resize a frame `(h, w, 3)`, and crop its centre or surround it by its reflection, to `(3, height, width)`."""
    if resample != "bicubic" and resized != frame.shape[:2]:
        frame = np.array(Image.fromarray(frame).resize(resized[::-1], Image.Resampling[resample.upper()]))
    around = [max(0, side - inner) for side, inner in zip(size, resized, strict=True)]
    top, left = (max(0, inner - side) // 2 for side, inner in zip(size, resized, strict=True))
    pixels = _placed(_channels_first(frame), resized, CropBox(top, left, *np.minimum(size, resized).tolist()))
    if not any(around):
        return pixels
    # The reflection excludes the edge, unless a picture is smaller than a token, as in diffusers' Flux3ImageProcessor.
    mode: Literal["reflect", "symmetric"] = "reflect" if min(resized) > _SMALL else "symmetric"
    widths = [(0, 0), *((more // 2, more - more // 2) for more in around)]
    return torch.from_numpy(np.pad(pixels.numpy(), widths, mode=mode))


def _opened(name: str, source: MediaSource, view: View) -> tuple[MediaSource, bool]:
    """Return the opened file of a condition, and whether it is an image; raise MediaError for a wrong kind."""
    source = source.opened()
    still = is_image(source)
    check_kind(name, source.path, still=still, sample_is_image=not view.fps)
    return source, still


def _frames(
    source: MediaSource, view: View, *, still: bool = False, is_mask: bool = False, row: MediaInfo | None = None
) -> Iterator[Frame]:
    """Yield the frames that a view picks of a file, or its only one; its row says what it is expected to be."""
    times = [0.0] if still else view.times
    background = None if is_mask else view.background
    return iter_frames(source, times, video_decoder=view.video_decoder, row=row, background=background)


def _channels_first(frame: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(frame).permute(2, 0, 1)[None]


def _placed(pixels: torch.Tensor, resized: tuple[int, int], box: CropBox) -> torch.Tensor:
    """Resize a frame `(1, C, h, w)` and crop it, to `(C, height, width)`; masks, in floating point, stay in range."""
    if resized != pixels.shape[2:]:
        mode = "bilinear" if pixels.is_floating_point() else "bicubic"
        pixels = F.interpolate(pixels, resized, mode=mode, antialias=True)
    return pixels[0, :, box.top : box.top + box.height, box.left : box.left + box.width]


def _joined(frames: list[torch.Tensor], view: View | None = None) -> torch.Tensor:
    """Stack frames `(C, h, w)` along time, and flip them if the view does."""
    stack = torch.stack(frames, 1)
    return stack.flip(-1) if view is not None and view.flip else stack


def _in_range(stack: torch.Tensor) -> torch.Tensor:
    return stack.float() / 127.5 - 1


def load_first_frame(source: MediaSource, size: Size, *, background: str = WHITE) -> Image.Image:
    """Return the first frame of a file, or an image, resized to cover a size and cropped around its centre.

    The pixels are those that training has of that frame in a bucket of that size, transparent parts laid on
    `background`.
    """
    pixels, _ = load_sample(source, View(size=size._replace(frames=1), fps=0.0, background=background))
    return Image.fromarray(((pixels[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def load_face(source: MediaSource, size: Size, *, fps: float) -> torch.Tensor:
    """Load the face of a sample that is rendered, as [`load`] does that of a sample with a file.

    Args:
        source ([`MediaSource`]): Its file.
        size ([`Size`][hf_bucketing.Size]): Frames, height and width of the sample.
        fps (`float`): Frames per second of the sample; 0 for an image.

    Returns:
        `torch.Tensor` of shape `(3, frames, h, w)`: In [−1, 1], of the size of the file.

    Raises:
        MediaError: As [`load`].
    """
    sample = FileSample(source=source, view=View(size=size, fps=fps), conditions={FACE: source})
    return _load_condition(FACE, sample, stored=(size.height, size.width))


def load_references(
    sources: Sequence[MediaSource], size: Size, rule: ReferenceRule, *, fps: float, background: str = WHITE
) -> tuple[torch.Tensor, ...]:
    """Load the references of a sample that is rendered, as [`load`] does those of a sample with a file.

    Args:
        sources (sequence of [`MediaSource`]): Their files.
        size ([`Size`][hf_bucketing.Size]): Frames, height and width of the sample.
        rule ([`ReferenceRule`]): The sizes in which they are shown.
        fps (`float`): Frames per second of the sample; 0 for an image.
        background (`str`): Colour on which transparent parts are laid.

    Returns:
        `tuple` of `torch.Tensor`: `(3, frames, h, w)` each, in [−1, 1].

    Raises:
        MediaError: As [`load`].
    """
    view = View(size=size, fps=fps, background=background)
    return tuple(
        _load_reference(
            source,
            FileSample(source=source, view=view, references=rule),
            stored=(size.height, size.width),
            alone=len(sources) == 1,
        )
        for source in sources
    )


def frame_rates(fps: Sequence[float] | torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the frame rate of each sample, for models that take one; images, whose `fps` is 0, get 1.

    Models divide by the rate to place frames in seconds; 0 would make the positions of images NaN.

    Args:
        fps (sequence of `float`, or `torch.Tensor` of shape `(n,)`): The `fps` of a batch, 0 for images.
        device (`torch.device`, *optional*): Device of the result; by default that of a tensor, or the CPU.
            A tensor that lies on a device already is not checked, as that would wait for the device.

    Returns:
        `torch.Tensor` of shape `(n,)`: Frames per second, all above 0.

    Raises:
        BucketingError: If a rate is negative or not finite.

    Example:
        >>> frame_rates([24.0, 0.0, 16.0])
        tensor([24.,  1., 16.])
    """
    rates = torch.as_tensor(fps)
    rates = rates if rates.is_floating_point() else rates.float()
    if rates.ndim != 1 or (rates.device.type == "cpu" and not (rates.isfinite() & (rates >= 0)).all()):
        raise BucketingError(f"Expected a frame rate of 0 or more for each sample, got {rates.tolist()}.")
    rates = torch.where(rates == 0, _IMAGE_FPS, rates)
    return rates if device is None else to_device(rates, device)
