"""Image and video files: open them from a data set's cells, read their headers, decode their frames, write them.

Needs PyAV and Pillow; `media.sample` also needs torch.
"""

from typing import TYPE_CHECKING, Any

from .decode import DecoderName, check_decoder, frame_times, iter_frames
from .probe import MAX_PIXELS, MediaInfo, frames_at_fps, probe
from .rows import MediaColumns
from .source import MediaSource
from .views import FramePicking, View, ViewRule, seeded_draws
from .write import write_image, write_video

if TYPE_CHECKING:
    from .sample import frame_rates, load_first_frame

__all__ = [
    "MAX_PIXELS",
    "DecoderName",
    "FramePicking",
    "MediaColumns",
    "MediaInfo",
    "MediaSource",
    "View",
    "ViewRule",
    "check_decoder",
    "frame_rates",
    "frame_times",
    "frames_at_fps",
    "iter_frames",
    "load_first_frame",
    "probe",
    "seeded_draws",
    "write_image",
    "write_video",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used (PEP 562)."""
    if name not in ("frame_rates", "load_first_frame"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import sample

    return getattr(sample, name)
