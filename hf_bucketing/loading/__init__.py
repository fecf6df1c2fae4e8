"""From an epoch plan to batches: samplers, collators and transforms for a `torch.utils.data.DataLoader`."""

from .bucket_sampler import BucketBatchSampler
from .check import check_loader
from .collators import BucketCollator, PackCollator
from .length_sampler import LengthBatchSampler
from .pack_sampler import PackBatchSampler
from .planned import PlannedBatchSampler
from .resume import ResumableLoader, resume

__all__ = [
    "BucketBatchSampler",
    "BucketCollator",
    "LengthBatchSampler",
    "PackBatchSampler",
    "PackCollator",
    "PlannedBatchSampler",
    "ResumableLoader",
    "check_loader",
    "resume",
]
