"""Image and video files: open them from a data set's cells, read their headers, decode their frames.

Needs PyAV and Pillow, and neither torch (but for `media.sample` and torchcodec) nor datasets: both `mapping` (headers,
latents) and `loading` (frames) stand on it.
"""

from .decode import frame_times, iter_frames
from .decoders import DecoderName, check_decoder
from .probe import MediaInfo, frames_at_fps, probe
from .rates import frame_rates
from .source import MediaSource
from .video import MAX_PIXELS
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
