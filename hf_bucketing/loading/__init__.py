"""From an epoch plan to batches: samplers, collators and transforms for a `torch.utils.data.DataLoader`."""

from .check import check_loader
from .collators import BucketCollator, PackCollator
from .faults import StandIns
from .padding import PadCollator
from .planned import PlannedBatchSampler
from .resume import ResumableLoader, resume
from .samplers import BucketBatchSampler, PackBatchSampler

__all__ = [
    "BucketBatchSampler",
    "BucketCollator",
    "PackBatchSampler",
    "PackCollator",
    "PadCollator",
    "PlannedBatchSampler",
    "ResumableLoader",
    "StandIns",
    "check_loader",
    "resume",
]
