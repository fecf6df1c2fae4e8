"""Image and video files: open them from a data set's cells, read their headers, decode their frames.

Needs PyAV and Pillow, and neither torch nor datasets: both `mapping` (headers) and `loading` (frames) stand on it.
"""

from .decode import frame_times, iter_frames
from .probe import MediaInfo, frames_at_fps, probe
from .source import MediaSource
from .video import MAX_PIXELS
from .write import write_video

__all__ = [
    "MAX_PIXELS",
    "MediaInfo",
    "MediaSource",
    "frame_times",
    "frames_at_fps",
    "iter_frames",
    "probe",
    "write_video",
]
