"""How a recipe calls its pipeline to render."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from ..buckets.sizes import Size
from ..conditions.names import REFERENCE
from ..errors import BucketingError
from ..media.write import Sound
from .facts import RecipeFacts

IMAGES = ("image", "last_image")
"""Arguments of a pipeline's call for the frames to begin and to end a clip with."""

DURATIONS = ("num_frames", "video_length", "segment_frame_length")
"""Arguments of a pipeline's call for the number of frames."""


class RecipeCalls(RecipeFacts):
    """The pipeline's own call, with sizes, images and references as its arguments."""

    pipeline: Any

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references as arguments of the pipeline's call: by default a list of images.

        Args:
            references (sequence of sequences of `PIL.Image.Image`): The frames of each reference, at the size in which
                it is shown; at least one reference.
            size ([`Size`][hf_bucketing.Size]): Frames, height and width in pixels of what is rendered.

        Raises:
            BucketingError: If the pipeline's call takes no references, or fewer, or none of such a shape.
        """
        name, most = cls.call_arguments().get(REFERENCE), cls.reference_condition().most
        if name is None or len(references) > most:
            takes = "no references" if name is None else f"at most {most} references"
            raise BucketingError(f"The call of a {cls.pipeline_class} takes {takes}, got {len(references)}.")
        for number, (frame, *_) in enumerate(references):
            if fault := cls.reference_rule().shape_fault(frame.height, frame.width):
                raise BucketingError(f"Reference {number} is shown to a {cls.pipeline_class} at {fault}.")
        return {name: [frames[0] for frames in references]}

    @classmethod
    def check_renders(cls, *, references: int, trained: str) -> None:
        """Raise BucketingError if calls of a transformer of the pipeline do not take that many references.

        By default nothing is refused: all transformers of the pipeline take the same.
        """

    @classmethod
    def shown_arguments(cls, conditions: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return what else a rendered sample is shown as arguments of the pipeline's call.

        Args:
            conditions (mapping of `str` to a sequence of `PIL.Image.Image`): Frames of controls, masks and the
                like, by their names in [`call_arguments`].
        """
        only, arguments = cls.family.images_only, cls.call_arguments()
        return {arguments[name]: frames[0] if only else list(frames) for name, frames in conditions.items()}

    def render(
        self,
        prompt: str,
        size: Size,
        *,
        image: Any = None,
        last_image: Any = None,
        references: Any = (),
        **options: Any,
    ) -> np.ndarray:
        """Call the pipeline.

        Args:
            prompt (`str`): Caption.
            size ([`Size`][hf_bucketing.Size]): Frames, height and width in pixels.
            image (`PIL.Image.Image`, *optional*): First frame, for pipelines that take one ([`num_images`]).
            last_image (`PIL.Image.Image`, *optional*): Last frame, for pipelines that take two images.
            references (sequence of sequences of `PIL.Image.Image`): The frames of each reference, for pipelines that
                take some ([`reference_arguments`]).
            options: Further arguments of the pipeline's call.

        Returns:
            `numpy.ndarray` of shape `(frames, height, width, 3)`: In [0, 1].
        """
        images = {"image": image, "last_image": last_image}
        return self.frames_of(self.call(prompt, size, images=images, references=references, **options))

    def call(self, prompt: str, size: Size, *, images: Mapping[str, Any], references: Any = (), **options: Any) -> Any:
        """Call the pipeline as [`render`] does, with `images` that may be None, and return what it returns."""
        named = {name: image for name, image in images.items() if image is not None}
        from_references = self.reference_arguments(references, size) if references else {}
        arguments = {**self.call_defaults, **named, **from_references, **self.size_arguments(size), **options}
        return self.pipeline(prompt=prompt, output_type="np", **arguments)

    def render_with_sound(
        self,
        prompt: str,
        size: Size,
        *,
        fps: float,
        image: Any = None,
        last_image: Any = None,
        references: Any = (),
        **options: Any,
    ) -> tuple[np.ndarray, Sound | None]:
        """Render frames as [`render`] does, and sound that lasts as long as they do at `fps`, where there is some.

        Raises:
            BucketingError: If the pipeline makes sound for another frame rate alone.
        """
        images, rate = {"image": image, "last_image": last_image}, self.sound_arguments(fps)
        result = self.call(prompt, size, images=images, references=references, **rate, **options)
        return self.frames_of(result), self.sound_of(self.pipeline, result)

    @classmethod
    def sound_arguments(cls, fps: float) -> dict[str, Any]:
        """Return the arguments of the pipeline's call by which it makes sound for frames at a rate.

        Raises:
            BucketingError: If it makes sound for another frame rate alone.
        """
        if cls.sound_fps is None:
            return {"frame_rate": fps}
        if fps != cls.sound_fps:
            raise BucketingError(
                f"A {cls.pipeline_class} makes sound for {cls.sound_fps:g} frames per second, got {fps:g}."
            )
        return {}

    @classmethod
    def frames_of(cls, result: Any) -> np.ndarray:
        """Return the frames `(frames, height, width, 3)` of what the pipeline's call returned as arrays."""
        return np.asarray(result.images if "images" in result else result.frames[0])

    @classmethod
    def sound_of(cls, pipeline: Any, result: Any) -> Sound | None:
        """Return the sound of what the call of the pipeline returned; None for models that make none."""
        if not cls.makes_audio():
            return None
        samples = torch.as_tensor(result.audio[0]).float().clamp(-1, 1).cpu().numpy()
        return Sound(np.atleast_2d(samples), attrgetter(cls.sound_rate)(pipeline))

    @classmethod
    def size_arguments(cls, size: Size) -> dict[str, int]:
        """Return the size as arguments of the pipeline's call, which need not take all: some render one frame."""
        sides = {"height": size.height, "width": size.width, **dict.fromkeys(DURATIONS, size.frames)}
        taken = cls.call_parameters()
        return {name: side for name, side in sides.items() if name in taken}
