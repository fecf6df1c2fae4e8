"""From an epoch plan to batches: samplers and collators for a `torch.utils.data.DataLoader`."""

from .bucket_sampler import BucketBatchSampler
from .captions import CaptionRule
from .check import check_loader
from .collators import BucketCollator, PackCollator
from .equal_epochs import EqualEpochs
from .faults import FaultRule, Replacements
from .length_sampler import LengthBatchSampler
from .occurrences import NumberedRows
from .pack_sampler import PackBatchSampler
from .padding import PadCollator
from .planned import PlannedBatchSampler
from .random_resize import RandomResize
from .resume import ResumableLoader, resume
from .workers import worker_options

__all__ = [
    "BucketBatchSampler",
    "BucketCollator",
    "CaptionRule",
    "EqualEpochs",
    "FaultRule",
    "LengthBatchSampler",
    "NumberedRows",
    "PackBatchSampler",
    "PackCollator",
    "PadCollator",
    "PlannedBatchSampler",
    "RandomResize",
    "Replacements",
    "ResumableLoader",
    "check_loader",
    "resume",
    "worker_options",
]
