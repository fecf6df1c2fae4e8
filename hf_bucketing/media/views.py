"""How a sample shows its file: which part (frames, crop, flip), by which decoder, and on which background."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..buckets.sizes import CropBox, Size, cover_resize, crop_box
from ..errors import BucketingError, MediaError, explains_arguments
from ..randomness import Purpose, generator, sample_key
from ..settings import check_literals, check_shares, marked, setting

DecoderName = Literal["pyav", "torchcodec"]
FramePicking = Literal["start", "uniform", "random"]

WHITE = "white"
"""Colour on which transparent parts are laid by default."""

_CENTRE = (0.0, 0.5, 0.5, 1.0)
"""Values of the draws where nothing is random: the first frame, the centre, not flipped."""


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Fix every pixel of a sample: which frames of its file, which crop, and whether it is flipped.

    Args:
        size ([`Size`]): Frames, height and width of the sample.
        fps (`float`): Frame rate to pick frames at; 0.0 for an image.
        start (`int`): First frame, counted at `fps` from `offset` on.
        offset (`float`): Second of the file from which frames are counted, for clips of longer videos.
        position (`tuple[float, float]`): Place of the crop from top to bottom and from left to right, in [0, 1].
        flip (`bool`): Whether left and right are swapped, after the crop.
        flip_references (`bool`): Whether they are swapped in references that do not lie over the sample too.
        video_decoder (`"pyav"` or `"torchcodec"`): Decoder of videos; their pixels may differ by a few levels.
        background (`str`): Colour on which transparent parts are laid.
    """

    size: Size
    fps: float
    start: int = 0
    offset: float = 0.0
    position: tuple[float, float] = (0.5, 0.5)
    flip: bool = False
    flip_references: bool = False
    video_decoder: DecoderName = "pyav"
    background: str = WHITE

    @property
    def times(self) -> list[float]:
        """Times of the frames in the file, in seconds."""
        return [self.offset + time for time in frame_times(self.size.frames, self.fps, start=self.start)]

    def crop(self, height: int, width: int) -> tuple[tuple[int, int], CropBox]:
        """Return what a frame of `(height, width)` pixels is resized to, and the crop in resized pixels.

        Raises:
            BucketingError: If a side is below 1.
        """
        resized = cover_resize(height, width, target=self.size)
        return resized, crop_box(*resized, target=self.size, y=self.position[0], x=self.position[1])


@explains_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRule:
    """Choose the view of each sample: its frames, crop and flip.

    Args:
        random_crop (`bool`): Whether to crop at a random position, instead of in the centre.
        frame_picking (`"start"`, `"uniform"` or `"random"`, *optional*): Frames to take from a longer video: the
            first ones, frames spread evenly from the first to the last (which lowers the frame rate), or consecutive
            ones from a random start. By default `"random"` with random crops, otherwise `"start"`.
        flip_probability (`float`): Probability of mirroring a sample left to right, from 0 to 1. Captions stay as they
            are.
        flip_references (`bool`): Whether the references of a mirrored sample are mirrored too. Samples with references
            are only mirrored with it, unless these lie over them, which are always mirrored together.
        video_decoder (`"pyav"` or `"torchcodec"`): Library that decodes videos. torchcodec must be installed together
            with the shared libraries of FFmpeg.
        background (`str`): Colour on which transparent parts of pictures are laid, such as white, black or #808080.
            Those of a mask are not learned, and a mask of one colour is read from its opacity.

    Raises:
        BucketingError: If the way to pick frames is unknown, the probability is outside [0, 1], `flip_references` has
            no effect, the decoder is unknown or cannot be loaded, or the background is no colour.
    """

    random_crop: bool = setting(True, held_out=False)
    frame_picking: FramePicking | None = None
    flip_probability: float = setting(0.0, held_out=0.0)
    flip_references: bool = setting(False, held_out=False)
    video_decoder: DecoderName = "pyav"
    background: str = WHITE

    def __post_init__(self) -> None:
        check_literals(self)
        check_shares(self, "flip_probability")
        if self.flip_references and not self.flip_probability:
            raise BucketingError("Omit `flip_references`: no effect without `flip_probability`.")
        check_decoder(self.video_decoder)
        check_colour("background", self.background)

    @property
    def num_draws(self) -> int:
        """Number of uniform numbers that a view takes; 0 where nothing is random."""
        if self.flip_probability:
            return 4
        return 3 if self.random_crop or self.frame_picking == "random" else 0

    @property
    def fixed(self) -> ViewRule:
        """The rule without its draws, as held-out samples have it."""
        picking = None if self.frame_picking == "random" else self.frame_picking
        return replace(self, **marked(ViewRule, "held_out"), frame_picking=picking)

    def view(
        self,
        size: Size,
        *,
        num_frames: int,
        fps: float,
        draws: npt.NDArray[np.float64],
        offset: float = 0.0,
        name: str = "the file",
    ) -> View:
        """Choose the view of a file.

        Args:
            size ([`Size`]): Size of the sample.
            num_frames (`int`): Frames of the file at `fps`, or of the clip that begins at `offset`.
            fps (`float`): Frame rate of `num_frames`; 0.0 for an image.
            draws (array of `float`, shape `(num_draws,)`): Uniform numbers in [0, 1): start, vertical and horizontal
                position of the crop, flip.
            offset (`float`): Second of the file at which the clip begins.
            name (`str`): Name of the file in messages.

        Raises:
            MediaError: If the file has too few frames.
        """
        spare = num_frames - size.frames
        if spare < 0:
            raise MediaError(f"{name} has {num_frames} frames, too few for {size}; assign its bucket again.")
        start, y, x, flip = (*map(float, draws), *_CENTRE[len(draws) :])
        picking = self.frame_picking or ("random" if self.random_crop else "start")
        first = {"start": 0, "uniform": 0, "random": min(int(start * (spare + 1)), spare)}[picking]
        if picking == "uniform" and size.frames == 1:
            first = spare // 2
        elif picking == "uniform":
            fps = fps * ((size.frames - 1) / (num_frames - 1))
        return View(
            size=size,
            fps=fps,
            start=first,
            offset=offset,
            position=(y, x) if self.random_crop else (0.5, 0.5),
            flip=flip < self.flip_probability,
            flip_references=self.flip_references and flip < self.flip_probability,
            video_decoder=self.video_decoder,
            background=self.background,
        )


def seeded_draws(count: int, *, seed: int, epoch: int, index: int, occurrence: int = 0) -> npt.NDArray[np.float64]:
    """Return the first uniform numbers in [0, 1) of an occurrence of a sample in an epoch, of shape `(count,)`."""
    key = sample_key(seed=seed, epoch=epoch, index=index, occurrence=occurrence)
    return generator(Purpose.VIEW, *key).random(count)


def check_decoder(video_decoder: str) -> None:
    """Raise unless `video_decoder` is known and can be loaded.

    Raises:
        BucketingError: If it is not; the message says how to install what is missing.
    """
    if video_decoder not in get_args(DecoderName):
        raise BucketingError(f'`video_decoder` must be "pyav" or "torchcodec", got {video_decoder!r}.')
    if video_decoder == "torchcodec":
        torchcodec()


def frame_times(count: int, fps: float, *, start: int = 0) -> list[float]:
    """Return the times in seconds of `count` frames at `fps`, from frame `start` on; all 0.0 for an image (fps 0).

    Example:
        >>> frame_times(3, 8.0, start=4)
        [0.5, 0.625, 0.75]
    """
    return [(start + position) / fps if fps else 0.0 for position in range(count)]


def torchcodec() -> ModuleType:
    """Import torchcodec; newer releases can be imported without FFmpeg, and then report no FFmpeg version."""
    try:
        library = importlib.import_module("torchcodec")
        if library.ffmpeg_major_version is None:
            raise ImportError("it finds no FFmpeg")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BucketingError(
            f'`video_decoder="torchcodec"` cannot be loaded ({reason}). Install a release that fits your torch and '
            'device, pip install "hf_bucketing[torchcodec]", and the shared libraries of FFmpeg, for example apt-get '
            'install ffmpeg; or decode with PyAV (`video_decoder="pyav"`).'
        ) from error
    return library


def check_colour(name: str, colour: str) -> None:
    """Raise unless a text is a colour without transparency, as Pillow and CSS write it.

    Raises:
        BucketingError: If it is not; the message calls it by `name`.
    """
    if colour == WHITE:
        return

    from PIL import ImageColor

    try:
        known = len(ImageColor.getrgb(colour)) == 3
    except ValueError:
        known = False
    if not known:
        raise BucketingError(f"`{name}` must be a colour, such as white, #808080 or rgb(0,128,0); got {colour!r}.")
