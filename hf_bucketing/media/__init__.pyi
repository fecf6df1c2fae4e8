from .decode import iter_frames as iter_frames
from .probe import MAX_PIXELS as MAX_PIXELS, MediaInfo as MediaInfo, frames_at_fps as frames_at_fps, probe as probe
from .rows import MediaColumns as MediaColumns
from .sample import frame_rates as frame_rates, load_first_frame as load_first_frame
from .source import MediaSource as MediaSource
from .views import (
    DecoderName as DecoderName,
    FramePicking as FramePicking,
    View as View,
    ViewRule as ViewRule,
    check_decoder as check_decoder,
    frame_times as frame_times,
    seeded_draws as seeded_draws,
)
from .write import write_image as write_image, write_video as write_video
