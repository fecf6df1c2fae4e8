from .bucket_sampler import BucketBatchSampler as BucketBatchSampler
from .captions import CaptionRule as CaptionRule
from .collators import BucketCollator as BucketCollator, PackCollator as PackCollator
from .equal_epochs import EqualEpochs as EqualEpochs
from .faults import FaultLog as FaultLog, FaultRule as FaultRule, Replacements as Replacements
from .length_sampler import LengthBatchSampler as LengthBatchSampler
from .occurrences import NumberedRows as NumberedRows
from .pack_sampler import PackBatchSampler as PackBatchSampler
from .padding import PadCollator as PadCollator
from .planned import PlannedBatchSampler as PlannedBatchSampler
from .random_resize import RandomResize as RandomResize
from .resume import ResumableLoader as ResumableLoader, check_loader as check_loader, resume as resume
from .workers import worker_options as worker_options
