"""From an epoch plan to batches: samplers and collators for a `torch.utils.data.DataLoader`."""

from ..media.rates import frame_rates
from .bucket_sampler import BucketBatchSampler
from .cached import CachedCollator
from .check import check_loader
from .collators import BucketCollator, PackCollator
from .faults import StandIns
from .groups import BucketGrouping, PackGrouping
from .length_sampler import LengthBatchSampler
from .pack_sampler import PackBatchSampler
from .padding import PadCollator
from .planned import PlannedBatchSampler
from .random_resize import RandomResize
from .resume import ResumableLoader, resume
from .resume_stream import ResumableStream
from .streaming import StreamingBucketBatcher
from .workers import worker_options

__all__ = [
    "BucketBatchSampler",
    "BucketCollator",
    "BucketGrouping",
    "CachedCollator",
    "LengthBatchSampler",
    "PackBatchSampler",
    "PackCollator",
    "PackGrouping",
    "PadCollator",
    "PlannedBatchSampler",
    "RandomResize",
    "ResumableLoader",
    "ResumableStream",
    "StandIns",
    "StreamingBucketBatcher",
    "check_loader",
    "frame_rates",
    "resume",
    "worker_options",
]
