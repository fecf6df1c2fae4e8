from .batcher import StreamingBucketBatcher as StreamingBucketBatcher
from .grouping import BucketGrouping as BucketGrouping, PackGrouping as PackGrouping
from .resume import ResumableStream as ResumableStream
