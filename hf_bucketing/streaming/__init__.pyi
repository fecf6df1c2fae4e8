from .batcher import StreamingBucketBatcher as StreamingBucketBatcher
from .config import StreamLimits as StreamLimits
from .grouping import BucketGrouping as BucketGrouping, PackGrouping as PackGrouping
from .resume import ResumableStream as ResumableStream
