"""Image and video files: open them from a data set's cells, read their headers, decode their frames, write them.

Needs PyAV and Pillow; `media.sample` also needs torch.
"""

from .decode import DecoderName, check_decoder, frame_times, iter_frames
from .probe import MAX_PIXELS, MediaInfo, frames_at_fps, probe
from .sample import frame_rates
from .source import MediaSource
from .views import FramePicking, View, ViewRule, seeded_draws
from .write import write_video

__all__ = [
    "MAX_PIXELS",
    "DecoderName",
    "FramePicking",
    "MediaInfo",
    "MediaSource",
    "View",
    "ViewRule",
    "check_decoder",
    "frame_rates",
    "frame_times",
    "frames_at_fps",
    "iter_frames",
    "probe",
    "seeded_draws",
    "write_video",
]
